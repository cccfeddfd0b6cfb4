"""Catching up by repeating what others did: the mean of each of the last rounds is much smaller than a state.

A state's header names the mean that made it, so a mean is proven by the signed digest before it is used; and the state it leads to must
have that digest, bit for bit, or it is fetched whole.
"""

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peer.contracts import Member
from peer.sync.engine.buffers import IN_MEMORY, Buffers
from peer.sync.engine.net.messages import Fetch, MeanOffer, read_header
from peer.sync.engine.net.streams import Streams
from peer.sync.engine.round.averaging import Mean
from peer.sync.engine.state import ANCESTORS_KEPT, CHUNK_BYTES, HASH_BYTES, BadState, State, hash_chunks, mean_digest
from peer.sync.engine.transfer import chunk_file
from peer.sync.engine.transfer.chunk_file import ChunkFile
from peer.sync.engine.transfer.download import ANSWER_SECONDS, Download, Lied, Manifest, split_hashes
from peer.sync.engine.vectors import SharedBuffer

log = logging.getLogger(__name__)

REPLAYED_ROUNDS = 2
"""How many of the last rounds can be repeated at least; a peer that is further behind fetches the whole state."""
_SHARE_OF_STATE = 4
_LOOK_SECONDS = 0.2
WRITE_SECONDS = 0.8 * ANSWER_SECONDS
"""The other end waits ANSWER_SECONDS for the first word of an answer."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


def rounds_kept(state_bytes: int, mean_bytes: int) -> int:
    """How many rounds' means are kept: two, or as many as are a quarter of a state, for those whom the download itself took long."""
    return min(max(REPLAYED_ROUNDS, state_bytes // (_SHARE_OF_STATE * mean_bytes)), ANCESTORS_KEPT)


class MeanStore:
    """The encoded means of the last rounds under `folder`, a chunk file each. A cache: nothing is flushed, whatever cannot be written is
    left out, and what was torn is found out by its hashes."""

    def __init__(self, folder: Path, keep: int = REPLAYED_ROUNDS):
        self.folder, self._keep = folder, keep
        self._wanted: deque[tuple[str, Manifest, Mean]] = deque(maxlen=keep)
        self._writing = ""
        self._changed = asyncio.Event()

    def want(self, state: State, mean: Mean) -> None:
        """Keep the mean that made `state`, as soon as there is time."""
        self._wanted.append((state.digest, Manifest(state.header, state.chunk_hashes), mean))
        self._changed.set()

    async def keep_forever(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._wanted:
                self._writing = self._wanted[0][0]
                # No name holds the mean while it waits for the next one: it is a sixth of what a round needs.
                await asyncio.get_running_loop().run_in_executor(None, self.keep, *self._wanted.popleft())
                self._writing = ""

    def keep(self, digest: str, manifest: Manifest, mean: Mean) -> None:
        """Write it, and delete those that are not of the last rounds before it."""
        recent = [self._path(one) for one in (digest, *manifest.header.parents)[: self._keep]]
        first = {
            "header": manifest.header.json,
            "state_hashes": b"".join(manifest.chunk_hashes).hex(),
            "square_norm": mean.square_norm,
            "mean_hashes": b"".join(hash_chunks(mean.encoded)).hex(),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.iterdir():
                if old not in recent:
                    old.unlink()
            chunk_file.write(self._path(digest), first, mean.encoded, durable=False)
        except OSError as error:
            log.warning("could not keep the mean of round %d for others: %s", manifest.header.round, error.strerror)

    async def written(self, digest: str) -> None:
        """Wait for a mean that is about to be on disk: who lost a round asks for it in the same second. At most WRITE_SECONDS."""
        clock = asyncio.get_running_loop().time
        until = clock() + WRITE_SECONDS
        while (digest == self._writing or digest in [wanted for wanted, _, _ in self._wanted]) and clock() < until:
            await asyncio.sleep(_LOOK_SECONDS)

    def open(self, digest: str) -> "KeptMean | None":
        """The mean that made the state named `digest`, which anybody may have sent; None when it is not here."""
        if not _DIGEST.fullmatch(digest):
            return None
        path, file = self._path(digest), None
        try:
            file = ChunkFile(path)
            state_hashes, hashes = (split_hashes(bytes.fromhex(file.first[name])) for name in ("state_hashes", "mean_hashes"))
            return KeptMean(Manifest(read_header(file.first["header"]), state_hashes), float(file.first["square_norm"]), hashes, file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("ignored %s: %s", path.name, error)
            if file is not None:
                file.close()
            return None

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest[:32]}.mean"


@dataclass
class KeptMean:
    """manifest: of the state that it made; hashes: of its chunks; file: the caller closes it."""

    manifest: Manifest
    square_norm: float
    hashes: tuple[bytes, ...]
    file: ChunkFile


class MeanOf:
    """The mean of `num_bytes` that made the state named `digest`, to be fetched; that state is as large as `like`."""

    def __init__(self, digest: str, num_bytes: int, like: State, buffers: Buffers = IN_MEMORY):
        self.request, self.offer = Fetch(digest=digest, mean=True), MeanOffer
        self._digest, self._num_bytes, self._like, self._buffers = digest, num_bytes, like, buffers
        self._encoded: Tensor | None = None
        self.members: tuple[Member, ...] = ()
        self._square_norm, self._group = 0.0, ""

    def prove(self, offer: MeanOffer, payload: bytes) -> tuple[bytes, ...]:
        border = len(self._like.chunk_hashes) * HASH_BYTES
        manifest = Manifest.proven(self._digest, offer.header, payload[:border])
        hashes, square_norm = split_hashes(payload[border:]), offer.square_norm
        if offer.num_bytes != self._num_bytes:
            raise Lied("a mean of another kind")
        if len(hashes) != -(-self._num_bytes // CHUNK_BYTES) or mean_digest(square_norm, hashes) != manifest.header.mean:
            raise Lied("another mean than the one that made the state")
        self.members, self._group, self._square_norm = manifest.header.members, manifest.header.group, square_norm
        return hashes

    def target(self) -> Tensor:
        self._encoded = torch.frombuffer(self._buffers.private(self._num_bytes), dtype=torch.uint8, count=self._num_bytes)
        return self._encoded

    def check(self, chunk: Tensor) -> None:
        """Its values are looked at when they are decoded."""

    def known(self, index: int, hash_: bytes) -> Tensor | None:
        return None

    def mean(self) -> Mean:
        """Once all chunks are there."""
        return Mean(self._encoded, self._square_norm, group=self._group)


Step = Callable[[State, Mean, Sequence[Member], SharedBuffer | None], State]
"""What every peer does to a state with a round's mean and members; the last: memory for what it makes, which may be that state's."""


class Replay:
    """From `ours` to the state that `manifest` is of. `downloads`: of the means, the last one under way; `stepping`: while one is applied."""

    def __init__(
        self,
        ours: State,
        manifest: Manifest,
        digest: str,
        num_bytes: int,
        step: Step,
        clock: Callable[[], float] = time.monotonic,
        buffers: Buffers = IN_MEMORY,
        order: Callable[[str], Any] = str,
    ):
        """num_bytes: of each mean. step: may raise ValueError. order: as in `Download`."""
        chain = [digest, *manifest.header.parents]
        self.ours, self._num_bytes, self._step, self._clock, self._buffers, self._order = ours, num_bytes, step, clock, buffers, order
        kept = rounds_kept(ours.buffer.num_bytes, num_bytes)
        self.digests = chain[: chain.index(ours.digest)][::-1] if ours.digest in chain[1 : kept + 1] else []
        """Of the states to be made, the next one first; none when `ours` is not among the last ancestors."""
        self.downloads: list[Download] = []
        self.stepping = False

    async def run(self, streams: Streams, holders: set[str], keep: Callable[[State, Mean], None]) -> State:
        """Raises PeerLost when nobody gives the means, BadState when they lead to another state than was signed."""
        state = self.ours
        for digest in self.digests:
            content = MeanOf(digest, self._num_bytes, self.ours, self._buffers)
            self.downloads.append(Download(content, holders, self._clock, self._order))
            await self.downloads[-1].run(streams)
            mean, self.stepping = content.mean(), True
            into = state.buffer if state is not self.ours else None  # of three states at once one is more than was counted
            try:
                state = await asyncio.get_running_loop().run_in_executor(None, self._step, state, mean, content.members, into)
            except ValueError as error:
                raise BadState(str(error)) from None
            finally:
                self.stepping = False
            if state.digest != digest:
                raise BadState(f"replaying round {state.header.round} gave the state {state.digest[:8]} instead of {digest[:8]}")
            keep(state, mean)
        return state
