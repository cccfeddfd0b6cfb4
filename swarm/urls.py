"""URLs of dataset servers that people type, checked before anybody waits for an answer."""

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


def _is_url(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not set(text) & set(" \t\n,")
    except ValueError:
        return False
