"""Fetching a better state in the background: a head that nobody can give must not keep anybody from averaging."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from peer.sync.engine.donors import Download, fetch
from peer.sync.engine.state import BadState, Head, State, better
from peer.sync.engine.streams import PeerLost, Refused, Streams
from swarm.tasks import end_tasks

log = logging.getLogger(__name__)

STALLED_SECONDS = 10.0
_PENALTY_SECONDS = 5.0
_LONGEST_PENALTY_SECONDS = 300.0


@dataclass
class _Fetch:
    head: Head
    holders: set[str]
    download: Download
    task: asyncio.Task
    began: float


class Takeover:
    """At most one download at a time. Whoever signs a state and does not give it is asked again later and later."""

    def __init__(self, streams: Streams, acceptable: Callable[[State], str], clock: Callable[[], float] = time.monotonic):
        """acceptable: why a fetched state is refused, '' when it is not."""
        self._streams, self._acceptable, self._clock = streams, acceptable, clock
        self._fetch: _Fetch | None = None
        self._penalties: dict[str, tuple[int, float]] = {}

    @property
    def signers(self) -> int:
        """How many peers sign the state being fetched; 0 while none is."""
        return len(self._fetch.holders) if self._fetch is not None else 0

    def consider(self, claims: Iterable[tuple[Head, str]], ours: State) -> None:
        """Start to fetch the best of what others claim to hold, (head, peer) each, if it beats `ours`."""
        now = self._clock()
        if self._fetch is not None:
            if self._fetch.task.done() or now - self._fetch.download.progressed < STALLED_SECONDS:
                return
            self._give_up(self._fetch, "it stalled")
        wanted: dict[Head, set[str]] = {}
        for head, peer in claims:
            if better(head, Head.of(ours)) and self._penalties.get(peer, (0, 0.0))[1] <= now:
                wanted.setdefault(head, set()).add(peer)
        if not wanted:
            return
        # What most sign comes first: a single liar may promise any number of samples.
        best = min(wanted, key=lambda head: (-len(wanted[head]), -head.samples, head.digest))
        download = Download(best.digest, ours, self._clock)
        task = asyncio.create_task(fetch(self._streams, sorted(wanted[best]), download))
        self._fetch = _Fetch(best, wanted[best], download, task, now)

    def result(self) -> State | None:
        """A state that has arrived, once."""
        if self._fetch is None or not self._fetch.task.done():
            return None
        done, self._fetch = self._fetch, None
        try:
            state = done.task.result()
        except (PeerLost, BadState) as error:
            self._punish(done, error)
            return None
        refusal = self._acceptable(state) or ("its samples are not those promised" if state.header.samples != done.head.samples else "")
        if refusal:
            self._punish(done, BadState(refusal))
            return None
        for peer in done.holders:
            self._penalties.pop(peer, None)
        seconds = self._clock() - done.began
        header = state.header
        log.info("fetched round=%d state=%s samples=%d seconds=%.1f", header.round, state.digest[:8], header.samples, seconds)
        return state

    async def close(self) -> None:
        if self._fetch is not None:
            await end_tasks(self._fetch.task)
            self._fetch = None

    def _give_up(self, fetch: _Fetch, reason: str) -> None:
        fetch.task.cancel()
        self._fetch = None
        self._punish(fetch, PeerLost(reason))

    def _punish(self, fetch: _Fetch, error: Exception) -> None:
        log.warning("could not take over state=%s: %s", fetch.head.digest[:8], error)
        now = self._clock()
        self._penalties = {peer: (count, until) for peer, (count, until) in self._penalties.items() if until > now - 600}
        for peer in fetch.holders:
            count, _ = self._penalties.get(peer, (0, 0.0))
            # Whoever says no is honest: it has moved on, or is busy with other downloads.
            seconds = _PENALTY_SECONDS * 2 ** (0 if isinstance(error, Refused) else min(count, 8))
            self._penalties[peer] = (count + (not isinstance(error, Refused)), now + min(seconds, _LONGEST_PENALTY_SECONDS))
