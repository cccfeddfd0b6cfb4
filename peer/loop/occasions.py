"""What is done every N global steps: an average of the weights, pictures, results, checkpoints."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Occasion:
    """`do(step)` whenever a multiple of `every` global steps was reached or passed; 0: never. at_end: also when that ends the run."""

    every: int
    do: Callable[[int], None]
    at_end: bool = True


class Occasions:
    """Those of one run, in their order. Due by multiples, so a resumed run does everything where an uninterrupted one does."""

    def __init__(self, occasions: Sequence[Occasion] = ()):
        self._occasions = occasions
        self._reached = 0

    def start(self, step: int) -> None:
        """The run begins, or goes on, at this global step."""
        self._reached = step

    def reach(self, step: int, *, end: bool = False) -> None:
        """A swarm's step may be several after the one before, or the same; end: this is the run's last."""
        before, self._reached = self._reached, step
        for occasion in self._occasions:
            if occasion.every and step // occasion.every > before // occasion.every and (occasion.at_end or not end):
                occasion.do(step)


def seldom(
    do: Callable[[int], None],
    share: float,
    clock: Callable[[], float] = time.monotonic,
    agree: Callable[[bool], bool] = lambda due: due,
) -> Callable[[int], None]:
    """`do`, but left out where it would take more than `share` of the time, going by how long it last took.

    agree: for what all ranks do together: rank 0's word.
    """
    not_before = -math.inf

    def done(step: int) -> None:
        nonlocal not_before
        began = clock()
        if agree(began >= not_before):
            do(step)
            not_before = began + (clock() - began) / share

    return done
