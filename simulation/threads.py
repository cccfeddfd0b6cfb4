"""Blocking code beside the loop: a thread that runs only while the loop waits for it, so that the two never run at once.

What would block a real thread (sleeping, waiting for a message) hands control back to the loop, which goes on in virtual time.
"""

import contextvars
import threading
from collections.abc import Callable

from simulation.loop import OWNER, VirtualLoop

_REAL_SECONDS = 120.0
"""A thread that has not blocked for so long of real time hangs: a fault of the simulation, not of what it simulates."""


class Killed(BaseException):
    """Raised where a thread blocks when its process has died."""


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class LockStepThread:
    """`func` in the context of the process that starts it. failed: called in the loop with what it raised."""

    def __init__(self, loop: VirtualLoop, func: Callable[[], None], failed: Callable[[BaseException], None]):
        self._loop, self._func, self._failed = loop, func, failed
        self._go, self._back = _held(), _held()
        self._context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: self._context.run(self._run), daemon=True)
        self._timer = None
        self._killed, self.ended = False, False
        self._error: BaseException | None = None

    def start(self) -> None:
        self._timer = self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._thread.start()
        self._wait_for_it()

    def _run(self) -> None:
        try:
            self._func()
        except Killed:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.ended = True
            self._back.release()

    def _wait_for_it(self) -> None:
        if not self._back.acquire(timeout=_REAL_SECONDS):
            raise RuntimeError("a simulated thread does not block")
        if self.ended:
            self._thread.join()
            if self._error is not None:
                self._failed(self._error)

    def _resume(self) -> None:
        self._timer = None
        self._go.release()
        self._wait_for_it()

    def block(self, seconds: float) -> None:
        """From the thread: let the world go on for so long, or until `wake`."""
        self._timer = self._loop.call_later(seconds, self._resume)
        self._back.release()
        self._go.acquire()
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
        if self.ended or not self._thread.is_alive():
            self.ended = True
            return
        self._killed = True
        token = OWNER.set(None)
        try:
            self._go.release()
            self._wait_for_it()
        finally:
            OWNER.reset(token)
