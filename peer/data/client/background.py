"""Where the client talks to the server: a thread with an event loop of its own, and how the training thread waits for it.

The simulator has another one, whose threads take turns with its loop.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


class Background:
    """`start` and `close` are for the training thread, `call` for any."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None

    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._thread = threading.Thread(target=lambda: self._run(main), name="dataset-server-client", daemon=True)
        self._thread.start()

    def _run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(main())

    def call(self, func: Callable[[], object]) -> None:
        """In the loop, soon; never once that has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(func)

    def close(self) -> None:
        """Wait for the end of `main`."""
        if self._thread is not None:
            self._thread.join()
        self._loop.close()

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def result(self, future: Future, seconds: float) -> Any:
        """The result of `future`. Raises what it raises, and concurrent.futures.TimeoutError."""
        return future.result(seconds)
