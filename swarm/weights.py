"""How much each member's contribution counts in a mean: by samples and receipts (docs/decisions/0023), and clipped (0018)."""

import statistics
from collections.abc import Sequence

_LEAST = 2.0**-60
"""With a share of 1 of 2^53 samples still a normal float32."""


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
