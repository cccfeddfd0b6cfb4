"""An asyncio loop whose time jumps from timer to timer, and in which everything happens in an order that the seed alone decides.

asyncio keeps tasks and futures in sets, which are ordered by address: here each has its number for a hash. A job for a thread runs at once,
and its result comes after a drawn delay. A callback belongs to the process in whose context it was made: of one that is stopped it waits, of
one that is dead it never runs, as after SIGSTOP and SIGKILL.
"""

import asyncio
import contextvars
import functools
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


_MANY_TIMERS = 256
OWNER: contextvars.ContextVar["Owner | None"] = contextvars.ContextVar("owner", default=None)


class Deadlock(Exception):
    """Nothing will ever happen again."""


class _Handle(list):
    """As `asyncio.TimerHandle`; one for both kinds: [when, number, callback, args, context], in the order in which a heap compares them.

    A list, since a round of eight peers makes four thousand of them, and C makes one in a third of the time. callback: None once cancelled.
    """

    __slots__ = ()

    def when(self) -> float:
        return self[0]

    def cancelled(self) -> bool:
        return self[2] is None

    def cancel(self) -> None:
        self[2] = None  # a slice takes three times as long
        self[3] = ()


class _Numbered:
    """What has its loop's next number for a hash, from when it is first put into a set on."""

    _number = 0

    def __hash__(self) -> int:
        if not self._number:
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
        self._timers: list[_Handle] = []
        self._many = _MANY_TIMERS
        self.time = functools.partial(getattr, self, "now")
        """Without a frame of Python as well: it is asked 5,000 times a round."""
        self.get_debug = bool
        """False, as asyncio's own, without a frame of Python: each future asks, a thousand a round."""

    def create_future(self) -> asyncio.Future:
        return _Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None) -> asyncio.Task:
        task = _Task(coro, loop=self, name=name, context=context)
        task.owner = OWNER.get() if context is None else context.get(OWNER)
        return task

    def call_soon(self, callback: Callable, *args: Any, context: contextvars.Context | None = None) -> _Handle:
        # Not `or`: an empty context is false.
        handle = _Handle((0.0, 0, callback, args, contextvars.copy_context() if context is None else context))
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Callable, *args: Any, context: contextvars.Context | None = None) -> _Handle:
        handle = _Handle((when, next(self._numbers), callback, args, contextvars.copy_context() if context is None else context))
        heapq.heappush(self._timers, handle)
        return handle

    def call_later(self, delay: float, callback: Callable, *args: Any, context: contextvars.Context | None = None) -> _Handle:
        handle = _Handle((self.now + delay, next(self._numbers), callback, args, contextvars.copy_context() if context is None else context))
        heapq.heappush(self._timers, handle)
        return handle

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """A generator that nobody ended is dropped as it is: a task that unwinds it would come when the collector likes, not the seed."""

    def _run_once(self) -> None:
        """All that there is to do until somebody stops the loop: asyncio's own does one turn, and looks at sockets in each."""
        ready, timers, pop = self._ready, self._timers, heapq.heappop
        while not self._stopping:
            if ready:
                handle = ready.popleft()
            elif timers:
                if len(timers) > self._many:
                    self._forget_cancelled()
                handle = pop(timers)
                if handle[2] is not None and handle[0] > self.now:
                    self.now = handle[0]
            else:
                raise Deadlock("no timer is left and nothing is to be done")
            _, _, callback, args, context = handle
            if callback is None:
                continue
            owner = context.get(OWNER)
            if owner is not None and (owner.dead or owner.stopped):
                if not owner.dead:
                    owner.held.append(handle)
                continue
            try:
                context.run(callback, *args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"in {callback!r}", "exception": error})

    def _forget_cancelled(self) -> None:
        """Nine timers of ten are deadlines of what was in time; left in the heap until they are due, they make it ten times as large."""
        self._timers[:] = [handle for handle in self._timers if handle[2] is not None]
        heapq.heapify(self._timers)
        self._many = max(2 * len(self._timers), _MANY_TIMERS)

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
