"""What a peer trains while the server is away and what it leased is done: shards that are on its disk, under keys of its own choice.

The server is told of them when it is back, and counts those that nobody else has (docs/http.md, An outage). So that several peers seldom
choose the same, each goes through an epoch in an order of its own.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from swarm import protocol


class Seen:
    """Which units this peer has had, of the epochs that still matter. epoch: the newest that was begun, as far as it knows; -1: none."""

    def __init__(self) -> None:
        self.epoch = -1
        self._units: set[tuple[int, int]] = set()

    def add(self, unit: protocol.LeasedUnit) -> None:
        self._units.add((unit.epoch, unit.shard))

    def lease(self, unit: protocol.LeasedUnit) -> None:
        """A unit that the server gave out: its epoch has begun."""
        self.add(unit)
        if unit.epoch > self.epoch:
            self.epoch = unit.epoch
            self._units = {known for known in self._units if known[0] >= unit.epoch - 1}

    def __contains__(self, unit: tuple[int, int]) -> bool:
        return unit in self._units


def choose(
    shards: Callable[[int], Sequence[protocol.Shard]], seen: Seen, here: Callable[[str], bool], seed: str
) -> Iterator[protocol.LeasedUnit]:
    """Units of shards that are `here` (by digest) and not `seen`: first of the epoch that was begun last, then of those after it.

    shards(epoch): those that it has. Ends when a whole epoch has none here. From the second epoch after the last one begun on they no longer count: training goes on with them
    all the same, as it would with any folder of pictures.
    """
    if seen.epoch < 0:
        return
    for epoch in itertools.count(seen.epoch):
        found, all_shards = False, shards(epoch)
        for position in protocol.shuffled(len(all_shards), seed, "outage", epoch):
            shard = all_shards[position]
            if not here(shard.digest):
                continue
            found = True
            if (epoch, shard.index) not in seen:
                unit = protocol.LeasedUnit(
                    epoch=epoch, shard=shard.index, digest=shard.digest, bytes=shard.bytes, samples=shard.samples, skip=[]
                )
                seen.add(unit)
                yield unit
        if not found:
            return
