"""Who is told of proofs: all others at once when there is a new one; and one of them at first and each minute, so that who comes later hears, too."""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from swarm.records import PeerRecord

T = TypeVar("T")

_LOOK_SECONDS, _SWAP_SECONDS = 1.0, 60.0
_AT_ONCE = 16
"""Peers that are asked or told at a time: of 100, one that says nothing must not hold up the others for 30 s each."""


class Telling:
    """others: the live peers' records; swap: gives one of them the proofs that it lacks, and takes those that we lack; rng: who that is."""

    def __init__(
        self,
        others: Callable[[], Collection[PeerRecord]],
        swap: Callable[[str], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ):
        self._others, self._swap, self._clock, self._rng = others, swap, clock, rng or random.SystemRandom()
        self._to_tell: list[str] = []
        self._swapped = -math.inf

    def all(self) -> None:
        """There is news for all others."""
        self._to_tell = [record.peer_id for record in self._others()]

    async def look(self) -> None:
        """Tell those who are to be told now."""
        others = self._others()
        if others and self._clock() - self._swapped >= _SWAP_SECONDS:
            self._swapped = self._clock()
            self._to_tell.append(self._rng.choice([record.peer_id for record in others]))
        while self._to_tell:
            told, self._to_tell = self._to_tell, []
            await each(self._swap, told)


async def each(job: Callable[[T], Awaitable[None]], those: Sequence[T]) -> None:
    """Do the job for each of them, some at a time."""
    for begin in range(0, len(those), _AT_ONCE):
        await asyncio.gather(*map(job, those[begin : begin + _AT_ONCE]))


async def forever(look: Callable[[], Awaitable[None]]) -> None:
    """Look each second."""
    while True:
        await look()
        await asyncio.sleep(_LOOK_SECONDS)
