"""What a peer trains while the server is away and what it leased is done: shards that are on its disk, under keys of its own choice.

The server is told of them when it is back, and counts those that nobody else has (docs/http.md, "The server is away"). So that several
peers seldom choose the same, each goes through an epoch in an order of its own.
"""

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from swarm import files, protocol

log = logging.getLogger(__name__)


class Seen:
    """Which shard epochs this peer has had, of epochs that still matter. epoch: the newest that was begun, as far as it knows; -1: none.

    path: where that epoch and the peer's own choices are kept, for a start without the server; None: nowhere.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.epoch, self._path = -1, path
        self._shard_epochs: set[tuple[int, int]] = set()
        self._own: set[tuple[int, int]] = set()
        if path is not None and path.exists():
            try:
                kept = json.loads(path.read_text(encoding="utf-8"))
                own = {(int(epoch), int(shard)) for epoch, shard in kept["own"]}
                self.epoch, self._own, self._shard_epochs = int(kept["epoch"]), own, set(own)
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("ignored %s: %s", path, error)

    def pass_over(self, shards: int) -> None:
        """After a start, what was leased of the epoch is not known any more: none of it is chosen."""
        self._shard_epochs |= {(self.epoch, index) for index in range(shards)}

    def keep(self) -> None:
        if self._path is None:
            return
        own = sorted(item for item in self._own if item[0] >= self.epoch)
        try:
            files.replace(self._path, json.dumps({"epoch": self.epoch, "own": own}).encode())
        except OSError as error:
            log.warning("cannot keep %s, so a start without the server has no samples: %s", self._path, error.strerror)

    def choose(self, item: protocol.LeasedShard) -> None:
        """A shard epoch of this peer's own choice."""
        self.add(item)
        self._own.add((item.epoch, item.shard))

    def add(self, item: protocol.LeasedShard) -> None:
        self._shard_epochs.add((item.epoch, item.shard))

    def lease(self, item: protocol.LeasedShard) -> None:
        """A shard epoch that the server gave out: its epoch has begun."""
        self.add(item)
        if item.epoch > self.epoch:
            self.epoch = item.epoch
            self._shard_epochs = {known for known in self._shard_epochs if known[0] >= item.epoch - 1}

    def __contains__(self, item: tuple[int, int]) -> bool:
        return item in self._shard_epochs


def choose(
    shards: Callable[[int], Sequence[protocol.Shard]], seen: Seen, here: Callable[[str], bool], seed: str
) -> Iterator[protocol.LeasedShard]:
    """Shard epochs of shards that are `here` (by digest) and not `seen`: first of the epoch that was begun last, then of those after it.

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
                item = protocol.LeasedShard(
                    epoch=epoch, shard=shard.index, digest=shard.digest, bytes=shard.bytes, samples=shard.samples, skip=[]
                )
                seen.choose(item)
                yield item
        if not found:
            return
