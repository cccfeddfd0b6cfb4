"""What a peer's parts share: values that are replaced and never changed in place, and the bell that rings when anything has happened.

A part reads a cell when it needs the value, and waits with `Bell.until` for what it needs. Nobody keeps a list of whom to tell.
"""

import asyncio
from collections.abc import Callable
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

    def ring(self) -> None:
        if self._waiting and not self._is_rung:
            self._is_rung = True
            next(iter(self._waiting)).future.get_loop().call_soon(self._ask)

    def _ask(self) -> None:
        self._is_rung = False
        for waiting in list(self._waiting):
            waiting.ask()

    async def rung(self, seconds: float) -> None:
        """Wait until it is rung, or for so long."""
        await self._rung(seconds, lambda: True)

    async def _rung(self, seconds: float, ready: Callable[[], object]) -> None:
        """Wait until `ready` says something true. It is asked after rings, and every `seconds`."""
        waiting = _Waiting(asyncio.get_running_loop().create_future(), ready)
        self._waiting[waiting] = None
        # Not `wait_for`, which makes a task each time: this is the loop in which a peer idles.
        waiting.ask_later(seconds)
        try:
            await waiting.future
        finally:
            waiting.late.cancel()
            del self._waiting[waiting]

    async def until(self, ready: Callable[[], T], seconds: float = 1.0) -> T:
        """Wait until `ready` says something true, and return that. It is asked after rings, and every `seconds` where time alone may tell."""
        while not (found := ready()):
            await self._rung(seconds, ready)
        return found


class _Waiting:
    """Somebody who waits for the bell. Asked in vain it sleeps on: to wake a task takes five times as long as to ask."""

    def __init__(self, future: asyncio.Future[None], ready: Callable[[], object]):
        self.future, self._ready = future, ready
        self.late: asyncio.TimerHandle

    def ask(self) -> None:
        try:
            if self._ready() and not self.future.done():
                self.future.set_result(None)
        except Exception:  # it asks itself once more, and hears of the error
            if not self.future.done():
                self.future.set_result(None)

    def ask_later(self, seconds: float) -> None:
        self.late = self.future.get_loop().call_later(seconds, self._due, seconds)

    def _due(self, seconds: float) -> None:
        self.ask()
        if not self.future.done():
            self.ask_later(seconds)


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
