"""Fetching what several peers hold, from all of them at once: by chunks, each checked against a hash that a signed digest proves.

Whoever is free takes the next chunk, so that a fast holder gives more. At the end a chunk that is long in coming is asked for
again from somebody else; so a holder that stalls, lies or dies costs its own share of the time, and nothing that has come is lost.
"""

import asyncio
import collections
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from peer.sync.engine import failpoints
from peer.sync.engine.net.messages import Chunk, Fetch, Nothing, StateOffer
from peer.sync.engine.net.streams import Channel, Malformed, PeerLost, Streams
from peer.sync.engine.state import CHUNK_BYTES, HASH_BYTES, Header, state_digest
from peer.sync.engine.transfer.pace import SLOWEST_BYTES_PER_SECOND, Credit, Slow
from swarm.tasks import end_tasks

log = logging.getLogger(__name__)

CHUNKS = "distributed-diffusion.chunks.1"
PIECE_BYTES = 256 << 10
"""A chunk travels in pieces, so that a slow link is told from a dead one: 10 s a piece are 0.2 Mbit/s."""
ANSWER_SECONDS = 10.0
MAX_HOLDERS = 8
_QUIET_SECONDS = 5.0
_FIRST_PIECE_SECONDS, _PIECE_SECONDS, _LONGEST_PIECE_SECONDS = 20.0, 10.0, 60.0
_SLOWER = 8
"""A piece may take this many times as long as the ones before it: a round or another download may have begun at the holder."""
_CHUNKS_AHEAD, _CHUNKS_AHEAD_WHEN_FAST, _FAST_SECONDS = 2, 4, 0.5
"""Chunks asked for at once of one holder: 8 MiB cover a round trip of 80 ms up to 800 Mbit/s, 16 MiB whatever is faster."""
_AGAIN_FACTOR, _AGAIN_SECONDS = 2.0, 1.0
_TICK_SECONDS = 0.1
_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 3.0, 60.0
_FIRST_CREDIT_SECONDS = 30.0
_MAX_HASH_BYTES = 4 << 20
"""The hashes of half a tebibyte."""


class Lied(PeerLost):
    """The other end sent what is not in what it signed: it is not asked again for a while."""


@dataclass(frozen=True)
class Manifest:
    """What names a state's content: proven by its digest, whoever sent it."""

    header: Header
    chunk_hashes: tuple[bytes, ...]

    @classmethod
    def proven(cls, digest: str, header: Header, hashes: bytes) -> "Manifest":
        """Raises Lied when they are not those of the state named `digest`."""
        manifest = cls(header, split_hashes(hashes))
        if state_digest(header, manifest.chunk_hashes) != digest:
            raise Lied("another state than it was asked for")
        return manifest


class Content(Protocol):
    """What is to be fetched."""

    request: Fetch
    offer: type[StateOffer]
    """What answers the request."""

    def prove(self, offer: Any, payload: bytes) -> tuple[bytes, ...]:
        """A holder's `offer` -> the hashes of the chunks. Raises Lied, or BadState when nobody's can be of use."""
        ...

    def target(self) -> Tensor:
        """Where the chunks go, (num_bytes,) uint8; asked for after the first `prove`."""
        ...

    def check(self, chunk: Tensor) -> None:
        """Raises BadState when a chunk that is what was signed is of no use all the same."""
        ...

    def known(self, index: int, hash_: bytes) -> Tensor | None:
        """The chunk with that hash, if it need not be fetched."""
        ...


