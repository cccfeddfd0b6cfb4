"""Handing a state to whoever is behind: the current one from memory, older ones from their files; a round's needs come first."""

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Container

from blake3 import blake3

from peer.sync.engine import failpoints
from peer.sync.engine.net import messages
from peer.sync.engine.net.messages import Chunk, Fetch, MeanOffer, Nothing, StateOffer
from peer.sync.engine.net.streams import Channel, PeerLost, Streams
from peer.sync.engine.state import Head, State
from peer.sync.engine.transfer.chunk_file import ChunkFile
from peer.sync.engine.transfer.disk import StateStore
from peer.sync.engine.transfer.download import ANSWER_SECONDS, CHUNKS, PIECE_BYTES, Manifest
from peer.sync.engine.transfer.replay import MeanStore
from peer.sync.engine.transfer.slots import Slot, Slots

log = logging.getLogger(__name__)

HEAD = "distributed-diffusion.head.1"
KEEP_SECONDS = 60.0
"""A state's file stays open for this long after its last request, or a slow newcomer would never finish one (hivemind issue 443)."""
REQUEST_SECONDS = 60.0
PIECE_SECONDS = 30.0
_ROUND_FIRST = 3
"""While a round is averaged, a piece is followed by a pause of its own duration times this, for each download."""
_LONGEST_PAUSE_SECONDS = 4.0
_TIDY_SECONDS = 0.5


class Donor:
    """Serves the current state, older ones while somebody fetches them, and the means of the last rounds. Copies none of them."""

    def __init__(
        self,
        streams: Streams,
        current: Callable[[], State],
        store: StateStore,
        means: MeanStore,
        in_round: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        met: Container[str] = (),
    ):
        """in_round: whether our link is needed for averaging right now. met: the peers that we have averaged with."""
        self._streams, self._current, self._store, self._means = streams, current, store, means
        self._in_round, self._clock, self._sleep = in_round, clock, sleep
        self._held: dict[str, _Held] = {}
        self._retired: dict[str, tuple[Manifest, weakref.ref[State]]] = {}
        self._slots = Slots(met, clock)
        self._holding = asyncio.Event()

    async def start(self) -> None:
        await self._streams.serve(CHUNKS, self._serve)
        await self._streams.serve(HEAD, self._serve_head)

    @property
    def busy(self) -> bool:
        return bool(self._slots)

    async def tidy_forever(self) -> None:
        while True:
            await self._holding.wait()
            self.tidy()
            if not self._held:
                self._holding.clear()
            await asyncio.sleep(_TIDY_SECONDS)

    def tidy(self) -> None:
        """Let go of the memory of old states that are on disk by now, and of whatever nobody asked for in time."""
        current = self._current().digest
        old = {digest: held for digest, held in self._held.items() if digest != current}
        for digest, held in old.items():
            if held.state is not None:
                held.move_to(self._store.open(digest))
        in_memory = [digest for digest, held in old.items() if held.state is not None]
        for digest, held in list(self._held.items()):
            unused = not held.downloads and (held.state is not None or held.until < self._clock())
            # A state of SD 1.5 is 4 GB: one that never came to disk may hold up memory once.
            if unused or digest in in_memory[:-1]:
                self._held.pop(digest).close()

    def retire(self, state: State) -> None:
        """`state` is no longer current; whoever has just heard of it may still ask for it, and gets it from its file."""
        self._retired[state.digest] = (Manifest(state.header, state.chunk_hashes), weakref.ref(state))
        while len(self._retired) > self._store.keep:
            del self._retired[next(iter(self._retired))]

    def close(self) -> None:
        """Let go of all files; who still downloads from us asks another holder."""
        for held in self._held.values():
            held.close()
        self._held.clear()

    def _find(self, digest: str) -> "_Held":
        """The state of that name. Raises PeerLost when we cannot give it."""
        current = self._current()
        if digest not in self._held:
            if digest == current.digest:
                self._held[digest] = _Held(Manifest(current.header, current.chunk_hashes), current)
            elif digest in self._retired:
                manifest, state = self._retired[digest]
                held = _Held(manifest, state())
                held.move_to(self._store.open(digest))
                if held.readable:
                    self._held[digest] = held
        if digest not in self._held:
            raise PeerLost("that state is not here any more")
        held = self._held[digest]
        held.until = self._clock() + KEEP_SECONDS
        self._holding.set()
        return held

    async def _serve(self, channel: Channel) -> None:
        wanted, _ = await channel.receive(Fetch, seconds=ANSWER_SECONDS)
        if wanted.mean:
            await self._means.written(wanted.digest)
            with contextlib.closing(_held_mean(self._means, wanted.digest)) as held:
                await self._give(channel, held)
        else:
            held = self._find(wanted.digest)
            held.downloads += 1
            try:
                await self._give(channel, held)
            finally:
                held.downloads -= 1

    async def _give(self, channel: Channel, held: "_Held") -> None:
        await channel.send(held.offer, held.proof, seconds=PIECE_SECONDS)
        index = await self._wanted(channel, held, ANSWER_SECONDS)
        if index is None:
            return
        slot = self._slots.take(channel)
        try:
            while index is not None:
                if index >= len(held.hashes) // 2:
                    await failpoints.reached("donor_half_way", self._streams.peer_id)
                held.until = self._clock() + KEEP_SECONDS
                await self._send(slot, await held.chunk(index))
                slot.credit.wait()
                index = await self._wanted(channel, held, REQUEST_SECONDS)
                slot.credit.rest()
                slot.check()
        finally:
            self._slots.leave(slot)

    async def _wanted(self, channel: Channel, held: "_Held", seconds: float) -> int | None:
        """The next chunk that the other end asks for; None when it has all that it wants."""
        wanted, _ = await channel.receive(Chunk, seconds=seconds)
        if wanted.chunk is not None and wanted.chunk >= len(held.hashes):
            raise PeerLost(f"there is no chunk {wanted.chunk}")
        return wanted.chunk

    async def _send(self, slot: Slot, chunk: memoryview) -> None:
        """One request at a time is answered, in pieces; the next ones wait at the other end of the stream."""
        for offset in range(0, len(chunk), PIECE_BYTES):
            piece = chunk[offset : offset + PIECE_BYTES]
            slot.credit.wait()
            began = self._clock()
            await slot.channel.send(Nothing(), piece, seconds=PIECE_SECONDS)
            seconds = self._clock() - began
            slot.check()
            slot.credit.moved(len(piece))
            slot.credit.rest()
            if self._in_round():
                pause = _ROUND_FIRST * len(self._slots) * seconds
                await self._sleep(min(pause, _LONGEST_PAUSE_SECONDS))

    async def _serve_head(self, channel: Channel) -> None:
        await channel.send(vars(Head.of(self._current())), seconds=ANSWER_SECONDS)


