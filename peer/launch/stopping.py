"""Stopping: the first SIGINT, SIGTERM or SIGHUP asks for a clean end, a second SIGINT or SIGTERM ends at once."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

from swarm.errors import STOPPED_AT_ONCE, ExitCode
from swarm.logs import line

# Ctrl-C under a launcher arrives twice, from the terminal and from the launcher: within this time it is one wish.
_SAME_WISH_SECONDS = 1.0


def wishes() -> list[signal.Signals]:
    """The signals that ask to stop. SIGHUP, of a terminal that is closed, is none where it is ignored: under nohup."""
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def say(text: str) -> None:
    """One line on stderr, from a signal's handler: no logging there, which may be interrupted while it holds its lock.

    Nothing where nobody reads it any more: a closed terminal, or the `tee` of `dd-peer ... 2>&1 | tee log`, which Ctrl-C ends as well.
    """
    with contextlib.suppress(OSError):
        os.write(2, (line(text) + "\n").encode())


class Stop:
    """Whether someone asked to stop; `Stop().listen()` takes over the signals of this process. after: what is finished first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, end_now: Callable[[int], object] = os._exit, after: str = " after this step"):
        self._clock, self._end_now, self._after = clock, end_now, after
        self._asked: float | None = None
        self._begun = True

    def __call__(self) -> bool:
        return self._asked is not None

    def listen(self) -> "Stop":
        for number in wishes():
            signal.signal(number, self.hear)
        return self

    @contextlib.contextmanager
    def before_it_begins(self) -> Iterator[None]:
        """Within it there is nothing to lose yet: who asks to stop ends at once. Raises SystemExit if someone has asked before."""
        if self():
            raise SystemExit(ExitCode.OK)
        self._begun = False
        try:
            yield
        finally:
            self._begun = True

    def hear(self, number: int, frame: object = None) -> None:
        now = self._clock()
        if self._asked is None:
            self._asked = now
            say(f"stopping{self._after}; once more to stop at once." if self._begun else "stopped before it began.")
            if not self._begun:
                self._end_now(ExitCode.OK)  # an exception here, at any line of asyncio's, hung or was lost in 11 of 212 tries
        elif now - self._asked >= _SAME_WISH_SECONDS and number != signal.SIGHUP:  # who closes the terminal after Ctrl-C is in no hurry
            self._end_now(STOPPED_AT_ONCE)
