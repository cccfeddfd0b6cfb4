"""What a web page in somebody's browser may make it send here: nothing that writes, and under a name that is not ours nothing at all.

Browsers say of every request which host it is for, and of every one that writes which site's page sent it (`Origin`). A page can neither
leave these out nor change them. Programs send no Origin.
"""

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from datasetserver.refused import Refused


class Names:
    """The names of this server: an address (as numbers), localhost, this machine's own name, and `urls` and `hosts`, which its host gave.

    A page that has its own name lead to this machine (DNS rebinding) needs a name of its own, so numbers need no list.
    """

    def __init__(self, urls: Iterable[str] = (), hosts: Iterable[str] = ()):
        urls = [url for url in urls if url]
        self._origins = {_origin(url) for url in urls}
        own = (socket.gethostname(), f"{socket.gethostname()}.local", "localhost")
        self._hosts = {name.lower().rstrip(".") for name in (*own, *hosts, *(urlsplit(url).hostname or "" for url in urls)) if name}

    def check(self, headers: Mapping[str, str], *, writes: bool) -> None:
        """Raises Refused: 421 for another's name; for what writes, 403 for another site's page, 415 for a body that is not said to be JSON."""
        host = headers.get("Host", "")
        if host and not self._is_ours(host):
            fix = "Use its address, or its --public_url. The host can name more: --server_names."
            raise Refused(421, "other_host", f"This server does not go by the name {host[:100]!r}.", fix)
        if not writes:
            return
        origin = headers.get("Origin")
        if origin is not None and origin not in self._origins and origin not in (f"http://{host}", f"https://{host}"):
            raise Refused(403, "other_origin", f"A page of {origin[:100]!r} sent this.", "Pages of other sites may not write here.")
        if headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "unsupported_media_type", "The body is not said to be JSON.", "Send Content-Type: application/json.")

    def _is_ours(self, host: str) -> bool:
        name = name_in(host)
        if name.rstrip(".") in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return False
        return True


def name_in(host: str) -> str:
    """The name in a Host header, in small letters; '' where it has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _origin(url: str) -> str:
    """As a browser writes it: without the scheme's own port."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port and parts.port != {"http": 80, "https": 443}.get(parts.scheme) else ""
    name = parts.hostname or ""
    return f"{parts.scheme}://{f'[{name}]' if ':' in name else name}{port}"
