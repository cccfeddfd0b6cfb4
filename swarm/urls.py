"""URLs and tokens of dataset servers that people type, checked before anybody waits for an answer."""

import urllib.parse

from swarm.errors import UserError


def check_url(url: str, option: str = "", fix: str = "It looks like http://203.0.113.7:9090.") -> None:
    """Raises UserError, which says what is probably meant where only the scheme is missing. option: whose value it is; '': of an argument."""
    name = f"{option}, '{url}'," if option else f"'{url}'"
    if _is_url(url):
        if urllib.parse.urlsplit(url).username is not None:
            of = f" of {option}" if option else ""
            raise UserError(f"The URL{of} has a name or a password in it, and all peers of the run can read it.", fix="Leave that out; use a token.")
        return
    if "://" not in url and _is_url(f"http://{url}"):
        raise UserError(f"{name} does not say http or https.", fix=f"Write http://{url}, or https:// if the host serves that.")
    raise UserError(f"{name} is not a URL.", fix=fix)


def check_token(token: str) -> None:
    """Raises UserError for what no header can bring, such as the quotation marks that a mail program puts in."""
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise UserError("token contains characters that are not allowed.", fix="Copy it whole, without spaces.")


def _is_url(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        host = (parts.hostname or "").encode("idna")  # refuses 203.0.113..7
        sent = parts.path + parts.query
        return parts.scheme in ("http", "https") and bool(host) and parts.port != 0 and sent.isascii() and not set(text) & set(" \t\n,")
    except ValueError:
        return False
