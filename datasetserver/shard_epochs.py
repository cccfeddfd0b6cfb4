"""The shard epochs of a run (a shard in an epoch each), the order in which they are given out, and who holds their samples.

Every sample is in exactly one state, and the strongest claim decides: counted (in the head's lineage), pending (in a live
contribution), leased, available.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from datasetserver.samples import Masks, ShardEpochId, full, size, union
from swarm.protocol import shuffled


@dataclass(eq=False)
class Lease:
    id: str
    peer: str
    deadline: float
    since: float
    shard_epochs: Masks = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return size(self.shard_epochs)


@dataclass
class Contribution:
    peer: str
    number: int
    shard_epochs: Masks
    live: bool = True
    """False once it was given back or its peer was gone for too long."""
    counted: bool = False
    """A member of a state on the head's chain."""
    repeated: int = 0
    """How many samples are in it besides, which count as another's."""
    charged: str = ""
    """Whose allowance it counts against until peers of two owners stand behind a state that has it, for it was registered without a lease; '': nobody's."""
    vouched: str = ""
    """Whose peers answer for its receipt; '' without one: when it was registered, its peer held a lease for each of them, those that are repeated included."""

    @property
    def id(self) -> tuple[str, int]:
        return self.peer, self.number

    @property
    def samples(self) -> int:
        return size(self.shard_epochs)

    @property
    def registered_samples(self) -> int:
        """All that its peer registered, the repeated ones included."""
        return self.samples + self.repeated

    @property
    def owner(self) -> str:
        """Who answers for it until it is settled; '' for nobody."""
        return self.vouched or self.charged


@dataclass(eq=False)
class ShardEpoch:
    """position: its place in the epoch's order. pending and counted never overlap; holders: the leases that hold samples of it."""

    uid: ShardEpochId
    position: int
    samples: int
    pending: int = 0
    counted: int = 0
    holders: list[Lease] = field(default_factory=list)

    @property
    def place(self) -> tuple[int, int]:
        """(epoch, position): the lowest goes first."""
        return self.uid[0], self.position

    @property
    def held(self) -> int:
        """What any lease holds, whatever came of it since."""
        return union(lease.shard_epochs[self.uid] for lease in self.holders)

    @property
    def leased(self) -> int:
        return self.held & ~(self.pending | self.counted)

    @property
    def available(self) -> int:
        return full(self.samples) & ~(self.held | self.pending | self.counted)

    def held_by(self, peer: str) -> int:
        return union(lease.shard_epochs[self.uid] for lease in self.holders if lease.peer == peer)


