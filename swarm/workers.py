"""Processes that work for this one, each on one job at a time: one that dies takes nothing but its job along.

A ProcessPoolExecutor loses all that waits with one process, waits for ever for the others where those ignore SIGTERM (Python 3.12 and later), and
never hears of one that is killed in the middle of its answer, as it holds the other end of the pipe itself.
"""

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from swarm.lifeline import die_with_parent

log = logging.getLogger(__name__)


class Workers:
    """Up to `count` of them, each started when there is work for it. `close` ends them, and so does the end of this process, however that dies."""

    def __init__(self, count: int, function: Callable[..., Any], prepare: Callable[[], None], crashed: Any):
        """function: what they do with a job; prepare: what each does first; crashed: the answer where a job ended two processes."""
        self._what, self._crashed = (function, prepare), crashed
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="worker")
        self._workers: dict[int, _Worker] = {}
        """By the thread that started it and alone asks it: the kernel ends it with that thread."""

    def submit(self, *job: Any) -> Future:
        return self._threads.submit(self._answer, job)

    def _answer(self, job: tuple) -> Any:
        thread = threading.get_ident()
        for again in (False, True):  # a first death need not be the job's fault: the kernel may have wanted memory
            worker = self._workers.get(thread) or self._workers.setdefault(thread, _Worker(*self._what))
            try:
                done, answer = worker.ask(job)
            except (EOFError, OSError):
                del self._workers[thread]
                log.warning("process=%s died with exit_code=%s", *worker.end())
                if again and not worker.ready:
                    raise RuntimeError("a process that this one needs does not start") from None
                continue
            if done:
                return answer
            raise answer
        return self._crashed

    def close(self) -> None:
        """Jobs under way are waited for, the others are cancelled."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        while self._workers:
            self._workers.popitem()[1].end()


class _Worker:
    def __init__(self, function: Callable[..., Any], prepare: Callable[[], None]):
        context = get_context("spawn")  # a fork of a process that has threads can hang
        self.ready = False
        self._pipe, theirs = context.Pipe()
        with theirs:  # nobody but the process keeps it: so the pipe ends with the process, however that dies
            self._process = context.Process(target=_serve, args=(theirs, function, prepare), daemon=True)
            self._process.start()

    def ask(self, job: tuple) -> tuple[bool, Any]:
        """Raises EOFError or OSError when it dies."""
        self.ready = self.ready or self._pipe.recv()
        self._pipe.send(job)
        return self._pipe.recv()

    def end(self) -> tuple[int | None, int | None]:
        """By SIGKILL, which none ignores. Returns its process id and exit code."""
        self._pipe.close()
        self._process.kill()
        self._process.join()
        return self._process.pid, self._process.exitcode


def _serve(pipe: Connection, function: Callable[..., Any], prepare: Callable[[], None]) -> None:
    die_with_parent()
    prepare()
    with contextlib.suppress(EOFError, OSError):  # who asked has gone
        pipe.send(True)
        while True:
            job = pipe.recv()
            try:
                answer = True, function(*job)
            except Exception as error:
                traceback.print_exc()  # it does not travel
                answer = False, error
            pipe.send(answer)
