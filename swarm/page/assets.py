"""The page's files, with the headers that keep what strangers wrote from becoming code. Nothing here is secret: data needs the token.

Charts are drawn by Chart.js as the package `chartkick` ships it (docs/decisions/0009): nothing of it is copied here, nothing fetched elsewhere.
"""

import functools
import gzip
import importlib.resources
from dataclasses import dataclass

from aiohttp import web
from blake3 import blake3

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
INDEX = "index.html"
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_OURS = (INDEX, "page.css", "page.js", "icon.svg")
NAMES = (*_OURS, "chart.js")


@dataclass(frozen=True)
class Asset:
    content_type: str
    body: bytes
    zipped: bytes
    etag: str


@functools.cache
def asset(name: str) -> Asset:
    """One of NAMES, read once. Raises FileNotFoundError when the installed chartkick lacks what it always shipped."""
    if name in _OURS:
        source = importlib.resources.files("swarm.page") / "static" / name
    else:
        source = importlib.resources.files("chartkick") / "django" / "static" / "chartkick" / "Chart.bundle.js"
    body = source.read_bytes()
    return Asset(_KINDS[name.rpartition(".")[2]], body, gzip.compress(body, mtime=0), blake3(body).hexdigest()[:32])


def respond(request: web.Request, name: str) -> web.Response:
    """The asset `name`, compressed for who can take that; 304 to who has it."""
    found = asset(name)
    headers = {**SECURITY_HEADERS, "ETag": f'"{found.etag}"', "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if f'"{found.etag}"' in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    zipped = "gzip" in request.headers.get("Accept-Encoding", "")
    if zipped:
        headers["Content-Encoding"] = "gzip"
    return web.Response(
        body=found.zipped if zipped else found.body,
        content_type=found.content_type,
        charset=None if found.content_type.startswith("image") else "utf-8",
        headers=headers,
    )
