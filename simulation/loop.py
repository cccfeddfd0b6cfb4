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
from collections.abc import Callable
from typing import Any, Protocol


class Owner(Protocol):
    """A process, as far as the loop must know it."""

    stopped: bool
    dead: bool
    held: list["_Handle"]

    def job(self, call: Callable[[], Any]) -> tuple[Any, float, Callable[[], None]]:
        """Run a thread's job: its result, the seconds that it takes, and what to do when these are over."""
        ...


OWNER: contextvars.ContextVar["Owner | None"] = contextvars.ContextVar("owner", default=None)


class Deadlock(Exception):
    """Nothing will ever happen again."""


class _Handle:
    """As `asyncio.TimerHandle`; one for both kinds."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_when")

    def __init__(self, when: float, callback: Callable, args: tuple, context: contextvars.Context):
        self._when, self._callback, self._args, self._context, self._cancelled = when, callback, args, context, False

    def when(self) -> float:
        return self._when

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        self._cancelled, self._callback, self._args = True, None, ()


class _Numbered:
    """What has its loop's next number for a hash, from when it is first put into a set on."""

    def __hash__(self) -> int:
        try:
            return self._number
        except AttributeError:
            self._number = next(self.get_loop()._numbers)
            return self._number


class _Task(_Numbered, asyncio.Task):
    owner: Owner | None
    """The process that began it."""


class _Future(_Numbered, asyncio.Future):
    pass


class VirtualLoop(asyncio.BaseEventLoop):
    """`now`: seconds since the world began. Of two timers for one moment the one that was set first goes first."""

    def __init__(self, rng: random.Random):
        super().__init__()
        self.now, self._rng, self._numbers = 0.0, rng, itertools.count(1)
        self._timers: list[tuple[float, int, _Handle]] = []

    def time(self) -> float:
        return self.now

    def create_future(self) -> asyncio.Future:
        return _Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None) -> asyncio.Task:
        task = _Task(coro, loop=self, name=name, context=context)
        task.owner = OWNER.get() if context is None else context.get(OWNER)
        return task

    def call_soon(self, callback: Callable, *args: Any, context: contextvars.Context | None = None) -> _Handle:
        # Not `or`: an empty context is false.
        handle = _Handle(self.now, callback, args, contextvars.copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Callable, *args: Any, context: contextvars.Context | None = None) -> _Handle:
        handle = _Handle(when, callback, args, contextvars.copy_context() if context is None else context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def call_later(self, delay: float, callback: Callable, *args: Any, context: contextvars.Context | None = None) -> _Handle:
        when = self.now + delay
        handle = _Handle(when, callback, args, contextvars.copy_context() if context is None else context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """A generator that nobody ended is dropped as it is: a task that unwinds it would come when the collector likes, not the seed."""

    def _run_once(self) -> None:
        """All that there is to do until somebody stops the loop: asyncio's own does one turn, and looks at sockets in each."""
        ready, timers = self._ready, self._timers
        while not self._stopping:
            if ready:
                handle = ready.popleft()
            elif timers:
                when, _, handle = heapq.heappop(timers)
                if when > self.now and not handle._cancelled:
                    self.now = when
            else:
                raise Deadlock("no timer is left and nothing is to be done")
            if handle._cancelled:
                continue
            owner = handle._context.get(OWNER)
            if owner is not None and (owner.dead or owner.stopped):
                if not owner.dead:
                    owner.held.append(handle)
                continue
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"in {handle._callback!r}", "exception": error})

    def go_on(self, owner: Owner) -> None:
        """A process that was stopped does what it could not do meanwhile."""
        self._ready.extend(owner.held)
        owner.held.clear()

    def forget(self) -> None:
        """Nothing more happens."""
        self._ready.clear()
        self._timers.clear()

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
