"""What stands before every handler: limits, then what a browser may be made to send, then tokens; and every failure leaves in the one form of
errors, no answer for a store that others read from.
"""

import logging
import sqlite3
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from datasetserver import answers
from datasetserver.addresses import caller_address, is_this_machine
from datasetserver.limits import Limits, subject
from datasetserver.metrics import Metrics
from datasetserver.openapi import Endpoint
from datasetserver.origins import Names, name_in
from datasetserver.owners import Sender
from datasetserver.refused import Refused
from datasetserver.tokens import Holder, Tokens
from swarm import protocol

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_HOLDER = "holder"
_READING = ("GET", "HEAD")


class Gate:
    """tokens: None where everybody may pass. names: under which the server is known."""

    def __init__(self, endpoints: Iterable[Endpoint], tokens: Tokens | None, limits: Limits, metrics: Metrics, names: Names):
        self._endpoints = {endpoint.handler: endpoint for endpoint in endpoints}
        self._tokens, self._limits, self._metrics, self._names = tokens, limits, metrics, names
        self._warned = False

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        endpoint = self._endpoints.get(request.match_info.handler)
        with self._metrics.watch(endpoint.path if endpoint else "none", request.method) as watched:
            response = await errors_as_json(request, handler, self._admitted, endpoint)
            watched.status = response.status
            return response

    async def _admitted(self, request: web.Request, handler: Handler, endpoint: Endpoint | None) -> web.StreamResponse:
        self._notice_a_silent_proxy(request)
        with self._limits.admit(caller(request), _body_bytes(request, endpoint)):
            self._names.check(request.headers, writes=endpoint is not None and endpoint.method not in _READING)
            if self._guards(endpoint):
                request[_HOLDER] = _holder(request, self._tokens)
            return await handler(request)

    def _notice_a_silent_proxy(self, request: web.Request) -> None:
        """Once: a proxy on this machine that does not say whom it speaks for. All its callers count as this machine, which has no limits."""
        if self._warned or "X-Forwarded-For" in request.headers or not is_this_machine(request.remote or ""):
            return
        named = name_in(request.headers.get("Host", ""))
        if named and named != "localhost" and not is_this_machine(named):
            self._warned = True
            log.warning(
                "a program on this machine asks for %s without X-Forwarded-For: if it is a proxy, all its callers count as this machine, and "
                "have no limits. Let it set that header (docs/host.md)", named[:100],
            )  # fmt: skip

    def _guards(self, endpoint: Endpoint | None) -> bool:
        return self._tokens is not None and endpoint is not None and not endpoint.public

    async def keep_private(self, request: web.Request, response: web.StreamResponse) -> None:
        """Before any answer's head leaves: no proxy's store may give it to others, unless the handler says so and no token is asked for."""
        response.headers.setdefault("Cache-Control", "no-store")
        if self._guards(self._endpoints.get(request.match_info.handler)):
            response.headers["Cache-Control"] = response.headers["Cache-Control"].replace("public", "private")
            response.headers["Vary"] = "Authorization"


def caller(request: web.Request) -> str:
    # All lines of that name: HAProxy adds one of its own after those that the caller sent.
    forwarded = [value for name, value in request.headers.items() if name.lower() == "x-forwarded-for"]
    return caller_address(request.remote, ", ".join(forwarded))


def holds_token(request: web.Request) -> bool:
    """Whether the caller showed a token; never where none is asked for."""
    return _HOLDER in request


def is_admitted(request: web.Request, tokens: Tokens | None) -> bool:
    """Whether a stream that began with this request may go on: whether the token that it showed opens anything still."""
    try:
        return not holds_token(request) or _holder(request, tokens) == holder_of(request)
    except Refused:
        return False


def sender(request: web.Request, tokens: Tokens | None) -> Sender:
    """For the ledger: who speaks, on whose account."""
    return Sender(holder_of(request).name, tokens.names() if tokens else (), subject(caller(request)))


def holder_of(request: web.Request) -> Holder:
    """Whose token the caller showed; of no name where none is asked for."""
    return request.get(_HOLDER, Holder(""))


def _holder(request: web.Request, tokens: Tokens) -> Holder:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        fix = "Ask the host for a token, and give it as DD_TOKEN or --token."
        raise answers.RefusedWith(401, "token_needed", "This server is for those who hold a token.", fix, {"WWW-Authenticate": "Bearer"})
    holder = tokens.holder(token.strip())
    if holder is None:
        header = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
        raise answers.RefusedWith(401, "token_wrong", "This token opens nothing here.", "Check it, or ask the host for another.", header)
    return holder


def _body_bytes(request: web.Request, endpoint: Endpoint | None) -> int:
    """How much memory the body may take: what it announces, or the most there can be; none where nobody reads it."""
    if endpoint is None or endpoint.asks is None or not request.body_exists:
        return 0
    length = request.content_length
    return protocol.MAX_BODY_BYTES if length is None else length if length <= protocol.MAX_BODY_BYTES else 0  # larger: refused unread


async def errors_as_json(
    request: web.Request,
    handler: Handler,
    admitted: Callable[[web.Request, Handler, Endpoint | None], Awaitable[web.StreamResponse]],
    endpoint: Endpoint | None,
) -> web.StreamResponse:
    """What `admitted` answers; every failure in the one form of errors."""
    try:
        return await admitted(request, handler, endpoint)
    except Refused as refused:
        return answers.refusal(refused)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return answers.http_error(error)
    except sqlite3.Error as error:
        fix = "Try again; the host must free some disk."
        return answers.error(503, "ledger_unavailable", f"The ledger cannot be written: {error}.", fix)
    except (ConnectionError, TimeoutError):
        raise
    except Exception:
        log.exception("a request failed: %s %s", request.method, request.path)
        return answers.error(500, "internal", "The server made a mistake.", "Tell the host to look at its log.")
