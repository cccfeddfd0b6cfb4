"""Handing a state to whoever is behind, and fetching one: by chunks, each checked against the digest that a peer signed."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence

import torch
from blake3 import blake3

from peer.sync.engine.state import CHUNK_BYTES, BadState, Head, Header, State, state_digest
from peer.sync.engine.streams import Channel, PeerLost, Streams
from peer.sync.engine.vectors import SharedBuffer

log = logging.getLogger(__name__)

STATE, HEAD = "distributed-diffusion.state.1", "distributed-diffusion.head.1"
KEEP_SECONDS = 60.0
"""An old state stays for this long after its last request, or a slow newcomer would never finish one (hivemind issue 443)."""
CHUNK_SECONDS = 60.0
ANSWER_SECONDS = 10.0
MAX_DOWNLOADS = 4
MAX_KEPT = 2
_SLOWEST_BYTES_PER_SECOND = 125_000
_HASH_BYTES = 32


class Donor:
    """Serves the current state and, while somebody fetches them, older ones. Never copies a state: they do not change."""

    def __init__(self, streams: Streams, current: Callable[[], State], clock: Callable[[], float] = time.monotonic):
        self._streams, self._current, self._clock = streams, current, clock
        self._kept: dict[str, tuple[State, float]] = {}
        self._downloading: set[str] = set()

    async def start(self) -> None:
        await self._streams.serve(STATE, self._serve)
        await self._streams.serve(HEAD, self._serve_head)

    @property
    def busy(self) -> bool:
        return bool(self._downloading)

    def retire(self, state: State) -> None:
        """`state` is no longer current, but a download of it may be under way."""
        self._kept.pop(state.digest, None)
        self._kept[state.digest] = (state, self._clock() + KEEP_SECONDS)
        # A state of SD 1.5 is 4 GB. A download under way holds its own and goes on.
        while len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]

    def forget_old(self) -> None:
        """Let go of the states that nobody asked for in time."""
        self._kept = {digest: (state, until) for digest, (state, until) in self._kept.items() if until >= self._clock()}

    def _find(self, digest: object) -> State:
        current = self._current()
        if digest == current.digest:
            return current
        if isinstance(digest, str) and digest in self._kept:
            state, _ = self._kept[digest]
            self._kept[digest] = (state, self._clock() + KEEP_SECONDS)
            return state
        raise PeerLost("that state is not here any more")

    async def _serve(self, channel: Channel) -> None:
        if len(self._downloading) >= MAX_DOWNLOADS or channel.peer in self._downloading:
            raise PeerLost("too many downloads at once, try another peer")
        self._downloading.add(channel.peer)
        try:
            request, _ = await channel.receive(seconds=ANSWER_SECONDS)
            state = self._find(request.get("digest"))
            await channel.send({"header": state.header.to_json()}, b"".join(state.chunk_hashes), seconds=CHUNK_SECONDS)
            while True:
                request, _ = await channel.receive(seconds=CHUNK_SECONDS)
                index = request.get("chunk")
                if index is None:
                    return
                if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(state.chunk_hashes):
                    raise PeerLost(f"there is no chunk {str(index)[:20]}")
                await channel.send({}, state.chunk(index), seconds=CHUNK_SECONDS)
        finally:
            self._downloading.discard(channel.peer)

    async def _serve_head(self, channel: Channel) -> None:
        state = self._current()
        await channel.send({"digest": state.digest, "samples": state.header.samples}, seconds=ANSWER_SECONDS)


async def ask_head(streams: Streams, peer: str) -> Head | None:
    """The head of `peer` right now, or None when it does not answer."""
    try:
        channel = await streams.open(peer, HEAD)
        with contextlib.closing(channel):
            answer, _ = await channel.receive(seconds=ANSWER_SECONDS)
            return Head.from_json(answer)
    except (PeerLost, BadState):
        return None


async def fetch(streams: Streams, holders: Sequence[str], download: "Download") -> State:
    """The state of `download`, from one of `holders` after the other; what one sent is kept for the next.

    Raises PeerLost when none of them could give it, BadState when it is of another run or other tensors than ours.
    """
    seconds = CHUNK_SECONDS + download.buffer.num_bytes / _SLOWEST_BYTES_PER_SECOND
    reason: PeerLost = PeerLost("nobody holds it")
    for holder in random.sample(list(holders), len(holders)):
        try:
            return await asyncio.wait_for(download.continue_from(streams, holder), seconds)
        except PeerLost as error:
            reason = error
        except asyncio.TimeoutError:
            reason = PeerLost(f"{holder[-6:]} is too slow")
        log.info("fetching %s: %s", download.digest[:8], reason)
    raise reason


class Download:
    """What is there of the state named `digest`, whose size and kind are those of `like`; `progressed`: when the last chunk came."""

    def __init__(self, digest: str, like: State, clock: Callable[[], float] = time.monotonic):
        self.digest, self.like, self._clock = digest, like, clock
        self.buffer = SharedBuffer(like.buffer.num_bytes)
        self.done: set[int] = set()
        self.progressed = clock()

    async def continue_from(self, streams: Streams, holder: str) -> State:
        channel = await streams.open(holder, STATE)
        with contextlib.closing(channel):
            await channel.send({"digest": self.digest}, seconds=ANSWER_SECONDS)
            count = len(self.like.chunk_hashes)
            answer, data = await channel.receive(max_payload=count * _HASH_BYTES, seconds=ANSWER_SECONDS)
            header, hashes = self._check(answer.get("header"), data, count, holder)
            target = self.buffer.bytes()
            for index in range(count):
                if index in self.done:
                    continue
                await channel.send({"chunk": index}, seconds=ANSWER_SECONDS)
                _, chunk = await channel.receive(max_payload=CHUNK_BYTES, seconds=CHUNK_SECONDS)
                room = target[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
                if len(chunk) != room.numel() or blake3(chunk).digest() != hashes[index]:
                    raise PeerLost(f"{holder[-6:]} sent a chunk that is not in the state it was asked for")
                room.copy_(torch.frombuffer(bytearray(chunk), dtype=torch.uint8))
                self.done.add(index)
                self.progressed = self._clock()
            with contextlib.suppress(PeerLost):
                await channel.send({}, seconds=ANSWER_SECONDS)
        if not bool(torch.isfinite(self.buffer.floats()).all()):
            raise BadState(f"the state {self.digest[:8]} holds non-finite values")
        return State(header, self.buffer, hashes)

    def _check(self, values: object, data: bytes, count: int, holder: str) -> tuple[Header, tuple[bytes, ...]]:
        try:
            header = Header.from_json(values)
        except BadState as error:
            raise PeerLost(f"{holder[-6:]} sent no header: {error}") from None
        hashes = tuple(data[offset : offset + _HASH_BYTES] for offset in range(0, len(data), _HASH_BYTES))
        if len(hashes) != count or state_digest(header, hashes) != self.digest:
            raise PeerLost(f"{holder[-6:]} sent another state than it was asked for")
        if (header.run, header.schema) != (self.like.header.run, self.like.header.schema):
            raise BadState(f"the state {self.digest[:8]} belongs to another run or another set of tensors")
        return header, hashes
