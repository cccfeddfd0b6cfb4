"""Stopping: the first SIGINT or SIGTERM asks for a clean end, a second one ends at once."""

import os
import signal
import time
from collections.abc import Callable

# Ctrl-C under a launcher arrives twice, from the terminal and from the launcher: within this time it is one wish.
_SAME_WISH_SECONDS = 1.0


class Stop:
    """Whether someone asked to stop; `Stop().listen()` takes over the signals of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, end_now: Callable[[int], object] = os._exit):
        self._clock, self._end_now = clock, end_now
        self._asked: float | None = None

    def __call__(self) -> bool:
        return self._asked is not None

    def listen(self) -> "Stop":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.hear)
        return self

    def hear(self, number: int, frame: object = None) -> None:
        now = self._clock()
        if self._asked is None:
            self._asked = now
            # No logging here: a handler may interrupt the logger while it holds its lock.
            os.write(2, b"stopping after this step; once more to stop at once.\n")
        elif now - self._asked >= _SAME_WISH_SECONDS:
            self._end_now(130)