class ShardEpochs:
    """All shard epochs that were ever of interest, by id. shards: samples of each; seed: of the order of shards in every epoch.

    generations: (from epoch, number of shards) of a dataset that grew, ascending: from that epoch on, an epoch has this many shards, the first ones.
    """

    def __init__(self, shards: Sequence[int], seed: int, generations: Sequence[tuple[int, int]] = ()):
        self.shards, self._seed = shards, seed
        self._generations = tuple(generations) or ((0, len(shards)),)
        self._sums = [0, *accumulate(shards)]
        self._shard_epochs: dict[ShardEpochId, ShardEpoch] = {}
        self._orders: dict[int, _Order] = {}
        self.freed: list[tuple[int, int]] = []
        """A heap of the places of shard epochs that were given out and have something available again."""
        self.frontier = (0, 0)
        """The place of the first shard epoch that was never given out."""
        self.last_epoch = -1
        """The last one of which a shard epoch was ever of interest; -1: none."""
        self._tally, self._lowest = Tally(), 0

    def __getitem__(self, uid: ShardEpochId) -> ShardEpoch:
        item = self._shard_epochs.get(uid)
        if item is None:
            epoch, shard = uid
            item = self._shard_epochs[uid] = ShardEpoch(uid, self._order(epoch).positions[shard], self.shards[shard])
        self._tally.touched.add(uid)
        return item

    def get(self, uid: ShardEpochId) -> ShardEpoch | None:
        """A shard epoch that was of interest before, or None."""
        return self[uid] if uid in self._shard_epochs else None

    def known(self) -> Sequence[ShardEpoch]:
        return list(self._shard_epochs.values())

    def returned(self) -> Iterator[tuple[ShardEpoch, int]]:
        """Shard epochs behind the frontier and what is available of them again, each once: whoever takes one is to take all of it."""
        while self.freed and self.freed[0] < self.frontier:
            item = self._at(heapq.heappop(self.freed))
            if item.available:
                yield item, item.available

    def ahead(self) -> Iterator[tuple[ShardEpoch, int]]:
        """Shard epochs that were never given out and what is available of them, without an end, each once."""
        while True:
            item = self._at(self.frontier)
            epoch, position = self.frontier
            self.frontier = (epoch, position + 1) if position + 1 < self._count(epoch) else (epoch + 1, 0)
            if item.available:
                yield item, item.available

    def free(self, item: ShardEpoch) -> None:
        """Something of it may be available again."""
        heapq.heappush(self.freed, item.place)

    def totals(self) -> dict[str, int]:
        """Samples per state, over all epochs of which a shard epoch was ever of interest."""
        claimed = self._tally.look(self._shard_epochs)
        return {"available": self._samples_through(self.last_epoch) - sum(claimed.values()), **claimed}

    def epoch_progress(self) -> tuple[int, int]:
        """(the lowest epoch that is not wholly counted, its counted samples)."""
        self._tally.look(self._shard_epochs)
        counted = self._tally.counted_in
        while counted[self._lowest] == self.epoch_samples(self._lowest):
            self._lowest += 1  # for good: what is counted stays so, or all shard epochs are made anew
        return self._lowest, counted[self._lowest]

    def samples(self, uid: ShardEpochId) -> int:
        """Of a shard epoch; 0 where the epoch has no such shard."""
        epoch, shard = uid
        return self.shards[shard] if shard < self._count(epoch) else 0

    def epoch_samples(self, epoch: int) -> int:
        return self._sums[self._count(epoch)]

    def _samples_through(self, epoch: int) -> int:
        """Of all epochs up to this one together."""
        firsts = [first for first, _ in self._generations[1:]]
        spans = zip(self._generations, [*firsts, epoch + 1], strict=True)
        return sum(max(0, min(end, epoch + 1) - first) * self._sums[count] for (first, count), end in spans)

    def _count(self, epoch: int) -> int:
        """How many shards the epoch has."""
        return next(count for first, count in reversed(self._generations) if first <= epoch)

    def _at(self, place: tuple[int, int]) -> ShardEpoch:
        epoch, position = place
        return self[epoch, self._order(epoch).shards[position]]

    def _order(self, epoch: int) -> "_Order":
        if epoch not in self._orders:
            # "units" is what they were called when this order was drawn first: runs that exist keep it.
            self._orders[epoch] = _Order(shuffled(self._count(epoch), self._seed, "units", epoch))
            self.last_epoch = max(self.last_epoch, epoch)
        return self._orders[epoch]


class Tally:
    """Sums over all shard epochs, kept up to date: what is asked for every second looks only at those that somebody had in hand since.

    touched: shard epochs that may have changed. counted_in: counted samples by epoch, as of the last look.
    """

    _KINDS = ("leased", "pending", "counted")

    def __init__(self) -> None:
        self.touched: set[ShardEpochId] = set()
        self.counted_in: Counter[int] = Counter()
        self._known: dict[ShardEpochId, tuple[int, ...]] = {}
        self._sums = [0, 0, 0]

    def look(self, shard_epochs: Mapping[ShardEpochId, ShardEpoch]) -> dict[str, int]:
        """Samples leased, pending and counted."""
        for uid in self.touched:
            before = self._known.get(uid, (0, 0, 0))
            now = self._known[uid] = tuple(getattr(shard_epochs[uid], kind).bit_count() for kind in self._KINDS)
            self._sums = [total + new - old for total, new, old in zip(self._sums, now, before, strict=True)]
            self.counted_in[uid[0]] += now[2] - before[2]
        self.touched.clear()
        return dict(zip(self._KINDS, self._sums, strict=True))


class _Order:
    """One epoch's order: `shards` by position, and `positions` by shard."""

    def __init__(self, shards: list[int]):
        self.shards, self.positions = shards, [0] * len(shards)
        for position, shard in enumerate(shards):
            self.positions[shard] = position
