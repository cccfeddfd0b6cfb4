"""An asyncio loop whose time jumps from timer to timer, and in which everything happens in an order that the seed alone decides.

asyncio keeps tasks and futures in sets, which are ordered by address: here each has its number for a hash. A job for a thread runs at once,
and its result comes after a drawn delay. A callback belongs to the process in whose context it was made: of one that is stopped it waits, of
one that is dead it never runs, as after SIGSTOP and SIGKILL.
"""

import asyncio
import contextvars
import heapq
import itertools
import random
import selectors
from collections.abc import Callable
from typing import Any, Protocol


class Owner(Protocol):
    """A process, as far as the loop must know it."""

    stopped: bool
    dead: bool
    held: list[asyncio.Handle]

    def job(self, call: Callable[[], Any]) -> tuple[Any, float, Callable[[], None]]:
        """Run a thread's job: its result, the seconds that it takes, and what to do when these are over."""
        ...


OWNER: contextvars.ContextVar["Owner | None"] = contextvars.ContextVar("owner", default=None)


class Deadlock(Exception):
    """Nothing will ever happen again."""


class _Jump(selectors.SelectSelector):
    """Never waits: the loop's clock goes to where the next timer is."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise Deadlock("no timer is left and nothing is to be done")
        if timeout > 0:
            self.loop.now += timeout
        return []


def _may_run(handle: asyncio.Handle) -> bool:
    owner = handle._context.get(OWNER)
    if owner is None:
        return True
    if owner.stopped and not owner.dead:
        owner.held.append(handle)
        return False
    return not owner.dead


class _Handle(asyncio.Handle):
    __slots__ = ()

    def _run(self) -> None:
        if _may_run(self):
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    __slots__ = ()

    def _run(self) -> None:
        if _may_run(self):
            super()._run()


class _Task(asyncio.Task):
    def __init__(self, coro: Any, *, number: int, **options: Any):
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future):
    def __init__(self, *, number: int, loop: asyncio.AbstractEventLoop):
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now`: seconds since the world began. Of two timers for one moment the one that was set first goes first."""

    def __init__(self, rng: random.Random):
        self.now, self._rng, self._numbers = 0.0, rng, itertools.count(1)
        selector = _Jump()
        super().__init__(selector)
        selector.loop = self
        self._clock_resolution = 1e-9
        self.set_task_factory(lambda loop, coro, **options: _Task(coro, loop=loop, number=next(self._numbers), **options))

    def time(self) -> float:
        return self.now

    def create_future(self) -> asyncio.Future:
        return _Future(number=next(self._numbers), loop=self)

    def _call_soon(self, callback: Callable, args: tuple, context: contextvars.Context | None) -> asyncio.Handle:
        handle = _Handle(callback, args, self, contextvars.copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        # A heap keeps no order of equals: a moment of its own for each.
        context = contextvars.copy_context() if context is None else context  # not `or`: an empty context is false
        timer = _TimerHandle(when + next(self._numbers) * 1e-13, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def run_in_executor(self, executor: object, func: Callable, *args: Any) -> asyncio.Future:
        future, owner = self.create_future(), OWNER.get()

        def call() -> tuple[Any, Exception | None]:
            try:
                return func(*args), None
            except Exception as error:
                return None, error

        (result, error), seconds, ended = owner.job(call) if owner is not None else (call(), 0.001, lambda: None)

        def answer() -> None:
            ended()
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(seconds, answer)
        return future
