"""Whether some values can be those of a centered average (docs/decisions/0022), from a few of what each member sent.

How much each member counts follows from products of whole parts, which differ a little from one CPU to the next, and of which nobody has all. But
whatever these were, the weights lie within bounds: none above 1.75 times its member's share, and all together 7/8 to 1. So no honest centre is outside of what such
weights make of the members' values. A plane between the two shows that one is, and whoever has found it: a search that ends early accuses nobody.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

MOST_OF_A_SHARE, LEAST_OF_ALL = 1.75 + 1e-6, 0.875 - 1e-6
"""A step of three goes to `sum(share * cut)` of the whole, where no cut is above 1, and that of members with half of the shares is 1: at least
half of the way. So a weight is at most share * (1 + 1/2 + 1/4), and the sum at least 1 - (1/2)^3."""
_LOOKS = 50
"""Whoever is found out mostly is with the first. Of 24 members' values one takes 0.5 ms, and a false proof must not hold up who reads it."""
_NEAR = 1.25
"""Times the slack. A mean that is as near as that to what some weights make is right, and the search ends. The best weights are as near."""


def is_no_centre(shares: Sequence[float], sent: Values, mean: Values, slack: Values) -> bool:
    """Whether no weights within the bounds make `mean` of `sent`, by `slack` of each value. shares: of the members; sent: (members, n), clipped."""
    most = MOST_OF_A_SHARE * np.array(shares)
    weights = _first_guess(most, sent, mean)
    for _ in range(_LOOKS):
        left = mean - weights @ sent
        if (abs(left) <= _NEAR * slack).all():
            return False
        beyond = np.sign(left) * np.maximum(abs(left) - slack, 0.0)
        # Along `beyond` the mean is ahead of what these weights make. Rounding explains the slack; |beyond|^2 is left.
        # If that is more than the best weights are ahead of these, no weights make the mean.
        pulls = sent @ beyond
        way = _furthest(most, pulls) - weights
        gain = way @ pulls
        if beyond @ beyond > gain:
            return True
        step = way @ sent
        if not (length := step @ step):
            return False
        weights = weights + min(1.0, gain / length) * way
    return False


def _furthest(most: Values, pulls: Values) -> Values:
    """The weights within the bounds that go furthest along a direction. pulls: how far each member's values go along it."""
    weights, left = np.zeros_like(most), 1.0
    for index in np.argsort(-pulls, kind="stable"):
        enough = left if pulls[index] > 0 else left - (1.0 - LEAST_OF_ALL)
        weights[index] = min(most[index], max(enough, 0.0))
        left -= weights[index]
    return weights


def _first_guess(most: Values, sent: Values, mean: Values) -> Values:
    """Those that fit best, moved within the bounds: of an honest mean they mostly explain it at once."""
    scale = abs(sent).max() or 1.0
    weights = np.linalg.lstsq((sent / scale).T, mean / scale, rcond=None)[0].clip(0.0, most)
    if (total := weights.sum()) > 1.0:
        return weights / total
    if total < LEAST_OF_ALL:
        room = most - weights
        return weights + (LEAST_OF_ALL - total) / room.sum() * room
    return weights
