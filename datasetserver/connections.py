"""Connections: how many, how long without a request, how errors below HTTP are said; TLS."""

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from datasetserver import answers
from datasetserver.limits import subject
from datasetserver.metrics import Metrics
from swarm.errors import UserError
from swarm.files import raise_open_limit

log = logging.getLogger(__name__)
HEAD_SECONDS = 30.0
"""A connection on which no whole request head arrives within this time is closed; peers renew their leases every 20 s."""
STALL_SECONDS = 60.0
"""So is one that does not take our bytes: the kernel then gives it up (TCP_USER_TIMEOUT)."""
AT_ONCE_OF_ONE = 256
_HANDSHAKE_SECONDS = 10.0
_BACKLOG = 1024
_SPARE_FILES = 128  # for the ledger, shards that are being read, the DHT node's pipes


def tls(certificate: str, key: str) -> ssl.SSLContext:
    """Raises UserError when the files are no certificate chain with its key, both in PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for path, flag in ((certificate, "--tls_cert"), (key, "--tls_key")):
        if not Path(path).is_file():
            raise UserError(f"There is no file {path}.", fix=f"Check {flag}.")
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # without: a key with a password asks the terminal
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{certificate} and {key} are not a certificate and its key: {reason}.",
            fix="Give PEM files that belong together, the key without a password.",
        ) from None
    return context


async def accept(
    runner: web.AppRunner,
    sock: socket.socket,
    metrics: Metrics,
    context: ssl.SSLContext | None,
    *,
    head_seconds: float = HEAD_SECONDS,
    most: int | None = None,
) -> asyncio.AbstractServer:
    """Serve the runner's application on a listening socket; `drain` ends that. most: connections at a time; None: what files allow."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STALL_SECONDS))  # accepted sockets inherit it
    open_connections = Open(_room_for_files() if most is None else most, metrics)
    loop = asyncio.get_running_loop()
    limits = {"keepalive_timeout": head_seconds, "access_log": None, "auto_decompress": False, "lingering_time": 5.0}
    kwargs = {"ssl": context, **({"ssl_handshake_timeout": _HANDSHAKE_SECONDS} if context else {})}
    return await loop.create_server(
        lambda: _Connection(runner.server, open_connections, loop, limits), sock=sock, backlog=_BACKLOG, **kwargs
    )


async def drain(server: asyncio.AbstractServer, runner: web.AppRunner, seconds: float) -> None:
    """Let nobody new in, close idle connections at once, and give requests that have begun `seconds` to be answered.

    Not `runner.cleanup()`, which must follow: it drops what arrives from then on, so that no body on its way would get an answer.
    """
    server.close()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while [1 for connection in runner.server.connections if not connection.leave_if_idle()] and loop.time() < deadline:
        await asyncio.sleep(0.05)


def _room_for_files() -> int:
    """How many connections there is room for."""
    return max(16, raise_open_limit() - _SPARE_FILES) // 3  # a shard on its way: 3 files


class Open:
    """The open connections, by whom they are from."""

    def __init__(self, most: int, metrics: Metrics):
        self._most, self._metrics, self._all = most, metrics, 0
        self._by = Counter[str | None]()

    def enter(self, address: str) -> Callable[[], None] | None:
        """What to call when the connection is over; None when it must not begin."""
        name = subject(address)
        if self._all >= self._most or (name is not None and self._by[name] >= AT_ONCE_OF_ONE):
            self._metrics.refused_connection()
            return None
        self._change(name, 1)
        return lambda: self._change(name, -1)

    def _change(self, name: str | None, count: int) -> None:
        self._all += count
        self._by[name] += count
        if not self._by[name]:
            del self._by[name]
        self._metrics.connected(count)


class _Connection(web.RequestHandler):
    """aiohttp's, with a place among those that may be open, and with errors of our form for what is no HTTP."""

    __slots__ = ("_leave", "_open")

    def __init__(self, server: web.Server, open_connections: Open, loop: asyncio.AbstractEventLoop, limits: dict):
        super().__init__(server, loop=loop, **limits)
        self._open, self._leave = open_connections, None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._leave = self._open.enter((transport.get_extra_info("peername") or [""])[0])
        if self._leave is None:
            transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        leave, self._leave = self._leave, None
        if leave:
            leave()

    def leave_if_idle(self) -> bool:
        """Close this connection if no request has begun on it; returns whether it did."""
        waits = self._waiter is not None and not self._waiter.done()
        if waits:
            self.close()
            self.transport.close()
        return waits

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        if request.writer.output_size > 0:
            raise ConnectionResetError("a part of the answer is sent already")
        log.debug("no HTTP from %s: %s", request.remote, exc)
        if isinstance(exc, LineTooLong):
            response = answers.error(431, "request_header_fields_too_large", "A line of the request's head is too long.", "Send less.")
        else:
            response = answers.error(400, "bad_request", "This is not HTTP as we know it.", "Speak HTTP/1.1, and TLS only to an https URL.")
        response.force_close()
        return response
