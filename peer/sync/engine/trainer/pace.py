"""How fast a trainer is, and what share of its time it spends on rounds: what it tells the swarm of itself."""

import contextlib
from collections.abc import Callable, Iterator

_MEMORY = 0.9
_LOST_MEMORY = 0.7
"""Of the share before: the last three rounds weigh most."""


class Pace:
    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.samples_per_second = self.step_seconds = self.share_lost = 0.0
        self.step_samples = 0
        """The most that one step took."""
        self._last_step: float | None = None
        self._rebased: float | None = None
        self._lost_seconds = 0.0

    def stepped(self, samples: int) -> None:
        """A step of `samples` samples is done."""
        now, before = self._clock(), self._last_step
        if before is not None and now > before:
            memory = _MEMORY if self.samples_per_second else 0.0
            self.samples_per_second = memory * self.samples_per_second + (1 - memory) * samples / (now - before)
            self.step_seconds = memory * self.step_seconds + (1 - memory) * (now - before)
        self._last_step, self.step_samples = now, max(self.step_samples, samples)

    def pause(self) -> None:
        """The time until the next step's end is no step's."""
        self._last_step = None

    @contextlib.contextmanager
    def lost(self) -> Iterator[None]:
        """The block is time spent on rounds."""
        began = self._clock()
        try:
            yield
        finally:
            self._lost_seconds += self._clock() - began

    def rebased(self) -> None:
        """From one rebase to the next."""
        now = self._clock()
        if self._rebased is not None and now > self._rebased:
            share = min(self._lost_seconds / (now - self._rebased), 1.0)
            self.share_lost = _LOST_MEMORY * self.share_lost + (1 - _LOST_MEMORY) * share if self.share_lost else share
        self._rebased, self._lost_seconds = now, 0.0
