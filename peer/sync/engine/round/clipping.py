"""How far one member may move a round's mean: no further than a few times what the others warrant, by the norms that all state."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from peer.contracts import Member
from peer.sync.engine.net.streams import PeerLost

_ROUNDING = 1 + 1e-6
"""Of a sum of squares in float64: CPUs add up in another order, and differ by some 1e-13 of it."""


@dataclass(frozen=True)
class Clipping:
    """times: of the members' median a norm may be, 0: any; per_sample: of the norms per sample, as contributions grow with every step."""

    times: float = 0.0
    per_sample: bool = True

    def factors(self, members: Sequence[Member], norms: Sequence[float]) -> list[float]:
        """What each member's contribution is multiplied with, at most 1. Of an even number the lower median counts, of two the smaller norm:
        a liar may be the other."""
        if not self.times or not norms:
            return [1.0] * len(members)
        sizes = [member.samples if self.per_sample else 1 for member in members]
        limit = self.times * statistics.median_low([norm / size for norm, size in zip(norms, sizes, strict=True)])
        return [min(1.0, limit * size / norm) if norm else 1.0 for norm, size in zip(norms, sizes, strict=True)]


class StatedNorms:
    """Holds each member to the norm that it stated. A reducer sees its own share only, so with R of them a liar gains the root of R at most."""

    def __init__(self, members: Sequence[Member], norms: Sequence[float]):
        self._left = {member.peer: norm * norm * _ROUNDING for member, norm in zip(members, norms, strict=False)}

    def spend(self, peer: str, square: float) -> None:
        """So much is the sum of squares of one more part of `peer`. Raises PeerLost, which names it."""
        self._left[peer] -= square
        if self._left[peer] < 0:
            raise PeerLost(f"{peer[-6:]} sent more than the norm that it stated", [peer])