class Download:
    """What is there of `content`. `holders` may grow while it runs; `asked`: those it came to; `faults`: who failed, and why, since it began."""

    def __init__(
        self,
        content: Content,
        holders: set[str],
        clock: Callable[[], float] = time.monotonic,
        order: Callable[[str], Any] = str,
    ):
        """order: of the holders, the smaller the sooner."""
        self.content, self.holders, self._clock, self.order = content, holders, clock, order
        self.hashes: tuple[bytes, ...] | None = None
        self.done: set[int] = set()
        self.faults: dict[str, PeerLost] = {}
        self.asked: set[str] = set()
        self.given: collections.Counter[str] = collections.Counter()
        """Chunks by holder."""
        self.bytes_received = 0
        self.progressed = clock()
        self.closed = False
        self._target: Tensor | None = None
        self._waiting: collections.deque[int] = collections.deque()
        self._asked: dict[int, dict[str, float]] = {}
        self._retry: dict[str, tuple[int, float]] = {}
        self._share = 1
        """How many holders together have to reach the slowest rate."""

    @property
    def complete(self) -> bool:
        return self.hashes is not None and len(self.done) == len(self.hashes)

    async def run(self, streams: Streams) -> None:
        """Draw chunks from all holders until all are there. Once.

        Raises PeerLost when none of the holders gives anything, BadState when what they signed is of no use.
        """
        drawing: dict[str, asyncio.Task] = {}
        self.progressed = self._clock()
        try:
            while not self.complete:
                for holder in self._ready(drawing, self._at_once()):
                    self.asked.add(holder)
                    drawing[holder] = asyncio.create_task(self._draw(streams, holder))
                # With nobody to put in their place, it may be our own line that is slow: by a chunk of 4 MiB that it drops, nobody is faster.
                self._share = 1 if self._ready(drawing, len(drawing) + 1) else max(len(drawing), 1)
                if not drawing:
                    raise next(reversed(self.faults.values()), PeerLost("nobody holds it"))
                await asyncio.wait(drawing.values(), timeout=_TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for holder in [holder for holder, task in drawing.items() if task.done()]:
                    self._ended(holder, drawing.pop(holder))
        finally:
            await end_tasks(*drawing.values())

    def _at_once(self) -> int:
        """How many to ask: more, the longer nothing comes. Whoever says nothing keeps its place for 20 s, and names that say nothing cost nothing."""
        return MAX_HOLDERS * (1 + int((self._clock() - self.progressed) / _QUIET_SECONDS))

    def _ready(self, drawing: Collection[str], most: int) -> list[str]:
        """Whom to ask next, so that it makes `most` of them: nobody who lied, who failed not at once again, and who failed seldom first."""
        now = self._clock()
        ready = [
            holder
            for holder in sorted(self.holders, key=lambda holder: (self._retry.get(holder, (0, now))[0], self.order(holder)))
            if holder not in drawing and not isinstance(self.faults.get(holder), Lied) and self._retry.get(holder, (0, now))[1] <= now
        ]
        return ready[: most - len(drawing)]

    def _ended(self, holder: str, task: asyncio.Task) -> None:
        error = task.exception()
        if error is None:
            return
        if not isinstance(error, PeerLost):
            raise error
        failures = self._retry.get(holder, (0, 0.0))[0]
        pause = min(_RETRY_SECONDS * 2**failures, _LONGEST_RETRY_SECONDS)
        self._retry[holder] = (failures + 1, self._clock() + pause)
        self.faults.pop(holder, None)  # the last one comes last
        self.faults[holder] = error
        log.info("fetching: %s", error)

    async def _draw(self, streams: Streams, holder: str) -> None:
        """Take chunks from one holder until all are there."""
        channel = await streams.open(holder, CHUNKS)
        pace, asked = _Pace(self._clock), collections.deque()
        try:
            await channel.send(self.content.request, seconds=ANSWER_SECONDS)
            await self._accept(*await channel.receive(self.content.offer, max_payload=_MAX_HASH_BYTES, seconds=ANSWER_SECONDS))
            while not self.complete:
                while len(asked) < pace.ahead and (index := self._next(holder, pace)) is not None:
                    if not asked:
                        pace.begin()
                    asked.append(index)
                    await channel.send(Chunk(chunk=index), seconds=ANSWER_SECONDS)
                if not asked:  # all that is left is on its way from others
                    await asyncio.sleep(_TICK_SECONDS)
                    continue
                self._put(asked[0], await self._receive(channel, asked[0], pace), holder)
                asked.popleft()
                if 2 * len(self.done) >= len(self.hashes):
                    await failpoints.reached("fetch_half_way", streams.peer_id)
            with contextlib.suppress(PeerLost):
                await channel.send(Chunk(), seconds=1)
        except Lied as error:
            raise Lied(f"{holder[-6:]} sent {error}") from None
        except Malformed as error:
            raise Lied(str(error)) from None
        finally:
            channel.close()
            for index in asked:
                self._not_from(holder, index)

    async def _accept(self, offer: StateOffer, payload: bytes) -> None:
        hashes = self.content.prove(offer, payload)
        if self.hashes is not None:
            return
        self._target = self.content.target()
        self.hashes = hashes
        for index, hash_ in enumerate(hashes):
            chunk = self.content.known(index, hash_)
            if chunk is None:
                self._waiting.append(index)
            else:
                self._room(index).copy_(chunk)
                self.done.add(index)
                await asyncio.sleep(0)  # 4 MiB in 1 ms; all of 1 GB at once would hold up every stream of this peer
                if self.closed:  # its memory is another download's by now
                    raise PeerLost("nobody wants it any more")

    def _room(self, index: int) -> Tensor:
        return self._target[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]

    def _next(self, holder: str, pace: "_Pace") -> int | None:
        """A chunk that nobody was asked for; else the one that is longest on its way, if `holder` would have had it twice by now.

        No more than two are asked for it, as long as anything comes.
        """
        now = self._clock()
        index = self._waiting.popleft() if self._waiting else None
        if index is None:
            late = now - max(_AGAIN_FACTOR * pace.chunk_seconds, _AGAIN_SECONDS)
            most = 2 if now - self.progressed < _QUIET_SECONDS else math.inf
            slow = [(len(asked), min(asked.values()), i) for i, asked in self._asked.items() if len(asked) < most and holder not in asked]
            _, since, oldest = min(slow, default=(0, now, None))
            index = oldest if since <= late else None
        if index is not None:
            self._asked.setdefault(index, {})[holder] = now
        return index

    def _not_from(self, holder: str, index: int) -> None:
        asked = self._asked.get(index, {})
        asked.pop(holder, None)
        if not asked:
            self._asked.pop(index, None)
            if index not in self.done:
                self._waiting.appendleft(index)

    async def _receive(self, channel: Channel, index: int, pace: "_Pace") -> bytearray:
        chunk, offset = bytearray(self._room(index).numel()), 0
        while offset < len(chunk):
            length = min(PIECE_BYTES, len(chunk) - offset)
            try:
                _, count = await channel.receive_into(Nothing, memoryview(chunk)[offset : offset + length], seconds=pace.piece_seconds)
            except PeerLost as error:
                raise (Slow(f"{channel.peer[-6:]} gives too little: {error}") if pace.credit.seconds <= 0 else error) from None
            if count != length:
                raise Lied(f"a piece of {count} bytes instead of {length}")
            offset += length
            pace.came(length, self._share)
            self.bytes_received += length
            self.progressed = self._clock()
        return chunk

    def _put(self, index: int, chunk: bytearray, holder: str) -> None:
        if self.closed:
            raise PeerLost("nobody wants it any more")
        if blake3(chunk).digest() != self.hashes[index]:
            raise Lied("a chunk that is not in the state it was asked for")
        if index in self.done:
            return
        data = torch.frombuffer(chunk, dtype=torch.uint8)
        self.content.check(data)
        self._room(index).copy_(data)
        self.done.add(index)
        self._asked.pop(index, None)
        self.given[holder] += 1


class _Pace:
    """How fast one holder gives."""

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._last, self._seconds = clock, clock(), None
        self.credit = Credit(clock, SLOWEST_BYTES_PER_SECOND, _FIRST_CREDIT_SECONDS, _LONGEST_PIECE_SECONDS)

    def begin(self) -> None:
        """Nothing was on its way until now."""
        self._last = self._clock()
        self.credit.rest()
        self.credit.wait()

    def came(self, num_bytes: int, share: int) -> None:
        now = self._clock()
        self.credit.moved(num_bytes, share)
        # A state's last piece may have 20 bytes. Scaled up to a whole one, its 10 ms would count as 131 s.
        seconds = now - self._last
        self._seconds = seconds if self._seconds is None else 0.9 * self._seconds + 0.1 * seconds
        self._last = now

    @property
    def piece_seconds(self) -> float:
        """How long to wait for the next piece; for less, once the holder was too slow on the whole."""
        seconds = _FIRST_PIECE_SECONDS
        if self._seconds is not None:
            seconds = min(max(_SLOWER * self._seconds, _PIECE_SECONDS), _LONGEST_PIECE_SECONDS)
        return min(seconds, max(self.credit.seconds, 0.0))

    @property
    def chunk_seconds(self) -> float:
        return (self._seconds or 0.0) * CHUNK_BYTES / PIECE_BYTES

    @property
    def ahead(self) -> int:
        return _CHUNKS_AHEAD_WHEN_FAST if self._seconds is not None and self.chunk_seconds < _FAST_SECONDS else _CHUNKS_AHEAD


async def ask_manifest(streams: Streams, holders: Collection[str], digest: str, order: Callable[[str], Any] = str) -> Manifest | None:
    """What the state named `digest` consists of. The first MAX_HOLDERS of `holders` are asked, and the first that proves it counts."""
    asking = [asyncio.create_task(_ask_manifest(streams, holder, digest)) for holder in sorted(holders, key=order)[:MAX_HOLDERS]]
    try:
        for answer in asyncio.as_completed(asking):
            with contextlib.suppress(PeerLost):
                return await answer
    finally:
        await end_tasks(*asking)
    return None


async def _ask_manifest(streams: Streams, holder: str, digest: str) -> Manifest:
    channel = await streams.open(holder, CHUNKS)
    with contextlib.closing(channel):
        await channel.send(Fetch(digest=digest), seconds=ANSWER_SECONDS)
        offer, hashes = await channel.receive(StateOffer, max_payload=_MAX_HASH_BYTES, seconds=ANSWER_SECONDS)
        return Manifest.proven(digest, offer.header, hashes)


def split_hashes(data: bytes) -> tuple[bytes, ...]:
    return tuple(data[offset : offset + HASH_BYTES] for offset in range(0, len(data), HASH_BYTES))
