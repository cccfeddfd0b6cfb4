"""What to do after a trainer has ended: nothing, start it again after a while, or give up."""

import random
import signal
from dataclasses import dataclass

from swarm.errors import ExitCode

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
HEALTHY_SECONDS = LONGEST_PAUSE_SECONDS
"""A trainer that trained for this long is well again, and the failures before do not count any more: it trains longer than it waits, and giving up
would help nobody."""
ROOMY_SECONDS = 600.0
"""A trainer that trained for this long has memory enough: something else took it."""
_SLOW = {ExitCode.NETWORK: 300.0, ExitCode.DISK: 600.0, ExitCode.CLOCK: 300.0}
"""Others must come back, or space be made: it helps to wait longer."""
_HOPELESS = {
    ExitCode.CONFIG: "only you can mend that",
    ExitCode.AUTH: "the error above says what to do",
    ExitCode.OVER: "the run goes on for nobody",
}


@dataclass(frozen=True)
class End:
    """How one life of a trainer ended. code: its exit status, negative for the signal that ended it."""

    code: int
    stalled: bool = False
    out_of_memory: bool = False
    """Whether the kernel had to kill a process for memory at that moment."""
    trained_seconds: float = 0.0
    """From its first step to its last sign of life."""

    @property
    def kind(self) -> int:
        """The exit code that says of which kind the end was."""
        if self.stalled:
            return ExitCode.STALLED
        if self.code == -signal.SIGKILL and self.out_of_memory:
            return ExitCode.MEMORY
        return ExitCode.FAILED if self.code < 0 else self.code

    def __str__(self) -> str:
        if self.stalled:
            return "it stood still"
        if self.kind == ExitCode.MEMORY:
            return "it ran out of memory"
        return f"it was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit status {self.code}"


@dataclass(frozen=True)
class Verdict:
    """pause: seconds until it is started again; None: it is not. why: in words. smaller: with half the micro-batch. roomier: with one more option."""

    pause: float | None
    why: str
    smaller: bool = False
    roomier: bool = False


class Policy:
    """Asked once for each end, in their order. most_failures: in a row, before it gives up; 0: never."""

    def __init__(self, most_failures: int, rng: random.Random | None = None):
        self._most, self._rng = most_failures, rng or random.Random()
        self._failures = 0
        self._shrunk = self._trained = False

    def after(self, end: End, *, can_shrink: bool, can_make_room: bool = False) -> Verdict:
        """can_shrink: whether the micro-batch can be made smaller; can_make_room: whether an option is left that takes less memory."""
        if end.code in (ExitCode.OK, 130) and not end.stalled:
            return Verdict(None, "it is done")
        if why := _HOPELESS.get(end.kind):
            return Verdict(None, why)
        self._failures = 1 if end.trained_seconds >= HEALTHY_SECONDS else self._failures + 1
        self._trained = self._trained or end.trained_seconds > 0
        shrink = end.kind == ExitCode.MEMORY and not self._shrunk
        if shrink and can_shrink:
            self._shrunk = True
            return Verdict(self._pause(end.kind), "with a smaller micro-batch", smaller=True)
        if end.kind == ExitCode.MEMORY and end.trained_seconds < ROOMY_SECONDS:
            if can_make_room:
                return Verdict(self._pause(end.kind), "with an option that takes less memory", roomier=True)
            return Verdict(None, "a smaller micro-batch did not help" if self._shrunk else "the micro-batch cannot be smaller")
        # A network that once was there comes back: an evening without it must not end a run of weeks.
        if self._most and self._failures >= self._most and not (end.kind == ExitCode.NETWORK and self._trained):
            return Verdict(None, f"it failed {self._failures} times in a row")
        return Verdict(self._pause(end.kind), f"failure {self._failures}" + (f" of {self._most}" if self._most else ""))

    def _pause(self, kind: int) -> float:
        """Twice as long each time, half to one and a half times of it by chance, so that a swarm that lost its server does not come back at once."""
        longest = _SLOW.get(kind, LONGEST_PAUSE_SECONDS)
        return min(FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures - 1, 20), longest) * self._rng.uniform(0.5, 1.5)


def smaller(batch: int, accumulation: int, *, fused: bool = False) -> tuple[int, int] | None:
    """Micro-batch and accumulation of the same step with at most half as much at once; None when one sample is too much.

    6 x 2 becomes 3 x 4, and 9 x 1 becomes 3 x 3: a step keeps its samples exactly. fused: nothing can be accumulated, and it has fewer.
    """
    less = next((size for size in range(batch // 2, 0, -1) if batch % size == 0), None)
    return None if less is None else (less, accumulation * (1 if fused else batch // less))
