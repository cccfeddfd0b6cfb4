"""How much may be done for one remote: a burst at once, and a rate after that."""

import time
from collections.abc import Callable, Hashable


class Budget:
    """`take()` until it says no. clock: in seconds."""

    def __init__(self, per_second: float, at_once: int, clock: Callable[[], float] = time.monotonic):
        self._per_second, self._at_once, self._clock = per_second, at_once, clock
        self._left, self._counted = float(at_once), clock()

    @property
    def is_spent(self) -> bool:
        now = self._clock()
        self._left = min(self._at_once, self._left + (now - self._counted) * self._per_second)
        self._counted = now
        return self._left < 1

    def take(self, amount: float = 1.0) -> bool:
        """Whether there is one left; then `amount` is spent, what is more than there was of what comes next."""
        if self.is_spent:
            return False
        self._left -= amount
        return True


class Budgets:
    """A budget each, of which the `most` used last are remembered: a stranger with many names must not fill our memory."""

    def __init__(self, per_second: float, at_once: int, most: int = 1024, clock: Callable[[], float] = time.monotonic):
        self._terms, self._most, self._clock = (per_second, at_once), most, clock
        self._of: dict[Hashable, Budget] = {}

    def is_spent(self, whose: Hashable) -> bool:
        return whose in self._of and self._of[whose].is_spent

    def take(self, whose: Hashable, amount: float = 1.0) -> bool:
        budget = self._of.pop(whose, None) or Budget(*self._terms, self._clock)
        self._of[whose] = budget
        if len(self._of) > self._most:
            del self._of[next(iter(self._of))]
        return budget.take(amount)
