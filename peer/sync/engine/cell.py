"""What a peer's parts share: values that are replaced and never changed in place, and the bell that rings when anything has happened.

A part reads a cell when it needs the value, and waits with `Bell.until` for what it needs. Nobody keeps a list of whom to tell.
"""

import asyncio
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class Phase(str, Enum):
    """What a peer is at. Others read a shorter list of words in its record (`status.seen_as`)."""

    JOIN = "join"
    TRAIN = "train"
    FETCH = "fetch"
    """It holds its contribution back, since a better state is on its way."""
    GROUP = "group"
    AVERAGE = "average"
    LOOK = "look"
    """A round has failed: it looks whether the others have made it."""
    DONE = "done"
    LEFT = "left"


class Bell:
    """Rung whenever something has happened that somebody may wait for; all who wait are then asked whether that is it.

    They are asked once a turn of the loop, however often it was rung, and only those go on that have found what they wait for: of 30 rings
    a round and peer most concern one of four.
    """

    def __init__(self) -> None:
        self._waiting: dict[_Waiting, None] = {}
        self._is_rung = False
        self._late: asyncio.TimerHandle | None = None
        """For whoever is due next. Nine waits of ten end by a ring: a timer of each would be set and cancelled 200 times a round of 8 peers."""

    def ring(self) -> None:
        if self._waiting and not self._is_rung:
            self._is_rung = True
            next(iter(self._waiting)).future.get_loop().call_soon(self._ask)

    def _ask(self) -> None:
        self._is_rung = False
        self._ask_each([*self._waiting])

    def _ask_each(self, those: Iterable["_Waiting"]) -> None:
        """Whether this is what they wait for. Asked in vain they sleep on: to wake a task takes five times as long as to ask."""
        for waiting in those:
            try:
                is_it = waiting.ready()
            except Exception:  # it asks itself once more, and hears of the error
                is_it = True
            if is_it and not waiting.future.done():
                waiting.future.set_result(None)

    async def rung(self, seconds: float) -> None:
        """Wait until it is rung, for `seconds` at most."""
        await self._rung(seconds, lambda: True)

    async def _rung(self, seconds: float, ready: Callable[[], object]) -> None:
        """Wait until `ready` says something true. It is asked after rings, and every `seconds`."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(loop.create_future(), ready, seconds, loop.time() + seconds)
        self._waiting[waiting] = None
        # Not `wait_for`, which makes a task each time: this is the loop in which a peer idles.
        self._ask_later(loop, waiting.due)
        try:
            await waiting.future
        finally:
            del self._waiting[waiting]
            if not self._waiting:
                self._late.cancel()
                self._late = None

    def _ask_later(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        if self._late is None or when < self._late.when():
            if self._late is not None:
                self._late.cancel()
            self._late = loop.call_at(when, self._ask_due, loop)

    def _ask_due(self, loop: asyncio.AbstractEventLoop) -> None:
        # The timer's own time: a loop may run it some microseconds before that.
        now, self._late = max(self._late.when(), loop.time()), None
        late = [waiting for waiting in self._waiting if waiting.due <= now]
        for waiting in late:
            waiting.due = now + waiting.seconds
        self._ask_each(late)
        if self._waiting:
            self._ask_later(loop, min([waiting.due for waiting in self._waiting]))

    async def until(self, ready: Callable[[], T], seconds: float = 1.0) -> T:
        """Wait until `ready` says something true, and return that. It is asked after rings, and every `seconds` where time alone may tell."""
        while not (found := ready()):
            await self._rung(seconds, ready)
        return found


class _Waiting:
    """Somebody who waits for the bell. due: when to ask although nothing rang, by the loop's clock; then every `seconds`."""

    def __init__(self, future: asyncio.Future[None], ready: Callable[[], object], seconds: float, due: float):
        self.future, self.ready, self.seconds, self.due = future, ready, seconds, due


class Cell(Generic[T]):
    """One value, and since when it has been that one, in seconds of `clock`. `set` alone replaces `value`, which is read 500 times a round."""

    def __init__(self, value: T, bell: Bell, clock: Callable[[], float]):
        self.value, self._bell, self._clock = value, bell, clock
        self.since = clock()
        self.changes = 0
        """How often it was replaced."""

    @property
    def age_seconds(self) -> float:
        return self._clock() - self.since

    def set(self, value: T) -> None:
        if value is not self.value:
            self.value, self.since, self.changes = value, self._clock(), self.changes + 1
            self._bell.ring()
