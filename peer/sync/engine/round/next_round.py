"""When the round that follows our state is due: enough samples wait here and with the others, or one of them calls. Begins nothing itself."""

import math
import time
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from peer.sync.engine.cell import Cell
from peer.sync.engine.net.neighbours import Neighbours
from peer.sync.engine.round import span
from peer.sync.engine.state import State
from peer.sync.engine.trainer.messages import Progress
from swarm.end import End
from swarm.records import RENEW_SECONDS, PeerRecord
from swarm.run_config import RunConfig

_ADDED_UP_SECONDS = 0.01
"""What the others promise is added up at most once in this time: each ring of the bell asks for it, and their records are a second old."""


class _AddedUp(NamedTuple):
    """What those of `others` that count promise onto `state`: how many samples when that was `at` seconds old, and how many more in a second."""

    state: State | None
    others: Sequence[PeerRecord]
    at: float
    promised: int
    rate: float


class NextRound:
    def __init__(
        self,
        run: RunConfig,
        end: End,
        neighbours: Neighbours,
        state: Cell[State],
        wall: Callable[[], float] = time.time,
    ):
        self._run, self._end, self._neighbours, self._state, self._wall = run, end, neighbours, state, wall
        self._called: dict[str, tuple[str, int]] = {}
        """Who said, since the last attempt, that they are ready to average, onto which state, and how often ours had changed then."""
        self._added_up = _AddedUp(None, (), 0.0, 0, 0.0)

    def call(self, peer: str, digest: str) -> None:
        """`peer` is ready to average onto the state `digest`."""
        self._called[peer] = digest, self._state.changes

    def _callers(self) -> dict[str, str]:
        """Peer -> the state it averages onto. Who called before our state was this one, and onto another, has moved on as well."""
        ours, changes = self._state.value.digest, self._state.changes
        return {peer: digest for peer, (digest, before) in self._called.items() if before == changes or digest == ours}

    def take_callers(self) -> frozenset[str]:
        """All who called; they are forgotten."""
        callers, self._called = frozenset(self._callers()), {}
        return callers

    def is_called(self) -> bool:
        """Whether somebody is ready to average onto our state."""
        ours = self._state.value.digest
        return any(digest == ours for digest, _ in self._called.values())

    def is_called_here_or_ahead(self) -> bool:
        """The same, or onto one that we do not know. Who calls onto the state before ours has missed a round, and comes after us."""
        return bool(self._called) and any(digest not in self._state.value.header.parents for digest in self._callers().values())

    def is_full(self, progress: Progress) -> bool:
        """To the nearest end of a step: who begins another one shortly before, keeps all others waiting for it."""
        return progress.waiting > 0 and self._missing(progress) <= 0

    def seconds_until_full(self, progress: Progress) -> float:
        """As far as the others' promises tell; inf while they promise nothing."""
        missing, rate = self._missing(progress), self._promises()[1]
        return max(missing, 0) / rate if rate else math.inf

    def _missing(self, progress: Progress) -> float:
        """Samples until the round is full."""
        needed = span.round_samples(self._run, self._end, self._state.value.header)
        promised, _ = self._promises()
        is_last = needed < self._run.target_batch_size  # falling short of that by a few samples would take one more round
        half_a_step = progress.samples_per_second * progress.step_seconds / 2 if promised and not is_last else 0
        return needed - progress.waiting - promised - half_a_step

    def _promises(self) -> tuple[int, float]:
        """Samples that the others have for the next round, and how many more they make in a second."""
        ours, others, age = self._state.value, self._neighbours.others(), self._state.age_seconds
        if ours is not self._added_up.state or others is not self._added_up.others or age - self._added_up.at > _ADDED_UP_SECONDS:
            now, made, here = self._wall(), _makers(ours), (ours.digest, *ours.header.parents[:1])
            counted = self._neighbours.counted_upon()
            promised = sum([self._promised(record, now, made) for record in counted])
            rate = sum([record.samples_per_second for record in counted if record.digest in here])
            self._added_up = _AddedUp(ours, others, age, promised, rate)
        return self._added_up.promised, self._added_up.rate

    def promised(self, record: PeerRecord) -> int:
        """Samples that its owner has for the next round, at the speed that it last had.

        Who made our state with us stands on it, whatever its record said before: with rounds of half a second, and records read once a
        second, every second round would otherwise be twice as large as its target.
        """
        return self._promised(record, self._wall(), _makers(self._state.value))

    def _promised(self, record: PeerRecord, now: float, made: Container[str]) -> int:
        """made: who made our state."""
        ours = self._state.value
        if record.digest == ours.digest:
            promised, seconds = record.waiting_samples, now - record.time
        elif record.peer_id in made and record.digest in ours.header.parents:
            promised, seconds = 0, self._state.age_seconds
        else:
            return 0
        if seconds > 0:
            promised += int(record.samples_per_second * min(seconds, RENEW_SECONDS))
        return min(promised, 2 * self._run.target_batch_size)


def _makers(state: State) -> set[str]:
    return {member.peer for member in state.header.members}
