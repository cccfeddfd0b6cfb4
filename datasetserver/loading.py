"""Pictures read and checked by processes of their own, in order: one whose decoder crashes takes only itself along."""

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator

from datasetserver.pictures import Sample, load_sample
from swarm.picture_file import BadSample
from swarm.picture_folder import Pair
from swarm.workers import Workers

_WORKER_MEMORY_BYTES = 4 << 30


def load_all(pairs: Iterable[Pair], workers: int | None, total: int | None) -> Iterator[tuple[Pair, Sample | str]]:
    """Each pair, in order, with its sample or the reason why it has none.

    workers: processes, 0 for none, None for one per core; total: how many pairs there are, None where nobody knows.
    """
    if workers == 0:
        yield from ((pair, _load(pair)) for pair in pairs)
        return
    count = workers or max(1, min(len(os.sched_getaffinity(0)), 16, 16 if total is None else total // 16))
    waiting, rest = deque(), iter(pairs)
    with contextlib.closing(Workers(count, _load, _start_worker, "the decoder crashed on it")) as pool:
        while True:
            while len(waiting) < 8 * count and (pair := next(rest, None)):
                waiting.append((pair, pool.submit(pair)))
            if not waiting:
                return
            pair, future = waiting.popleft()
            yield pair, future.result()


def _load(pair: Pair) -> Sample | str:
    try:
        return load_sample(pair)
    except BadSample as bad:
        return str(bad)


def _start_worker() -> None:
    import resource
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    ours = _WORKER_MEMORY_BYTES if most == resource.RLIM_INFINITY else min(_WORKER_MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (ours, most))
