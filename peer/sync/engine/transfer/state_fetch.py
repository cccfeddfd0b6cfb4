"""Fetching a better state in the background: a head that nobody can give must not keep anybody from averaging."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from peer.sync.engine.buffers import IN_MEMORY, Buffers
from peer.sync.engine.net.messages import Fetch, StateOffer
from peer.sync.engine.net.streams import PeerLost, Refused, Streams
from peer.sync.engine.round.groups import rank
from peer.sync.engine.state import CHUNK_BYTES, BadState, Head, Header, State
from peer.sync.engine.transfer.download import Download, Lied, Manifest, ask_manifest
from peer.sync.engine.transfer.pace import Slow, fetch_seconds
from peer.sync.engine.transfer.promises import Promises
from peer.sync.engine.transfer.replay import MeanStore, Replay, Step
from peer.sync.engine.vectors import SharedBuffer
from swarm.tasks import end_tasks

log = logging.getLogger(__name__)

STALLED_SECONDS = 20.0
_PENALTY_SECONDS = 5.0
_LONGEST_PENALTY_SECONDS = 300.0
PARTIAL_SECONDS = 600.0
"""What came of a download is kept in memory for this long after its last byte."""
_LIAR_COUNT = 4
"""Who sent what it did not sign, or held a download up for all the time that it may take, is asked again after 80 s at first."""


@dataclass(frozen=True)
class Partial:
    """What came of a download that failed: the chunks `done` of those with these hashes, in the memory in which the next one goes on. progressed:
    when the last byte came."""

    buffer: SharedBuffer
    hashes: tuple[bytes, ...]
    done: frozenset[int]
    progressed: float


class WholeState:
    """A state to be fetched, of the size and kind of `like`. What `partial` and `like` have of it is taken over."""

    def __init__(self, digest: str, like: State, partial: Partial | None = None, buffers: Buffers = IN_MEMORY):
        self.request, self.offer = Fetch(digest=digest), StateOffer
        self._digest, self._like, self.partial = digest, like, partial
        self.buffer = buffers.shared(like.buffer.num_bytes) if partial is None else partial.buffer
        self._manifest: Manifest | None = None

    def prove(self, offer: StateOffer, payload: bytes) -> tuple[bytes, ...]:
        manifest, like = Manifest.proven(self._digest, offer.header, payload), self._like
        header = manifest.header
        if (header.run, header.schema, len(manifest.chunk_hashes)) != (like.header.run, like.header.schema, len(like.chunk_hashes)):
            raise BadState(f"the state {self._digest[:8]} belongs to another run or another set of tensors")
        self._manifest = manifest
        return manifest.chunk_hashes

    def target(self) -> Tensor:
        return self.buffer.bytes()

    def check(self, chunk: Tensor) -> None:
        if not bool(torch.isfinite(chunk.view(torch.float32)).all()):
            raise BadState(f"the state {self._digest[:8]} holds non-finite values")

    def known(self, index: int, hash_: bytes) -> Tensor | None:
        room = slice(index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES)
        if self.partial is not None and index in self.partial.done and self.partial.hashes[index] == hash_:
            return self.buffer.bytes()[room]
        return self._like.buffer.bytes()[room] if self._like.chunk_hashes[index] == hash_ else None

    def state(self) -> State:
        """Once all chunks are there."""
        return State(self._manifest.header, self.buffer, self._manifest.chunk_hashes)


@dataclass
class Replaying:
    """What it takes to repeat rounds. num_bytes: of an encoded mean."""

    num_bytes: int
    step: Step
    means: MeanStore


@dataclass
class _Fetch:
    head: Head
    holders: set[str]
    ours: State
    """Ours when it began."""
    download: Download
    began: float
    replay: Replay | None = None
    replayed: bool = False
    task: asyncio.Task | None = None

    @property
    def downloads(self) -> list[Download]:
        return [*(self.replay.downloads if self.replay else ()), self.download]

    def last_progress(self, now: float) -> float:
        return now if self.replay and self.replay.stepping else max(download.progressed for download in self.downloads)

    @property
    def asked(self) -> set[str]:
        return set().union(*(download.asked for download in self.downloads))

    @property
    def faults(self) -> dict[str, PeerLost]:
        """Who failed, and why; lies above all."""
        found = [fault for download in self.downloads for fault in download.faults.items()]
        return dict(sorted(found, key=lambda item: isinstance(item[1], Lied)))


class StateFetch:
    """At most one download at a time. Whoever signs a state and does not give it is asked again later and later.

    What came of a download that failed is kept for the next one: of the same state, or of a later one that shares chunks with it.
    It does not outlive the process: a state is written to disk whole or not at all.
    """

    def __init__(
        self,
        streams: Streams,
        refusal: Callable[[Head, Header], str],
        clock: Callable[[], float] = time.monotonic,
        replaying: Replaying | None = None,
        ended: Callable[[], None] = lambda: None,
        buffers: Buffers = IN_MEMORY,
        met: Container[str] = (),
        rng: random.Random | None = None,
    ):
        """met: the peers that we have averaged with. buffers: make the memory of what is fetched. ended: called when a fetch has come to its end. refusal: why a state with that header is not to be taken over as the head that was promised; '' when it is."""
        self._streams, self._refusal, self._clock, self._replaying, self._ended, self._buffers = streams, refusal, clock, replaying, ended, buffers
        self._met, self._rng = met, rng or random.SystemRandom()
        self._fetch: _Fetch | None = None
        self._partial: Partial | None = None
        self._penalties: dict[str, tuple[int, float]] = {}
        self.promises = Promises(clock)
        self.trouble = ""
        """Why the last state that was to be fetched is not here; '' once one is."""

    @property
    def signers(self) -> int:
        """How many peers sign the state being fetched; 0 while none is."""
        return len(self._fetch.holders) if self._fetch is not None else 0

    @property
    def began_from(self) -> State | None:
        """Our state when the fetch that goes on, or has just ended, began."""
        return self._fetch.ours if self._fetch is not None else None

    @property
    def share(self) -> float:
        """Of the state being fetched, what is here."""
        download = self._fetch.download if self._fetch is not None else None
        return len(download.done) / len(download.hashes) if download is not None and download.hashes else 0.0

    def avoids(self, peer: str) -> bool:
        """Whether `peer` has just failed to give a state, other than by saying that it cannot now."""
        failures, until = self._penalties.get(peer, (0, 0.0))
        return failures > 0 and until > self._clock()

    def consider(self, right: Mapping[Head, Collection[str]], ours: State) -> None:
        """Fetch what is right in place of `ours`: heads and who holds each, the best first; empty: `ours` is right."""
        if self._fetch is None and not right and self._partial is None:  # as 250 times a round of 8 peers
            return
        now = self._clock()
        if self._fetch is not None and not self._fetch.task.done():
            self._give_up_if_late(self._fetch, self._willing(right), ours)
        if self._fetch is not None and not self._fetch.task.done() and ours is not self._fetch.ours and self._fetch.head not in right:
            log.info("stopped fetching state=%s: ours is better by now", self._fetch.head.digest[:8])
            self._drop(self._fetch)
        if self._partial is not None and now - self._partial.progressed > PARTIAL_SECONDS:
            self._partial = None
        willing = self._willing(right)
        if self._fetch is not None:
            self._fetch.holders |= willing.get(self._fetch.head, set())
        elif best := next((head for head, peers in willing.items() if peers), None):
            self._begin(best, willing[best], ours)
        if self._fetch is not None:
            self.promises.asked(self._fetch.holders)

    def _willing(self, right: Mapping[Head, Collection[str]]) -> dict[Head, set[str]]:
        """Those of the holders that are not avoided just now."""
        now = self._clock()
        return {head: {peer for peer in peers if self._penalties.get(peer, (0, 0.0))[1] <= now} for head, peers in right.items()}

    def _give_up_if_late(self, fetch: _Fetch, willing: Mapping[Head, Collection[str]], ours: State) -> None:
        """One that stands still, or has taken longer than its bytes may; sooner when others than its holders have what is right by now."""
        now = self._clock()
        if now - fetch.last_progress(now) >= STALLED_SECONDS:
            return self._give_up(fetch, PeerLost("it stalled"))
        best = next(iter(willing.values()), ())
        contested = bool(best) and fetch.holders.isdisjoint(best)
        longest = fetch_seconds(ours.buffer.num_bytes, contested)
        if now - fetch.began >= longest:
            self._give_up(fetch, Slow(f"it has not come within {longest:.0f} s"))

    def _begin(self, head: Head, holders: set[str], ours: State) -> None:
        content, order = WholeState(head.digest, ours, self._partial, self._buffers), partial(self._order, f"{self._rng.getrandbits(64):016x}")
        download, self._partial = Download(content, holders, self._clock, order), None
        self._fetch = fetch = _Fetch(head, holders, ours, download, self._clock())
        log.info("fetching state=%s samples=%d holders=%d", head.digest[:8], head.samples, len(holders))
        fetch.task = asyncio.create_task(self._chase(fetch, ours))
        fetch.task.add_done_callback(lambda task: self._ended())

    def _order(self, salt: str, holder: str) -> tuple[int, bool, str]:
        """Holders that have seldom failed us come first, then those that we have met. The rest is drawn: a name that is first in a fixed order is found in no time."""
        return self._penalties.get(holder, (0, 0.0))[0], holder not in self._met, rank(salt, holder)

    async def _chase(self, fetch: _Fetch, ours: State) -> State:
        """Repeat the last rounds if that leads from `ours` there; else, or if it fails, fetch the whole state."""
        manifest = await ask_manifest(self._streams, fetch.holders, fetch.head.digest, fetch.download.order)
        if manifest is not None and (refusal := self._refusal(fetch.head, manifest.header)):
            raise BadState(refusal)
        if manifest is not None and self._replaying is not None:
            state = await self._replayed(fetch, ours, manifest, self._replaying)
            if state is not None:
                return state
        await fetch.download.run(self._streams)
        return fetch.download.content.state()

    async def _replayed(self, fetch: _Fetch, ours: State, manifest: Manifest, replaying: Replaying) -> State | None:
        fetch.replay = Replay(
            ours, manifest, fetch.head.digest, replaying.num_bytes, replaying.step, self._clock, self._buffers, fetch.download.order
        )
        if not fetch.replay.digests:
            return None
        try:
            state = await fetch.replay.run(self._streams, fetch.holders, replaying.means.want)
        except (PeerLost, BadState) as error:
            log.info("fetching the whole state %s: %s", fetch.head.digest[:8], error)
            return None
        fetch.replayed = True
        return state

    def result(self) -> State | None:
        """A state that has arrived, once; whether it is still wanted, the caller knows."""
        if self._fetch is None or not self._fetch.task.done():
            return None
        done, self._fetch = self._fetch, None
        try:
            state = done.task.result()
        except (PeerLost, BadState) as error:
            self._keep(done.download)
            self._punish(done, error)
            return None
        if refusal := self._refusal(done.head, state.header):
            self._punish(done, BadState(refusal))
            return None
        self._forgive(done)
        self.trouble = ""
        header, downloads = state.header, done.downloads
        log.info(
            "fetched round=%d state=%s samples=%d seconds=%.1f bytes=%d holders=%d replayed=%d",
            header.round, state.digest[:8], header.samples, self._clock() - done.began, sum(d.bytes_received for d in downloads),
            len({holder for d in downloads for holder in d.given}), len(done.replay.digests) if done.replayed else 0,
        )  # fmt: skip
        return state

    async def close(self) -> None:
        if self._fetch is not None:
            await end_tasks(self._fetch.task)
            self._fetch = None

    def _drop(self, fetch: _Fetch) -> None:
        fetch.task.cancel()
        fetch.download.closed = True  # what still comes is not written over what the next one brings
        self._fetch = None
        self._keep(fetch.download)

    def _give_up(self, fetch: _Fetch, error: PeerLost) -> None:
        self._drop(fetch)
        self._punish(fetch, error)

    def _keep(self, download: Download) -> None:
        content, hashes = download.content, download.hashes
        # One that nobody answered has taken nothing over yet from the one before it.
        self._partial = content.partial if hashes is None else Partial(content.buffer, hashes, frozenset(download.done), download.progressed)

    def _punish(self, fetch: _Fetch, error: Exception) -> None:
        log.warning("could not fetch state=%s: %s", fetch.head.digest[:8], error)
        self.trouble = f"could not fetch a newer state: {error}"
        # A state that is of no use is held against all who sign it. Else who was not asked comes next.
        asked, faults = (fetch.asked, fetch.faults) if isinstance(error, PeerLost) else ((), {})
        for peer in asked or fetch.holders:
            self._penalize(peer, faults.get(peer, error))

    def _forgive(self, fetch: _Fetch) -> None:
        """The download succeeded: only who lied meanwhile is to be avoided."""
        self.promises.kept(fetch.holders)
        for peer in fetch.holders:
            fault = fetch.faults.get(peer)
            if isinstance(fault, Lied):
                log.warning("%s; not asking it for a while", fault)
                self._penalize(peer, fault)
            else:
                self._penalties.pop(peer, None)

    def _penalize(self, peer: str, error: Exception) -> None:
        now = self._clock()
        self._penalties = {peer: (count, until) for peer, (count, until) in self._penalties.items() if until > now - 600}
        count = max(self._penalties.get(peer, (0, 0.0))[0], _LIAR_COUNT if isinstance(error, Lied | Slow) else 0)
        if not isinstance(error, Refused):
            self.promises.broken(peer, lied=isinstance(error, Lied))
        # Whoever says no is honest: it has moved on, or is busy with other downloads.
        seconds = _PENALTY_SECONDS * 2 ** (0 if isinstance(error, Refused) else min(count, 8))
        self._penalties[peer] = (count + (not isinstance(error, Refused)), now + min(seconds, _LONGEST_PENALTY_SECONDS))
