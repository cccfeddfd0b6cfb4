"""Requests to a dataset server: with a token, tried again with back-off and jitter, and never sooner than Retry-After says."""

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic import BaseModel, ValidationError

from swarm import protocol
from swarm.errors import ExitCode, UserError, why
from swarm.signed_request import CLOCK_DIFFERS, Signer

log = logging.getLogger(__name__)
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
JITTER = 0.25
"""A pause is longer or shorter by up to this share, at random, so that a swarm does not come back as one."""
_MAX_ANSWER_BYTES = 64 << 20
_LONGEST_WAIT_SECONDS = 3600
_NO_TOTAL = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)


class ServerAway(Exception):
    """No answer, or one that says to try later: not before `wait_seconds` have passed, where it says when.

    busy: the server is there and well, and wants us to wait. paused: because its host has paused the run.
    """

    def __init__(self, message: str, wait_seconds: float = 0.0, *, busy: bool = False, paused: bool = False):
        super().__init__(message)
        self.wait_seconds, self.busy, self.paused = wait_seconds, busy or paused, paused


class Refusal(Exception):
    """The server understood and said no."""

    def __init__(self, status: int, error: protocol.ErrorBody):
        super().__init__(f"{error.message} {error.fix}")
        self.status, self.code, self.error = status, error.code, error


@dataclass(frozen=True)
class Reply:
    """Whatever a server answered. error: what it says went wrong, None when it does not say so as a dataset server would."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def error(self) -> protocol.ErrorBody | None:
        if self.status < 300:  # each answer is asked, and parsing a good one as an error costs as much as reading it
            return None
        try:
            return protocol.ErrorAnswer.model_validate_json(self.body).error
        except ValidationError:
            return None

    @property
    def code(self) -> str:
        return self.error.code if self.error else ""


def open_session() -> aiohttp.ClientSession:
    """Answers come as they are, and nothing is decompressed: aiohttp would make 256 MB of 0.25 MB before anybody can count them."""
    return aiohttp.ClientSession(auto_decompress=False, headers={"Accept-Encoding": "identity"})


async def exchange(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    path: str,
    body: Any = None,
    *,
    seconds: float | None = None,
    token: str = "",
    signer: Signer | None = None,
) -> Reply:
    """One request and its answer. Raises ServerAway without one in `seconds`, and UserError (AUTH) when the server wants another token.

    signer: signs it in its peer's name, once more when the server's clock is another than ours.
    """
    timeout = aiohttp.ClientTimeout(total=seconds) if seconds else _NO_TOTAL
    data = None if body is None else json.dumps(body).encode()
    headers = {**_authorization(token), **({} if data is None else {"Content-Type": "application/json"})}
    for last in (signer is None, True):
        signed = signer.headers(method, path, data or b"") if signer else {}
        try:
            where = join_url(url, path)
            async with session.request(method, where, data=data, timeout=timeout, headers={**headers, **signed}, allow_redirects=False) as response:
                _refuse_redirect(response)
                reply = Reply(response.status, await _read(response), response.headers)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise ServerAway(why(error)) from error
        if last or reply.code != CLOCK_DIFFERS or not signer.learn(reply.headers):
            break
    _refuse_stranger(url, reply)
    return reply


def checked(reply: Reply) -> Reply:
    """`reply`, which is a good one. Raises ServerAway when it says to try later or is no dataset server's, Refusal when it says no."""
    if reply.status < 300:
        return reply
    error, wait = reply.error, retry_after(reply.headers)
    if error is None:
        raise ServerAway(f"status {reply.status} and something that is not an answer of a dataset server", wait)
    if error.code == "run_paused":
        raise ServerAway(error.message, wait, paused=True)
    if reply.status >= 500 or reply.status == 429:
        raise ServerAway(f"status {reply.status}: {error.message}", wait, busy=reply.status == 429)
    raise Refusal(reply.status, error)


def join_url(url: str, path: str) -> str:
    return url.rstrip("/") + path


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks us to wait, at most an hour; 0 when it does not say. A date, RFC 9110's other form, is said as a minute."""
    said = headers.get("Retry-After", "").strip()
    return float(min(int(said), _LONGEST_WAIT_SECONDS)) if said.isdecimal() and len(said) < 10 else 60.0 if said else 0.0


class Backoff:
    """Pauses between tries: 1, 2, 4 .. 30 seconds, each with jitter, and at least what the server asks for; just that while it is only busy."""

    def __init__(self, sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep, uniform: Callable[[float, float], float] = random.uniform):
        self._sleep, self._uniform, self._seconds, self._told = sleep, uniform, FIRST_PAUSE_SECONDS, ""

    async def wait(self, what: str, away: ServerAway) -> None:
        self._tell(what, away)
        asked_for = away.wait_seconds * self._uniform(1.0, 1 + JITTER)
        if away.busy and asked_for:  # it is well and says when: after a pause of a minute the run goes on in seconds for everybody
            return await self._sleep(asked_for)
        pause = self._seconds * self._uniform(1 - JITTER, 1 + JITTER)
        await self._sleep(max(pause, asked_for))
        self._seconds = min(2 * self._seconds, LONGEST_PAUSE_SECONDS)

    def _tell(self, what: str, away: ServerAway) -> None:
        """Why we wait, aloud only where that is another reason than before."""
        before, self._told = self._told, "paused" if away.paused else "away"
        level = logging.DEBUG if self._told == before else logging.INFO if away.paused else logging.WARNING
        if away.paused:
            log.log(level, "%s; waiting", str(away).rstrip("."))
        else:
            log.log(level, "the dataset server is away (%s): %s", what, away)


