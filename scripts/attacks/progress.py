"""How much of a toy's way honest peers go, and what of it a liar takes from them.

The target moves round all the time, so a swarm that learns more slowly stays further behind it, and one that was led astray is elsewhere. A
peer's *place* is 1 where it stands on the target, and 0 where it is as far from it as a vector that never moves is on average (its loss is 1),
or further: nobody is more lost than lost. Progress is the mean place over the window, of all honest peers. Both swarms are looked at in the same seconds, not
at the same samples: rounds that wait for a liar cost progress, too, and samples that are only claimed make none.

How fine it is: a step of an undisturbed member goes a tenth of its way (RATE), which leaves it behind by about a fifth; then 10 % of
progress are lost where a swarm learns at three quarters of its speed.
"""

import math
from collections.abc import Iterable
from statistics import fmean

RATE = 0.1
"""Of members: with the toy's usual half, steps between two rounds would hide what a round spoiled."""


def place(loss: float) -> float:
    """0 to 1, of a peer with this loss: the mean square of what it is off."""
    return 1 - min(1.0, math.sqrt(loss)) if loss == loss else 0.0


def progress(losses: Iterable[Iterable[float]]) -> float:
    """The mean place of peers, by what each told of its loss; one that told nothing is nowhere."""
    places = [[place(loss) for loss in told] for told in losses]
    return fmean(fmean(some) if some else 0.0 for some in places)


def lost(with_: float, without: float) -> float:
    """The share of the undisturbed swarm's progress that the other did not make; below zero where it made more. 1 where there was none to lose."""
    return 1 - with_ / without if without else 1.0
