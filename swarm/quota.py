"""How often others may ask for what costs us something: in all, and each of them."""

import collections
import time
from collections.abc import Callable


class Quota:
    """At most `in_all` within `seconds`, and at most `each` of one name: a peer's id, or the place where it is. What is refused costs nothing."""

    def __init__(self, in_all: int, each: int, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._in_all, self._each, self._seconds, self._clock = in_all, each, seconds, clock
        self._taken: collections.deque[tuple[float, tuple[str, ...]]] = collections.deque()

    def allows(self, *names: str) -> bool:
        """Whether there is one left for these names."""
        while self._taken and self._taken[0][0] <= self._clock() - self._seconds:
            self._taken.popleft()
        if len(self._taken) >= self._in_all:
            return False
        return all(sum(name in taken for _, taken in self._taken) < self._each for name in names)

    def take(self, *names: str) -> bool:
        """Use one, if there is one left; whether there was."""
        if not self.allows(*names):
            return False
        self._taken.append((self._clock(), names))
        return True
