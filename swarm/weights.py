"""How much each member's contribution counts in a mean: by samples and receipts (docs/decisions/0023), and clipped (0018)."""

import statistics
from collections.abc import Sequence

_LEAST = 2.0**-60
"""With a share of 1 of 2^53 samples still a normal float32."""
_FEWEST = 3
"""Of two members nobody can say which one is far from the other. And none counts as more than a third: who could claim half of all samples would be the centre."""


def counted(samples: Sequence[int], proved: Sequence[bool]) -> list[int]:
    """As how many samples each contribution counts. proved: whether it has a receipt; empty where nobody has.

    With a receipt: all. Without one: at most the lower median of those with one, or that of all claims if it is higher, since otherwise
    two members with tiny receipts would make the others' work count for nothing. Where nobody has one: all.
    """
    with_receipt = [count for count, is_proved in zip(samples, proved, strict=False) if is_proved]
    if not with_receipt:
        return list(samples)
    most = max(statistics.median_low(with_receipt), statistics.median_low(samples))
    return [count if is_proved else min(count, most) for count, is_proved in zip(samples, proved, strict=True)]


def factors(norms: Sequence[float], sizes: Sequence[int], times: float) -> list[float]:
    """What each contribution is multiplied with, at most 1: none is longer than `times` the lower median of all, each for its size.

    With two members the smaller norm is used: the other may be a liar's. Norms of zero are left out of the median. norms: empty where there
    is nothing to compare; times: 0 for whole. Below _LEAST it is 0, since float32, in which reducers multiply, may have nothing for it.
    """
    if not times or not any(norms):
        return [1.0] * len(sizes)
    limit = times * statistics.median_low([norm / size for norm, size in zip(norms, sizes, strict=True) if norm])
    exact = [min(1.0, limit * size / norm) if norm else 1.0 for norm, size in zip(norms, sizes, strict=True)]
    return [factor if factor >= _LEAST else 0.0 for factor in exact]


def even_shares(samples: Sequence[int]) -> list[float] | None:
    """Members' shares by their samples, none above a third; None where there are too few members to tell who is far from the others."""
    if len(samples) < _FEWEST:
        return None
    ranked = sorted(samples)
    # The largest k are cut to the same limit, a third of all that is left then: (the others' + k limits) / 3.
    limits = [sum(ranked[: len(ranked) - k]) / (_FEWEST - k) for k in range(_FEWEST)]
    limit = next(limit for k, limit in enumerate(limits) if ranked[-1 - k] <= limit)
    cut = [min(count, limit) for count in samples]
    return [count / sum(cut) for count in cut]
