"""Pictures read and checked by processes of their own, in order: one whose decoder crashes takes only itself along."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from datasetserver.pictures import Sample, load_sample
from swarm.lifeline import die_with_parent
from swarm.picture_file import BadSample
from swarm.picture_folder import Pair

_WORKER_MEMORY_BYTES = 4 << 30


def load_all(pairs: Iterable[Pair], workers: int | None, total: int | None) -> Iterator[tuple[Pair, Sample | str]]:
    """Each pair, in order, with its sample or the reason why it has none.

    workers: processes, 0 for none, None for one per core; total: how many pairs there are, None where nobody knows.
    """
    if workers == 0:
        yield from ((pair, _load(pair)) for pair in pairs)
        return
    count = workers or max(1, min(len(os.sched_getaffinity(0)), 16, 16 if total is None else total // 16))
    waiting, pool, rest = deque(), _pool(count), iter(pairs)
    try:
        while True:
            while len(waiting) < 8 * count and (pair := next(rest, None)):
                waiting.append((pair, _submitted(pool, pair)))
            if not waiting:
                return
            pair, future = waiting.popleft()
            try:
                yield pair, future.result()
            except BrokenProcessPool:
                # A decoder took its process down, and all that were waiting with it. Look at each of them alone.
                suspects = [pair, *(pair for pair, _ in waiting)]
                waiting.clear()
                pool.shutdown()
                yield from _one_by_one(suspects)
                pool = _pool(count)
    finally:
        pool.shutdown(cancel_futures=True)


def _load(pair: Pair) -> Sample | str:
    try:
        return load_sample(pair)
    except BadSample as bad:
        return str(bad)


def _submitted(pool: ProcessPoolExecutor, pair: Pair) -> Future:
    """A pool that a crash has broken meanwhile takes nothing more: that one shares the fate of those that wait."""
    try:
        return pool.submit(_load, pair)
    except BrokenProcessPool as error:
        future = Future()
        future.set_exception(error)
        return future


def _one_by_one(pairs: Iterable[Pair]) -> Iterator[tuple[Pair, Sample | str]]:
    """With one process, which takes one pair at a time: whichever it dies of is known."""
    pool = _pool(1)
    try:
        for pair in pairs:
            try:
                yield pair, pool.submit(_load, pair).result()
            except BrokenProcessPool:
                yield pair, "the decoder crashed on it"
                pool.shutdown()
                pool = _pool(1)
    finally:
        pool.shutdown()


def _pool(count: int) -> ProcessPoolExecutor:
    # Fresh interpreters: the server may have threads by now, and a fork beside threads can hang.
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_start_worker)


def _start_worker() -> None:
    import resource
    import signal

    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    ours = _WORKER_MEMORY_BYTES if most == resource.RLIM_INFINITY else min(_WORKER_MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (ours, most))
