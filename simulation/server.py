"""The dataset server of a world: its handlers, ledger and rules are the product's own; HTTP and its machine are modelled.

One commit takes a drawn fsync and holds what was asked meanwhile. A crash loses what was not committed: the book is read again from SQLite.
"""

import asyncio
import contextvars
import random
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
from blake3 import blake3
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from multidict import CIMultiDict

from datasetserver.app import ENDPOINTS
from datasetserver.book import Book
from datasetserver.config import ServerConfig
from datasetserver.gate import errors_as_json
from datasetserver.ledger import Writer
from datasetserver.openapi import Endpoint
from datasetserver.owners import Sender
from datasetserver.proven import Proven
from datasetserver.server import make_book
from datasetserver.service import SERVICE
from datasetserver.signed import Signatures
from simulation.disk import Disk
from simulation.loop import OWNER
from simulation.records import signed
from swarm.bans import Bans, sign_word
from swarm.digest import canonical_json, digest_bytes
from swarm.end import End, sign_extension
from swarm.protocol import Manifest, Shard
from swarm.run_config import RunConfig
from swarm.signing import SIGNATURE_HEADER, BadSignature, HostKey
from swarm.tasks import within

if TYPE_CHECKING:
    from simulation.machine import Machine
    from simulation.world import World

URL = "http://dataset.server:9090"
_STRANGERS_TOKEN = "strangers"
_SHARDS, _SHARD_SAMPLES, _SHARD_BYTES = 24, 16, 512
_FSYNC_SECONDS = (0.002, 0.02)
_LATENCY_SECONDS = 0.02
_CORRUPT_SHARE = 0.01
_EPOCH = 1.7e9
_ROUTES = [(endpoint, re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[0-9a-z]+)", endpoint.path))) for endpoint in ENDPOINTS]
_FIXED = {(endpoint.method, endpoint.path): endpoint for endpoint in ENDPOINTS if "{" not in endpoint.path}


class Dataset:
    """Shards of noise. The host's key follows from the seed as well."""

    def __init__(self, seed: int):
        rng = random.Random(f"dataset {seed}")
        contents = [rng.randbytes(_SHARD_BYTES) for _ in range(_SHARDS)]
        ones = [1] * _SHARD_SAMPLES
        shards = [
            Shard(index=index, digest=blake3(data).hexdigest(), bytes=len(data), samples=len(ones), widths=ones, heights=ones, image_bytes=ones)
            for index, data in enumerate(contents)
        ]
        self.manifest = Manifest.of(shards)
        self.body = canonical_json(self.manifest.model_dump())
        self.digest = digest_bytes(self.body)
        self.blobs = {shard.digest: data for shard, data in zip(shards, contents, strict=True)}
        pem = Ed25519PrivateKey.from_private_bytes(rng.randbytes(32)).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path = Disk(rng).root() / "host.key"
        with path.open("wb") as file:
            file.write(pem)
        self.key = HostKey(path)


class SimKey:
    """As `swarm.peer_key.PeerKey`, whose real signatures are different each time."""

    def __init__(self, peer_id: str):
        self.peer_id, self.public = peer_id, f"key-of-{peer_id}"

    def sign(self, statement: bytes) -> str:
        return blake2b(statement, key=self.peer_id.encode()[:64]).hexdigest()


def _verify(peer: str, statement: bytes, key: str, signature: str) -> None:
    expected = SimKey(peer)
    if key != expected.public or signature != expected.sign(statement):
        raise BadSignature(f"its signature is not that of {peer}")


class _Process:
    """The server's, for the loop."""

    def __init__(self) -> None:
        self.name, self.machine = "server", SimpleNamespace(short="dataset")
        self.stopped = self.dead = False
        self.held: list[asyncio.Handle] = []
        self.context = contextvars.copy_context()
        self.context.run(OWNER.set, self)

    def job(self, call: Callable[[], Any]) -> tuple[Any, float, Callable[[], None]]:
        return call(), 0.001, lambda: None


class _Ledger:
    """As `ledger.Ledger`, in the loop instead of a thread."""

    def __init__(self, writer: Writer, loop: asyncio.AbstractEventLoop, rng: random.Random, committed: Callable[[Book], None]):
        self.writer, self._loop, self._rng, self._committed = writer, loop, rng, committed
        self._waiting: list[tuple[Callable[[Book], Any], asyncio.Future]] = []

    async def call(self, operation: Callable[[Book], Any]) -> Any:
        future = self._loop.create_future()
        self._waiting.append((operation, future))
        if len(self._waiting) == 1:
            self._loop.call_later(self._rng.uniform(*_FSYNC_SECONDS), self._commit)
        return await future

    def _commit(self) -> None:
        batch, self._waiting = self._waiting, []
        outcomes = self.writer.commit([operation for operation, _ in batch])
        if self.writer.book is not None:
            self._committed(self.writer.book)
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


class _Orders:
    """As `orders.Orders`."""

    def __init__(self, bans: Bans) -> None:
        self.state, self.total, self._bans = "running", 0, bans

    def __call__(self) -> str:
        return self.state

    def extended(self) -> int:
        return self.total

    def discarded(self) -> frozenset[str]:
        return self._bans.discarded


class Server:
    """away: it does not run. slow_seconds: how long an answer takes at most. lost: of all answers, those that break off."""

    def __init__(self, world: "World", run: RunConfig, dataset: Dataset, lease_seconds: float):
        self._world, self._rng, self.run, self.dataset = world, random.Random(world.rng.getrandbits(64)), run, dataset
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        periods = dict.fromkeys(("lease_seconds", "grace_seconds", "copy_seconds"), lease_seconds)
        self.bans = Bans(run, dataset.key.public, clock=world.loop.time, rng=self._rng)
        self.orders, self.config = _Orders(self.bans), ServerConfig(dataset="shards", **periods)
        self.slow_seconds = self.lost = 0.0
        self.end = End(run, dataset.key.public)
        self.proven = Proven(run, None, lambda peer, statement, key, signature: signature == signed(peer, statement), world.loop.time)
        self.requests = 0
        self._open: dict[asyncio.Future, None] = {}
        self._service: Any = None
        self.boot()

    @property
    def away(self) -> bool:
        return self._process.dead

    @property
    def book(self) -> Book:
        """As it is on the disk and, while the server runs, in memory."""
        writer = self._service.ledger.writer
        return writer.book or writer._make_book(self._db)

    def boot(self) -> None:
        loop, self._process = self._world.loop, _Process()
        writer = Writer(self._db, where="the ledger", run=self.run, make_book=self._make_book)
        ledger = _Ledger(writer, loop, self._rng, self._world.checks.ledger.look)
        self._service = SimpleNamespace(
            run=self.run, ledger=ledger, data=self.dataset, signatures=Signatures(self.wall, verify=_verify), extension=self.extension, bans=self.bans,
            url=URL, key=self.dataset.key, rendezvous=None, tokens=None, wall=self.wall, countersign_at=0.0, proven=self.proven, discard=self._bury,
        )  # fmt: skip
        self.full(False)

    def lets_in(self, peer: str) -> None:
        """It has come for its membership, with a token: so the server knows it also after a restart, and keeps a proof against it."""
        self.book.admit(peer, Sender(_STRANGERS_TOKEN, (_STRANGERS_TOKEN,)))

    def _bury(self, digest: str, reason: str) -> None:
        """As `service.Service.discard`."""
        self._world.checks.buries(digest)
        self.discard(digest, reason)

    def discard(self, digest: str, reason: str = "") -> None:
        """As `dd-datasetserver discard` does."""
        self._world.checks.discarded.setdefault(digest, self._world.loop.time())
        self.bans.hear([sign_word(self.dataset.key, self.run, digest, banned=True, reason=reason, clock=self._world.loop.time)])

    def extension(self) -> dict[str, Any] | None:
        """As `service.Service.extension`."""
        if self.orders.total > self.end.total:
            self.end.extend(sign_extension(self.dataset.key, self.run, self.orders.total))
        return self.end.extension

    def last_known(self) -> dict[str, Any] | None:
        """What a peer that starts hears of the newest state."""
        head = None if self.away else self.book.told
        return head and {"digest": head.digest, "round": head.round, "samples": head.samples, "peers": list(head.reporters)}

    def crash(self) -> None:
        """What was being answered hangs up; what was not committed was never asked."""
        self._process.dead = True
        for answer in self._open:
            self._at(_LATENCY_SECONDS, _fail, answer, aiohttp.ServerDisconnectedError("it hung up"))
        self._open.clear()

    def full(self, full: bool) -> None:
        """Whether its disk takes nothing: each commit appends to SQLite's log, also one that makes the database no larger."""
        self._db.execute(f"PRAGMA query_only = {int(full)}")

    def _make_book(self, db: sqlite3.Connection) -> Book:
        book = make_book(db, self.dataset.manifest, self.run, self.config, self.orders, self._world.loop.time, self._names())
        self._world.checks.ledger.watch(book)
        return book

    def _names(self) -> Iterator[str]:
        while True:
            yield self._rng.randbytes(16).hex()

    def wall(self) -> float:
        return _EPOCH + self._world.loop.time()

    # ------------------------------------------------------------- requests

    async def exchange(self, machine: "Machine", method: str, path: str, headers: dict[str, str], body: bytes) -> "Response":
        """From a peer's side. Raises what aiohttp raises; a request to a server that cannot be reached has no answer."""
        answer, way = self._world.loop.create_future(), self._way(machine)
        self._at(way, self._arrive, machine, _Request(method, path, headers, body, machine.address), answer)
        return await answer

    def _way(self, machine: "Machine") -> float:
        return (machine.link.latency + _LATENCY_SECONDS) * self._rng.uniform(0.9, 1.4)

    def _at(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        token = OWNER.set(None)  # the net lives on when a process dies
        try:
            self._world.loop.call_later(seconds, call, *args)
        finally:
            OWNER.reset(token)

    def _arrive(self, machine: "Machine", request: "_Request", answer: asyncio.Future) -> None:
        if not self._world.network.reaches_server(machine.peer):
            return
        if self.away:
            return self._at(self._way(machine), _fail, answer, aiohttp.ClientConnectionError("connection refused"))
        self.requests += 1
        self._open[answer] = None
        serving = self._serve(machine, request, answer)
        self._process.context.copy().run(self._world.loop.create_task, serving)._log_destroy_pending = False

    async def _serve(self, machine: "Machine", request: "_Request", answer: asyncio.Future) -> None:
        if self.slow_seconds:
            await asyncio.sleep(self._rng.uniform(0, self.slow_seconds))
        response = await self._response(request)
        if response.status == 500:
            self._world.checks.breach(f"the dataset server made a mistake: {request.method} {request.path}", machine)
        self._open.pop(answer, None)
        way = self._way(machine)
        if self._rng.random() >= self.lost:
            return self._at(way, _give, answer, response)
        if response.body and self._rng.random() < 0.5:
            response.content.cut = self._rng.randrange(len(response.body))
            return self._at(way, _give, answer, response)
        self._at(way, _fail, answer, aiohttp.ServerDisconnectedError("it hung up"))

    async def _response(self, request: "_Request") -> "Response":
        endpoint, named = _route(request.method, request.path)
        if endpoint.path.startswith(("/v1/blobs/", "/v1/manifest/")):
            return self._file(named["digest"], request.headers)
        request.match_info, request.app = named, {SERVICE: self._service}
        answered = await errors_as_json(request, endpoint.handler, _unguarded, endpoint)
        return Response(answered.status, answered.headers, bytes(answered.body))

    def _file(self, digest: str, headers: dict[str, str]) -> "Response":
        if digest == self.dataset.digest:
            return Response(200, CIMultiDict({SIGNATURE_HEADER: self.dataset.key.sign("manifest", digest)}), self.dataset.body)
        data, start = self.dataset.blobs[digest], int(headers.get("Range", "bytes=0-")[6:-1])
        if self._rng.random() < _CORRUPT_SHARE:
            data = bytes(len(data))
        return Response(206 if start else 200, CIMultiDict(), data[start:])


def _route(method: str, path: str) -> tuple[Endpoint, dict[str, str]]:
    """The endpoint, and what the path names."""
    if (fixed := _FIXED.get((method, path))) is not None:
        return fixed, {}
    for endpoint, pattern in _ROUTES:
        if endpoint.method == method and (matched := pattern.fullmatch(path)):
            return endpoint, matched.groupdict()
    raise AssertionError(f"no such endpoint: {method} {path}")


async def _unguarded(request: "_Request", handler: Callable, endpoint: Endpoint | None) -> Any:
    """Limits and tokens, which take addresses and minutes, have their own tests."""
    return await handler(request)


def _give(answer: asyncio.Future, response: "Response") -> None:
    if not answer.done():
        answer.set_result(response)


def _fail(answer: asyncio.Future, error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


class _Request(dict):
    """As much of `aiohttp.web.Request` as the handlers use."""

    app: dict
    match_info: dict[str, str]

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes, remote: str):
        super().__init__()
        self.method, self.path, self.headers, self._body, self.remote = method, path, headers, body, remote
        self.content_length, self.content = len(body), self

    def is_eof(self) -> bool:
        return True

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self._body


class Response:
    """As much of `aiohttp.ClientResponse` as the client uses; its own content."""

    def __init__(self, status: int, headers: CIMultiDict, body: bytes):
        self.status, self.headers, self.body = status, headers, body
        self.content, self.cut = self, None

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        for at in range(0, len(self.body[: self.cut]), size):
            yield self.body[: self.cut][at : at + size]
        if self.cut is not None:
            raise aiohttp.ClientPayloadError("it broke off")


class Session:
    """As much of `aiohttp.ClientSession` as the client uses. The server sends nobody on."""

    def __init__(self, server: Server, machine: "Machine"):
        self._server, self._machine = server, machine

    def request(
        self, method: str, url: str, *, data: bytes | None = None, timeout: aiohttp.ClientTimeout, headers: dict[str, str], allow_redirects: bool
    ) -> "_Asked":
        asking = self._server.exchange(self._machine, method, url.removeprefix(URL), headers, data or b"")
        return _Asked(asking, timeout.total or timeout.sock_read)

    def get(self, url: str, *, timeout: aiohttp.ClientTimeout, headers: dict[str, str], allow_redirects: bool) -> "_Asked":
        return self.request("GET", url, timeout=timeout, headers=headers, allow_redirects=allow_redirects)

    async def close(self) -> None:
        """Nothing is kept open."""


class _Asked:
    def __init__(self, asking: Any, seconds: float):
        self._asking, self._seconds = asking, seconds

    async def __aenter__(self) -> Response:
        return await within(self._seconds, self._asking)

    async def __aexit__(self, *error: object) -> None:
        """Read or not, it is over."""