class _Held:
    """What somebody fetches. A state is in memory while it is current, and until it is on disk; then in its file, also a deleted one."""

    def __init__(self, manifest: Manifest, state: State | None):
        self.offer = StateOffer(header=manifest.header)
        self.hashes, self.proof = manifest.chunk_hashes, b"".join(manifest.chunk_hashes)
        self.state, self.downloads, self.until = state, 0, 0.0
        self._file: ChunkFile | None = None

    def move_to(self, file: ChunkFile | None) -> None:
        if file is not None:
            self._file, self.state = file, None

    @property
    def readable(self) -> bool:
        return self.state is not None or self._file is not None

    async def chunk(self, index: int) -> memoryview:
        """Raises PeerLost when it cannot be read any more."""
        if self.state is not None:
            return self.state.chunk(index)
        if self._file is None:
            raise PeerLost("that state is not here any more")
        try:
            data = await self._file.chunk(index)
        except (OSError, ValueError) as error:
            raise PeerLost(f"that state cannot be read any more: {error}") from None
        if blake3(data).digest() != self.hashes[index]:
            raise PeerLost("that state is damaged on disk here")
        return memoryview(data)

    def close(self) -> None:
        self.state = None
        if self._file is not None:
            self._file.close()
            self._file = None


def _held_mean(means: MeanStore, digest: str) -> _Held:
    """The mean that made the state named `digest`. Raises PeerLost."""
    kept = means.open(digest)
    if kept is None:
        raise PeerLost("the mean of that round is not here")
    held = _Held(kept.manifest, None)
    held.offer = MeanOffer(header=kept.manifest.header, square_norm=kept.square_norm, num_bytes=kept.file.num_bytes)
    held.hashes, held.proof = kept.hashes, held.proof + b"".join(kept.hashes)
    held.move_to(kept.file)
    return held


async def ask_head(streams: Streams, peer: str) -> Head | None:
    """The head of `peer` right now, or None when it does not answer."""
    try:
        channel = await streams.open(peer, HEAD)
        with contextlib.closing(channel):
            head, _ = await channel.receive(messages.HEAD, seconds=ANSWER_SECONDS)
            return head
    except PeerLost:
        return None
