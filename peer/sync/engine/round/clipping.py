"""How much of each member's contribution a round takes: up to a multiple of the members' median norm. All state their norms, and from
these follows how long a mean can be."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from peer.contracts import Member
from peer.sync.engine.net.streams import PeerLost
from swarm.weights import factors

_ROUNDING, _TINY = 1 + 1e-3, 1e-30
"""Sums of squares in float32 are off by 2.4e-4 at most (measured: 262,144 equal values), and by whatever is too small for them."""
_CODED = 2.0
"""A mean is encoded once more. No codec makes it longer than this: fp16 rounds what it can hardly express up to its double; int4 adds 0.58."""


@dataclass(frozen=True)
class Clipping:
    """times: a norm counts up to `times` the median, 0: whole.

    per_sample: the median is of norms per sample, since a norm grows with each step; centered: what is left is averaged by `centering.py`.
    """

    times: float = 0.0
    per_sample: bool = True
    centered: bool = False

    def factors(self, members: Sequence[Member], norms: Sequence[float]) -> list[float]:
        """What each member's contribution is multiplied with, at most 1 (`swarm/weights.py`). norms: empty where there is nothing to compare."""
        return factors(norms, [member.samples if self.per_sample else 1 for member in members], self.times)

    def longest_mean(self, members: Sequence[Member], norms: Sequence[float]) -> float:
        """The norm of the members' weighted mean, if all contributions pointed the same way; infinity where no norms are stated."""
        if not self.times or not norms:
            return math.inf
        factors, samples = self.factors(members, norms), sum(member.samples for member in members)
        if self.centered:  # each part's centre is no longer than the longest of its vectors
            return math.hypot(*(factor * norm for factor, norm in zip(factors, norms, strict=True)))
        return math.fsum(m.samples / samples * factor * norm for m, factor, norm in zip(members, factors, norms, strict=True))


UNCLIPPED = Clipping()


class StatedNorms:
    """Holds each member to the norm that it stated.

    A reducer sees its own share only. So a member that lies to R reducers gains the square root of R at most.
    """

    def __init__(self, members: Sequence[Member], norms: Sequence[float]):
        self._left = {member.peer: norm * norm * _ROUNDING + _TINY for member, norm in zip(members, norms, strict=True)}

    def spend(self, peer: str, square: float) -> None:
        """So much is the sum of squares of one more part of `peer`. Raises PeerLost, which names it."""
        self._left[peer] -= square
        if self._left[peer] < 0:
            raise PeerLost(f"{peer[-6:]} sent more than the norm that it stated", [peer])


class ReceivedMeans:
    """Holds each reducer to the sums of squares that it tells with its means, and all of them to the longest mean that there can be.

    So a reducer that lies moves its share by twice as much as all contributions together could, and no further.
    """

    def __init__(self, longest: float):
        self._most = (_CODED * longest) ** 2 * _ROUNDING + _TINY
        self._of: Counter[str] = Counter()

    def add(self, reducer: str, told: float, square: float) -> None:
        """One more part of its mean: the sum of squares that it told, and that of the values. Raises PeerLost, which names it."""
        if abs(told - square) > square * (_ROUNDING - 1) + _TINY:
            raise PeerLost(f"{reducer[-6:]} told a wrong sum of squares", [reducer])
        self._of[reducer] += square
        if self._of[reducer] > self._most:
            raise PeerLost(f"{reducer[-6:]} gave a mean longer than the contributions allow", [reducer])
