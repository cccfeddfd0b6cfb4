"""What a peer holds: leases, the shards of them still to be trained, and which samples are in work. One lock guards all of it.

The training thread takes samples out, the thread that talks to the server puts leases in. How much is leased ahead goes by time, measured.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm import protocol
from swarm.errors import UserError

AHEAD_SECONDS = 10.0
"""How much work to lease ahead, by the measured speed; two batches at least."""


@dataclass(eq=False)
class Lease:
    """keys: samples of it that are neither done with nor given back. lost: the server may have given them to others."""

    id: str
    keys: set[str] = field(default_factory=set)
    lost: bool = False


@dataclass(eq=False)
class ShardEpoch:
    """A shard in an epoch; `left`: indices not yielded yet, in the order to train them. path: None until it is fetched.

    lease: None for a shard of our own choice, while the server is away.
    """

    lease: Lease | None
    shard: protocol.LeasedShard
    left: deque[int]
    path: Path | None = None

    def key(self, index: int) -> str:
        return protocol.sample_key(self.shard.epoch, self.shard.shard, index)

    def keys_left(self) -> list[str]:
        return [self.key(index) for index in self.left]

    @property
    def lost(self) -> bool:
        return self.lease is not None and self.lease.lost


class Work:
    """See the module. paused: by the host: no samples come, and what is held is kept. clock: in seconds."""

    def __init__(
        self,
        batch_samples: int,
        clock: Callable[[], float] = time.monotonic,
        changed: threading.Condition | None = None,
        window_samples: int = 0,
    ):
        """batch_samples: asked for at a time; window_samples: taken at a time before any of them is trained, 0 for those of a step."""
        self._batch, self._speed = max(batch_samples, window_samples // 2), _Speed(clock, window_samples)
        self._changed = changed or threading.Condition()  # notified when a shard epoch is ready or there will be none
        self._leases: dict[str, Lease] = {}
        self._lease_of: dict[str, Lease] = {}
        self._in_work: set[str] = set()  # yielded, and neither done with nor given back
        self._own: set[str] = set()  # those in work that we never leased
        self._registered: set[str] = set()  # those in work that are in a contribution
        self._shard_epochs: deque[ShardEpoch] = deque()
        self._begun = self._ended = self._closed = self.paused = self._resting = False
        self._failure: UserError | None = None

    # -- for the training thread

    def begin(self) -> None:
        """Samples are wanted from now on: nothing is leased while a checkpoint's books are still being read."""
        with self._changed:
            self._begun = True

    def samples(self, rows: Callable[[Path, int], Sequence[Any]]) -> Iterator[tuple[str, Any]]:
        """(key, row) of one sample after the other; blocks while there is none, ends with the run or with `close`. Raises UserError.

        rows(path, samples): all rows of the file of a shard with `samples` samples.
        """
        while (item := self._next_shard_epoch()) is not None:
            content = rows(item.path, item.shard.samples)
            while (index := self._next_index(item)) is not None:
                yield item.key(index), content[index]

    def forget(self, keys: Sequence[str]) -> list[str]:
        """These samples are done with; the leases that have no others are, too: their ids."""
        done = []
        with self._changed:
            self._in_work.difference_update(keys)
            self._own.difference_update(keys)
            self._registered.difference_update(keys)
            for key in keys:
                lease = self._lease_of.pop(key, None)
                if lease is None:
                    continue
                lease.keys.discard(key)
                if not lease.keys and self._leases.pop(lease.id, None):
                    done.append(lease.id)
        return done

    def register(self, keys: Sequence[str]) -> None:
        """They are in a contribution: no lease of ours holds them any more."""
        with self._changed:
            self._registered.update(keys)

    def by_lease(self, keys: Sequence[str]) -> dict[str, list[str]]:
        """These keys by the name of the lease that holds them; NO_LEASE: those that none does.

        Given back by its lease's name, a key of long ago (an older checkpoint's) changes nothing that has been leased or registered since.
        """
        found: dict[str, list[str]] = {}
        with self._changed:
            for key in keys:
                lease = self._lease_of.get(key) if key not in self._registered else None
                found.setdefault(lease.id if lease else protocol.NO_LEASE, []).append(key)
        return found

    def any_own(self, keys: Sequence[str]) -> bool:
        """Whether a sample among `keys`, which are in work, was never leased to us."""
        with self._changed:
            return not self._own.isdisjoint(keys)

    def close(self) -> list[str] | None:
        """Iteration ends. The ids of the leases that are left; None when it was closed before."""
        with self._changed:
            if self._closed:
                return None
            self._closed = True
            self._shard_epochs.clear()
            self._changed.notify_all()
            return list(self._leases)

    def state_dict(self) -> dict[str, Any]:
        """Which samples are held: by lease those yielded and in work, and those never yielded; those of our own choice; those in contributions."""
        with self._changed:
            untouched = {key for item in self._shard_epochs if item.lease for key in item.keys_left()}
            return {
                "leases": {lease.id: sorted(lease.keys - untouched) for lease in self._leases.values()},
                "untouched": {lease.id: sorted(lease.keys & untouched) for lease in self._leases.values()},
                "own": sorted(self._own),
                "registered": sorted(self._registered),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold the samples that were in work again."""
        with self._changed:
            for lease_id, keys in state["leases"].items():
                if not keys:  # nothing of it is in work: a renewal would only hear that the lease has ended
                    continue
                lease = self._leases[lease_id] = Lease(lease_id, set(keys))
                self._lease_of.update(dict.fromkeys(keys, lease))
                self._in_work.update(keys)
            self._own.update(state["own"])
            self._registered.update(state["registered"])
            self._in_work.update(self._own)

    # -- for the thread that talks to the server

    def wanted(self) -> int:
        """How many samples to lease now: what is missing to AHEAD_SECONDS of leased work, and to two batches; 0 or less: none."""
        with self._changed:
            if self._closed or self._resting or not self._begun:
                return 0
            ahead = sum(len(item.left) for item in self._shard_epochs if item.lease and not item.lost)
            return min(int(max(2 * self._batch, AHEAD_SECONDS * self._speed.rate)) - ahead, protocol.MAX_KEYS)

    def short(self) -> bool:
        """Whether less than two batches are here to be trained."""
        with self._changed:
            here = sum(len(item.left) for item in self._shard_epochs if item.path and not item.lost)
            return not self._closed and here < 2 * self._batch

    def add(self, lease: Lease, shard_epochs: Sequence[ShardEpoch]) -> bool:
        """Shard epochs of a new lease, to be fetched; False when we are leaving and it is to be released."""
        with self._changed:
            if self._resting:  # granted while we lay down
                return False
            lease.keys = {key for item in shard_epochs for key in item.keys_left()}
            self._leases[lease.id] = lease
            self._lease_of.update(dict.fromkeys(lease.keys, lease))
            self._own.difference_update(lease.keys)
            # Ours to finish, by this lease, if they are in work by an earlier one that was lost, or by our own choice.
            for item in shard_epochs:
                item.left = deque(index for index in item.left if item.key(index) not in self._in_work)
            self._drop_again(shard_epochs)
            if not self._closed:
                self._shard_epochs.extend(shard_epochs)
            return not self._closed

    def _drop_again(self, shard_epochs: Sequence[ShardEpoch]) -> None:
        """Leave out what an ended lease of ours gave and `shard_epochs` give once more: it would be trained twice."""
        new = {(item.shard.epoch, item.shard.shard): set(item.left) for item in shard_epochs}
        for item in self._shard_epochs:
            again = new.get((item.shard.epoch, item.shard.shard), ())
            item.left = deque(index for index in item.left if index not in again) if again else item.left

    def add_own(self, item: ShardEpoch) -> None:
        """A shard of our own choice, which is on the disk."""
        with self._changed:
            item.left = deque(index for index in item.left if item.key(index) not in self._in_work)
            if not self._closed:
                self._shard_epochs.append(item)
            self._changed.notify_all()

    def drop_own(self) -> None:
        """The server is back: what is left of shards of our own choice is not trained any more."""
        with self._changed:
            for item in self._shard_epochs:
                if item.lease is None:
                    item.left.clear()

    def ready(self, item: ShardEpoch, path: Path) -> None:
        with self._changed:
            item.path = path
            self._changed.notify_all()

    def skip(self, item: ShardEpoch) -> list[str]:
        """The rest of this shard epoch cannot be trained; its keys."""
        with self._changed:
            keys = item.keys_left()
            item.left.clear()
            self._changed.notify_all()
            return keys

    def leases(self) -> list[Lease]:
        with self._changed:
            return list(self._leases.values())

    def lose(self, lease: Lease) -> bool:
        """The server may have given its samples to others; False when we were done with it."""
        with self._changed:
            if self._leases.pop(lease.id, None) is None:
                return False
            lease.lost = True
            for key in lease.keys:
                self._lease_of.pop(key, None)
            self._changed.notify_all()
            return True

    def pause(self, paused: bool) -> None:
        """What the host has ordered."""
        with self._changed:
            self.paused = paused
            self._changed.notify_all()

    def rest(self, resting: bool) -> list[str]:
        """What this machine's owner wants. Resting: nothing is yielded, and what was not is dropped; its keys, to be given back."""
        with self._changed:
            self._resting = resting
            keys = [key for item in self._shard_epochs if item.lease and not item.lost for key in item.keys_left()] if resting else []
            if resting:
                for item in self._shard_epochs:  # also of the one that the training thread is in the middle of
                    item.left.clear()
                self._shard_epochs.clear()
            self._changed.notify_all()
            return keys

    def end(self) -> None:
        """The run has ended: no more samples."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def fail(self, error: UserError) -> None:
        """The training thread raises `error` instead of waiting for samples."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def pinned(self) -> set[str]:
        """Digests of the shards that are needed."""
        with self._changed:
            return {item.shard.digest for item in self._shard_epochs}

    # -- inside

    def _next_shard_epoch(self) -> ShardEpoch | None:
        """The first shard epoch with samples left that is fetched; None when closed or when the run has ended."""
        with self._changed:
            while True:
                self._shard_epochs = deque(item for item in self._shard_epochs if item.left and not item.lost)
                if self._failure:
                    raise self._failure
                if self._closed or self._ended:
                    return None
                for item in self._shard_epochs if not (self.paused or self._resting) else ():
                    if item.path:
                        return item
                self._speed.pause()
                self._changed.wait()

    def _next_index(self, item: ShardEpoch) -> int | None:
        with self._changed:
            if self._closed or self._ended or self.paused or self._resting or self._failure or item.lost or not item.left:
                return None
            self._speed.count()
            index = item.left.popleft()
            self._in_work.add(item.key(index))
            if item.lease is None:
                self._own.add(item.key(index))
            return index


class _Speed:
    """Samples per second that the training takes, while it has some to take.

    window: samples that are counted at the least. A peer that takes them in a second and then trains for a minute is measured from one window to the next.
    """

    def __init__(self, clock: Callable[[], float], window: int = 0) -> None:
        self.rate, self._count, self._since, self._clock, self._window = 0.0, 0, None, clock, window

    def count(self) -> None:
        now = self._clock()
        if self._since is None:
            self._count, self._since = 0, now
            return
        self._count += 1
        if now - self._since >= 2.0 and self._count >= self._window:
            self.rate, self._since = self._count / (now - self._since), None

    def pause(self) -> None:
        """The training waits for samples: the time it waits says nothing of its speed."""
        self._since = None
