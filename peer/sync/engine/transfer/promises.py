"""Who signs a later state and gives nothing. A newcomer waits for those who may still give theirs, and must not wait for liars for ever.

A peer's promise counts from when we first hear it. It counts no more once the peer failed us BROKEN times without giving a state whole,
or answered for REFUSING_SECONDS that it cannot just now, or was never worth a question to us. A state that it gives makes up for all.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

BROKEN = 3
"""How often a holder may be silent, unreachable or slow. One lie is enough."""
REFUSING_SECONDS = 1800.0
"""An honest donor may be busy for that long when many come at once; a liar that says it is busy holds us up no longer."""
UNASKED_SECONDS = 60.0
_REMEMBERED = 1024


@dataclass
class _Promise:
    heard: float
    asked: float | None = None
    failures: int = 0


class Promises:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._promises: dict[str, _Promise] = {}

    def asked(self, peers: Iterable[str]) -> None:
        for peer in peers:
            promise = self._of(peer)
            promise.asked = self._clock() if promise.asked is None else promise.asked

    def kept(self, peers: Iterable[str]) -> None:
        for peer in peers:
            self._promises.pop(peer, None)

    def broken(self, peer: str, *, lied: bool = False) -> None:
        self._of(peer).failures += BROKEN if lied else 1

    def counts(self, peer: str) -> bool:
        """Whether `peer`, which signs a later state than ours, may still give it to us."""
        promise, now = self._of(peer), self._clock()
        if promise.asked is None:
            return now - promise.heard < UNASKED_SECONDS
        return promise.failures < BROKEN and now - promise.asked < REFUSING_SECONDS

    def _of(self, peer: str) -> _Promise:
        promise = self._promises.setdefault(peer, _Promise(self._clock()))
        while len(self._promises) > _REMEMBERED:
            del self._promises[next(iter(self._promises))]
        return promise
