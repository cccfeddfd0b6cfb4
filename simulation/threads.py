"""Blocking code beside the loop: it runs only while the loop waits for it, so that the two never run at once.

What would block a real thread (sleeping, waiting for a message) hands control back to the loop, which goes on in virtual time.
"""

import contextvars
import threading
from collections.abc import Callable

from simulation.loop import OWNER, VirtualLoop

try:
    from greenlet import greenlet
except ImportError:
    greenlet = None

_REAL_SECONDS = 120.0
"""A thread that has not blocked for this long of real time hangs: a fault of the simulation, not of what it simulates."""


class Killed(BaseException):
    """Raised where a thread blocks when its process has died."""


class _Thread:
    """A stack of its own where there is no greenlet. A change to it and back takes 15 us on an idle core and milliseconds on a busy machine,
    which is a third of a world's time; greenlet's takes 0.5 us."""

    def __init__(self, run: Callable[[], None]):
        self._run, self._go, self._back = run, threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        self._go.acquire()
        self._run()
        self._back.release()

    def enter(self) -> None:
        """From the loop: go on in it until it leaves or ends."""
        self._go.release()
        if not self._back.acquire(timeout=_REAL_SECONDS):
            raise RuntimeError("a simulated thread does not block")

    def leave(self) -> None:
        """From within: go on in the loop until it is entered again."""
        self._back.release()
        self._go.acquire()


class _Greenlet:
    """As `_Thread`."""

    def __init__(self, run: Callable[[], None]):
        self._greenlet = greenlet(run)
        self.enter = self._greenlet.switch
        self.leave = self._greenlet.parent.switch


class LockStepThread:
    """`func` in the context of the process that starts it. failed: called in the loop with what it raised."""

    def __init__(self, loop: VirtualLoop, func: Callable[[], None], failed: Callable[[BaseException], None]):
        self._loop, self._func, self._failed = loop, func, failed
        self._context = contextvars.copy_context()
        self._stack: _Greenlet | _Thread | None = None
        self._timer = None
        self._killed, self.ended = False, False
        self._error: BaseException | None = None

    def start(self) -> None:
        self._timer = self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._stack = (_Greenlet if greenlet else _Thread)(lambda: self._context.run(self._run))
        self._resume()

    def _run(self) -> None:
        try:
            self._func()
        except Killed:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.ended = True

    def _resume(self) -> None:
        self._timer = None
        self._stack.enter()
        if self.ended and self._error is not None:
            self._failed(self._error)

    def block(self, seconds: float) -> None:
        """From the thread: let the world go on for `seconds`, or until `wake`."""
        self._timer = self._loop.call_later(seconds, self._resume)
        self._stack.leave()
        if self._killed:
            raise Killed

    def wake(self) -> None:
        """From the loop: it need not block any longer."""
        if self._timer is not None and not self.ended:
            self._timer.cancel()
            # In its own process's context: one that is stopped does not wake.
            self._timer = self._loop.call_soon(self._resume, context=self._context.copy())

    def kill(self) -> None:
        """Unwind it where it blocks; its process is dead, so whatever it still tries fails."""
        if self.ended or self._stack is None:
            self.ended = True
            return
        self._killed = True
        token = OWNER.set(None)
        try:
            self._resume()
        finally:
            OWNER.reset(token)