class Transport:
    """Talks to one server in one event loop; open it with `async with`. away_since: when it was first found away; None while it is there.

    signer: signs what is posted; None for who only reads. session: opens a way to the server. uniform: draws the jitter.
    found_away: called when the server is found away, once until it is back.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        signer: Signer | None = None,
        clock: Callable[[], float] = time.monotonic,
        session: Callable[[], aiohttp.ClientSession] = open_session,
        uniform: Callable[[float, float], float] = random.uniform,
        found_away: Callable[[], None] = lambda: None,
    ):
        self._found_away = found_away
        self.url, self._token, self._signer, self._clock = url, token, signer, clock
        self._open_session, self._uniform = session, uniform
        self.away_since: float | None = None

    def backoff(self) -> Backoff:
        return Backoff(uniform=self._uniform)

    async def __aenter__(self) -> "Transport":
        self._session = self._open_session()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, path: str, body: Mapping[str, Any], model: type[BaseModel] | None = None) -> Any:
        """The answer as `model`. Raises ServerAway, Refusal, and UserError (AUTH) when the server no longer takes our token."""
        return await self._call("POST", path, body, model, 30.0)

    async def insist(self, path: str, body: Mapping[str, Any], model: type[BaseModel] | None = None) -> Any:
        """`post` until the server answers. Raises Refusal and UserError."""
        return await self._until_there(lambda: self.post(path, body, model), path)

    async def insist_get(self, path: str) -> Reply:
        return await self._until_there(lambda: self._call("GET", path, None, None, None), path)

    @asynccontextmanager
    async def stream(self, path: str, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """A GET whose body is read by the caller; its status is 200 or 206. Raises ServerAway, also when it breaks off, Refusal and UserError."""
        with self._noticing():
            try:
                url = join_url(self.url, path)
                asked = {**headers, **_authorization(self._token)}
                async with self._session.get(url, headers=asked, timeout=_NO_TOTAL, allow_redirects=False) as response:
                    _refuse_redirect(response)
                    if response.status not in (200, 206):
                        reply = Reply(response.status, await _read(response), response.headers)
                        _refuse_stranger(self.url, reply)
                        raise ServerAway(f"status {checked(reply).status}")
                    self.away_since = None
                    yield response
            except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError) as error:
                raise ServerAway(why(error)) from None

    def away_seconds(self) -> float:
        """For how long nothing has been heard of the server; 0 while it is there."""
        return self._clock() - self.away_since if self.away_since is not None else 0.0

    async def _call(self, method: str, path: str, body: Any, model: type[BaseModel] | None, seconds: float | None) -> Any:
        signer = self._signer if method == "POST" else None
        with self._noticing():
            reply = checked(await exchange(self._session, method, self.url, path, body, seconds=seconds, token=self._token, signer=signer))
            try:
                answer = model.model_validate_json(reply.body) if model else reply
            except ValidationError:
                raise ServerAway("something that is not an answer of a dataset server") from None
        self.away_since = None
        return answer

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Notice whether the server is there, by how talking to it ends: who refuses is."""
        try:
            yield
        except ServerAway as away:
            raise self._away(away) from None
        except Refusal:
            self.away_since = None
            raise

    async def _until_there(self, call: Callable[[], Awaitable[Any]], what: str) -> Any:
        backoff = self.backoff()
        while True:
            try:
                return await call()
            except ServerAway as away:
                await backoff.wait(what, away)

    def _away(self, away: ServerAway) -> ServerAway:
        if away.busy:
            self.away_since = None
        elif self.away_since is None:
            self.away_since = self._clock()
            self._found_away()
        return away


def _authorization(token: str) -> dict[str, str]:
    """The header that shows a token; none without one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def _refuse_redirect(response: aiohttp.ClientResponse) -> None:
    """Raise ServerAway where the server sends us on: a host could have all peers ask somebody else's machine, or one of their own network."""
    if 300 <= response.status < 400:
        place = ascii(response.headers.get("Location", ""))[1:200].rstrip("'")
        raise ServerAway(f"status {response.status}: it sends on to {place or 'nowhere'}; if that is the server, give its URL")


def _refuse_stranger(url: str, reply: Reply) -> None:
    """Raise UserError (exit code AUTH) when the server wants a token, or another one, or its host has banned us."""
    if reply.error and (reply.status == 401 or reply.code == protocol.BANNED):
        raise UserError(f"{url}: {reply.error.message}", fix=reply.error.fix, code=ExitCode.AUTH)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, which may not be endless. Raises ServerAway for one that is too long."""
    body = bytearray()
    async for piece in response.content.iter_chunked(1 << 16):
        body += piece
        if len(body) > _MAX_ANSWER_BYTES:
            raise ServerAway(f"an answer of more than {_MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(body)
