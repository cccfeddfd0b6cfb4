"""Per member: what its contributions do to the loss, over rounds, and whether that is reported.

Reported is a member whose work makes the model worse, and worse than that of the others. Both are asked by the same measure, `_SIGMAS` of the
spread: one alone is seen among the honest. Near the end of a run the work of each peer alone makes a model worse, which only their mean makes
better; and a peer that learns less than the others does no harm.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

from swarm.records import Finding

WINDOW = 32
"""Measurements of a member that count, the newest: who begins to lie after a hundred good rounds is seen as soon as who always did."""
LEAST_ROUNDS = 6
"""Before that nothing is said of a member, nor by means of it."""
LEAST_OTHERS = 2
"""Of two members nobody can say which is the odd one."""
_SIGMAS = 4.0
"""docs/decisions/0029 has the rates of false and true reports that this was chosen by."""
_ALIKE = 0.25
"""Honest peers differ by as much of their own change: by batch, speed and pictures."""
_MOST_TIMES_USUAL = 3.0
"""Of one measurement as it is judged: while a model still learns by leaps, one round would hide thirty. On the toy the first changes the loss 18 times as much as later ones."""
_MAD_TO_SIGMA = 1.4826
_MOST_MEMBERS = 512
"""Whose numbers are kept; the one that was measured longest ago goes."""


class Tally:
    """Keeps what was measured. Knows nothing of time: who is measured no more keeps its numbers."""

    def __init__(self) -> None:
        self._changes: dict[str, deque[float]] = {}
        self._own: dict[str, deque[float]] = {}

    def add(self, peer: str, change: float, own: float | None = None) -> None:
        """One more contribution of `peer` has changed the loss by this; own: that of pictures that it had leased for it. Both finite."""
        known = self._changes.pop(peer, None) or deque(maxlen=WINDOW)
        known.append(change)
        self._changes[peer] = known
        if own is not None:
            self._own.setdefault(peer, deque(maxlen=WINDOW)).append(own)
        if len(self._changes) > _MOST_MEMBERS:
            oldest = next(iter(self._changes))
            del self._changes[oldest]
            self._own.pop(oldest, None)

    def rounds(self, peer: str) -> int:
        """How many of its contributions count."""
        return len(self._changes.get(peer, ()))

    def findings(self) -> list[Finding]:
        """What is known of each member, those first that are reported, then whose work does the model most harm."""
        known = {peer: changes for peer, changes in self._bounded().items() if len(changes) >= LEAST_ROUNDS}
        means, errors = {peer: fmean(changes) for peer, changes in known.items()}, _errors(known)
        shown = _errors(self._changes)
        found = [
            Finding(
                peer=peer, change=fmean(changes), error=shown[peer], rounds=len(changes), own=fmean(self._own[peer]) if peer in self._own else None,
                reported=peer in known and _is_worse(peer, means, errors),
            )
            for peer, changes in self._changes.items()
        ]  # fmt: skip
        return sorted(found, key=lambda finding: (not finding.reported, -finding.change))

    def _bounded(self) -> dict[str, list[float]]:
        """The changes, each at most a few times as large as is usual."""
        most = _MOST_TIMES_USUAL * _median(abs(change) for changes in self._changes.values() for change in changes)
        return {peer: [max(-most, min(change, most)) for change in changes] for peer, changes in self._changes.items()}


def _errors(changes: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Standard errors of the means."""
    deviations = {peer: _stdev(some) for peer, some in changes.items()}
    # With six numbers a deviation is at times a third of what it should be. So nobody's is taken for less than is usual.
    usual = _median(deviations[peer] for peer, some in changes.items() if len(some) >= LEAST_ROUNDS)
    return {peer: max(deviations[peer], usual) / math.sqrt(len(some)) for peer, some in changes.items()}


def _is_worse(peer: str, means: dict[str, float], errors: dict[str, float]) -> bool:
    """Whether the work of `peer` makes the model worse, and worse than that of the others, beyond chance."""
    others = [other for other in means if other != peer]
    if len(others) < LEAST_OTHERS or means[peer] <= _SIGMAS * errors[peer]:
        return False
    usual = median(means[other] for other in others)
    apart = _MAD_TO_SIGMA * median(abs(means[other] - usual) for other in others)
    spread = math.hypot(errors[peer], median(errors[other] for other in others), apart, _ALIKE * usual)
    return means[peer] - usual > _SIGMAS * spread


def _stdev(changes: Sequence[float]) -> float:
    """Not `statistics.stdev`, which works with fractions, and takes thirty times as long."""
    if len(changes) < 2:
        return 0.0
    mean = fmean(changes)
    return math.sqrt(math.fsum((change - mean) ** 2 for change in changes) / (len(changes) - 1))


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0
