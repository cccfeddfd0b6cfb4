"""The ledger's rules: which samples are available, leased, pending in a contribution, or counted.

Every sample of a unit (a shard in an epoch) is in exactly one of the four, and the strongest claim decides:

- counted: a registered contribution that holds it is a member of a state on the head's chain;
- pending: a live contribution (registered, neither settled nor withdrawn) holds it;
- leased: a lease holds it;
- available: nobody does.

Sets of samples are bit masks (bit i: sample i of the shard). What must survive is written to SQLite in the caller's
transaction; deadlines are not, since after a restart every lease gets a full period again. Not thread-safe, and what it
promises is durable only when the caller has committed: see `ledger.py`.
"""

import heapq
import json
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from datasetserver.tree import State, StateTree
from swarm.protocol import MAX_KEYS, shuffled

UnitId = tuple[int, int]
"""(epoch, shard)"""
Masks = dict[UnitId, int]

MOST_LEASED = 2 * MAX_KEYS
"""A peer that trains holds what one contribution may have, and what it leased ahead; one that holds more trains nothing."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS lease (id TEXT, peer TEXT, epoch INT, shard INT, samples BLOB, PRIMARY KEY (id, epoch, shard)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contribution (peer TEXT, number INT, live INT, PRIMARY KEY (peer, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contribution_unit
    (peer TEXT, number INT, epoch INT, shard INT, samples BLOB, PRIMARY KEY (peer, number, epoch, shard)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (digest TEXT PRIMARY KEY, parent TEXT, round INT, samples INT, members TEXT, reporters TEXT) WITHOUT ROWID;
"""


class Refused(Exception):
    """A request that the ledger's rules do not allow; `status` is HTTP's."""

    def __init__(self, status: int, code: str, message: str, fix: str):
        super().__init__(message)
        self.status, self.code, self.message, self.fix = status, code, message, fix


@dataclass
class Unit:
    """A shard in an epoch. `position`: its place in the epoch's order. The three masks never overlap."""

    epoch: int
    shard: int
    position: int
    samples: int
    leased: int = 0
    pending: int = 0
    counted: int = 0
    holders: list["Lease"] = field(default_factory=list)
    """The leases that hold samples of it."""

    @property
    def available(self) -> int:
        return ((1 << self.samples) - 1) & ~(self.leased | self.pending | self.counted)


@dataclass(eq=False)
class Lease:
    id: str
    peer: str
    deadline: float
    units: Masks = field(default_factory=dict)


@dataclass
class Contribution:
    peer: str
    number: int
    units: Masks
    live: bool = True
    """False once it was given back or its peer was gone for too long."""
    counted: bool = False
    """A member of a state on the head's chain."""

    @property
    def samples(self) -> int:
        return sum(mask.bit_count() for mask in self.units.values())


class _Order:
    """One epoch's order: `shards` by position, and `positions` by shard."""

    def __init__(self, shards: list[int]):
        self.shards, self.positions = shards, [0] * len(shards)
        for position, shard in enumerate(shards):
            self.positions[shard] = position


@dataclass(frozen=True)
class Grant:
    """A new lease: per unit the samples in it that may not be trained."""

    lease_id: str
    units: list[tuple[UnitId, list[int]]]


class Book:
    """The ledger's state in memory, read from `db` and written to it.

    shards: number of samples per shard. most_leased: samples that a peer may hold by leases, beyond which it gets none. clock: seconds, monotonic. Every method but `sweep` may raise Refused, and then has changed nothing.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        *,
        shards: Sequence[int],
        seed: int,
        total_samples: int = 0,
        lease_seconds: float = 60.0,
        grace_seconds: float = 60.0,
        most_leased: int = MOST_LEASED,
        clock: Callable[[], float],
    ):
        self._db, self._shards, self._seed, self._total, self._clock = db, shards, seed, total_samples, clock
        self.lease_seconds, self.grace_seconds, self._most_leased = lease_seconds, grace_seconds, most_leased
        self._leases: dict[str, Lease] = {}
        self._contributions: dict[tuple[str, int], Contribution] = {}
        self._seen: dict[str, float] = {}
        self.tree = StateTree()
        self._load()
        self._rebuild()

    # -- what peers ask for

    def lease(self, peer: str, want_samples: int) -> Grant:
        """Grant `peer` the next units with at least `want_samples` samples together: freed ones first, no barrier between epochs."""
        self.sweep()
        if self.finished:
            head = self.tree.head
            raise Refused(410, "run_finished", f"The run is finished: {head.samples} samples are in it.", "Export the result.")
        if self._held_by[peer] >= self._most_leased:
            message = f"{peer} holds {self._held_by[peer]} samples by leases."
            raise Refused(429, "too_many_leased", message, "Register or release some of them, and ask again.")
        lease = Lease(secrets.token_hex(16), peer, self._clock() + self.lease_seconds)
        while want_samples > 0:
            unit = self._next_unit()
            mask = unit.available
            lease.units[unit.epoch, unit.shard] = mask
            unit.leased |= mask
            unit.holders.append(lease)
            want_samples -= mask.bit_count()
            self._held_by[peer] += mask.bit_count()
        self._leases[lease.id] = lease
        self._touch(peer)
        rows = [(lease.id, peer, *uid, self._pack(uid, mask)) for uid, mask in lease.units.items()]
        self._db.executemany("INSERT INTO lease VALUES (?, ?, ?, ?, ?)", rows)
        return Grant(lease.id, [(uid, _indices(~mask & self._full(uid))) for uid, mask in lease.units.items()])

    def renew(self, lease_id: str, peer: str) -> None:
        """Keep a lease for another period. Refused with 410 when it expired: its samples may be another peer's by now."""
        self.sweep()
        self._touch(peer)
        lease = self._leases.get(lease_id)
        if lease is None or lease.peer != peer:
            raise Refused(410, "lease_lost", f"Lease {lease_id} of {peer} has ended.", "Drop its samples and lease again.")
        lease.deadline = self._clock() + self.lease_seconds

    def release(self, lease_id: str, peer: str, keys: Iterable[str] | None) -> int:
        """Make samples leasable at once; returns how many. None: all that the lease still holds, and the lease ends.

        Keys: those that `peer` holds by any lease; a contribution of which it gives back a key is withdrawn as a whole, since it
        will not be in any state. Keys that it does not hold, and leases that ended, are passed over: replays do no harm.
        """
        self.sweep()
        self._touch(peer)
        if keys is None:
            lease = self._leases.get(lease_id)
            return self._end(lease) if lease and lease.peer == peer else 0
        masks = self._masks(keys)
        withdrawn = [c for c in self._live_of(peer) if any(mask & c.units.get(uid, 0) for uid, mask in masks.items())]
        released = sum(self._withdraw(contribution) for contribution in withdrawn)
        for uid, mask in masks.items():
            taken = self._strip(uid, mask, peer=peer)
            released += taken.bit_count()
            self._freed(uid, taken)
        return released

    def contribute(self, peer: str, number: int, keys: Sequence[str]) -> Contribution:
        """Register what contribution `number` of `peer` holds, before it is offered. Again with equal keys is fine.

        Refused with 409 for other keys under a number that is taken, and for keys that the peer holds no lease for.
        """
        self.sweep()
        self._touch(peer)
        masks = self._masks(keys)
        known = self._contributions.get((peer, number))
        if known:
            if known.units != masks:
                raise Refused(
                    409, "number_taken", f"Contribution {number} of {peer} was registered with other samples.", "Use a new number."
                )
            if not (known.live or known.counted):
                raise Refused(409, "withdrawn", f"Contribution {number} of {peer} was withdrawn.", "Drop it: others may train its samples.")
            return known
        for uid, mask in masks.items():
            lost = mask & ~self._held(peer, uid)
            if lost:
                key = f"{uid[0]}:{uid[1]}:{_indices(lost)[0]}"
                message = f"{peer} does not hold sample {key}" + (", which is counted already." if self._is_counted(uid, lost) else ".")
                raise Refused(409, "not_held", message, "Drop these samples and lease again.")
        contribution = Contribution(peer, number, masks)
        self._contributions[peer, number] = contribution
        self._db.execute("INSERT INTO contribution VALUES (?, ?, 1)", (peer, number))
        rows = [(peer, number, *uid, self._pack(uid, mask)) for uid, mask in masks.items()]
        self._db.executemany("INSERT INTO contribution_unit VALUES (?, ?, ?, ?, ?)", rows)
        for uid, mask in masks.items():
            self._strip(uid, mask, peer=peer)
            self._units[uid].pending |= mask
        self._pending.add((peer, number))
        if (peer, number) in self._included:
            self._count(contribution)
        return contribution

    def settle(self, state: State, reporter: str) -> State:
        """Take note of a settled state, whoever reports it, and count the registered samples of all members; returns the head.

        Refused with 409 when it contradicts itself or a state that is known.
        """
        self.sweep()
        self._touch(reporter)
        known = self.tree.get(state.digest)
        if known:
            mine = (known.parent, known.round, known.samples, sorted(known.members))
            if mine != (state.parent, state.round, state.samples, sorted(state.members)):
                raise Refused(409, "contradiction", f"State {state.digest[:16]} was reported otherwise before.", "Catch up with the swarm.")
            if reporter not in known.reporters and len(known.reporters) < 64:
                known.reporters.append(reporter)
                self._db.execute("UPDATE state SET reporters = ? WHERE digest = ?", (json.dumps(known.reporters), known.digest))
            return self.tree.head
        wrong = self.tree.contradiction(state)
        if wrong:
            raise Refused(409, "contradiction", f"State {state.digest[:16]} cannot be: {wrong}.", "Catch up with the swarm.")
        state.reporters = [reporter]
        row = (state.digest, state.parent, state.round, state.samples, json.dumps(state.members), json.dumps(state.reporters))
        self._db.execute("INSERT INTO state VALUES (?, ?, ?, ?, ?, ?)", row)
        before = self.tree.head
        self.tree.add(state)
        self._follow_head(before)
        return self.tree.head

    def sweep(self) -> None:
        """End leases that were not renewed in time, and withdraw what peers that are long gone left unsettled."""
        now = self._clock()
        if now < self._next_expiry:
            return
        for lease in [lease for lease in self._leases.values() if lease.deadline <= now]:
            self._end(lease)
        patience = self.lease_seconds + self.grace_seconds
        for peer, number in [pair for pair in self._pending if self._seen[pair[0]] + patience <= now]:
            self._withdraw(self._contributions[peer, number])
        deadlines = [lease.deadline for lease in self._leases.values()]
        deadlines += [self._seen[peer] + patience for peer, _ in self._pending]
        # Whatever is leased or registered from now on lasts at least one period.
        self._next_expiry = min([*deadlines, now + self.lease_seconds])

    # -- what people ask for

    @property
    def finished(self) -> bool:
        head = self.tree.head
        return bool(self._total and head and head.samples >= self._total)

    def totals(self) -> dict[str, int]:
        """Samples per state, over all epochs of which a unit was ever granted."""
        leased, pending, counted = self._sums(self._units.values())
        epochs = max((epoch for epoch, _ in self._units), default=-1) + 1
        return {
            "available": epochs * sum(self._shards) - leased - pending - counted,
            "leased": leased,
            "pending": pending,
            "counted": counted,
        }

    def epoch_progress(self) -> tuple[int, int]:
        """(the lowest epoch that is not wholly counted, its counted samples)."""
        counted = Counter()
        for (epoch, _), unit in self._units.items():
            counted[epoch] += unit.counted.bit_count()
        epoch = 0
        while counted[epoch] == sum(self._shards):
            epoch += 1
        return epoch, counted[epoch]

    def samples_by_peer(self) -> Mapping[str, int]:
        """Counted samples per peer."""
        return dict(self._by_peer)

    # -- the order of units

    def _next_unit(self) -> Unit:
        while True:
            if self._free and self._free[0] < self._frontier:
                epoch, position = heapq.heappop(self._free)
            else:
                epoch, position = self._frontier
                self._frontier = (epoch, position + 1) if position + 1 < len(self._shards) else (epoch + 1, 0)
            unit = self._unit((epoch, self._order(epoch).shards[position]))
            if unit.available:
                return unit

    def _order(self, epoch: int) -> "_Order":
        if epoch not in self._orders:
            self._orders[epoch] = _Order(shuffled(len(self._shards), self._seed, "units", epoch))
        return self._orders[epoch]

    def _unit(self, uid: UnitId) -> Unit:
        unit = self._units.get(uid)
        if unit is None:
            epoch, shard = uid
            unit = self._units[uid] = Unit(epoch, shard, self._order(epoch).positions[shard], self._shards[shard])
        return unit

    # -- changes of one sample's state

    def _held(self, peer: str, uid: UnitId) -> int:
        unit = self._units.get(uid)
        return unit.leased & _union(lease.units[uid] for lease in unit.holders if lease.peer == peer) if unit else 0

    def _is_counted(self, uid: UnitId, mask: int) -> bool:
        return uid in self._units and bool(self._units[uid].counted & mask)

    def _strip(self, uid: UnitId, mask: int, peer: str | None = None) -> int:
        """Take samples out of the leases (of one peer) that hold them; returns those taken."""
        unit, taken = self._units.get(uid), 0
        if unit is None or not unit.leased & mask:
            return 0
        for lease in unit.holders[:]:
            held = lease.units[uid] & mask if peer in (None, lease.peer) else 0
            if held:
                taken |= held
                self._set_lease_unit(lease, uid, lease.units[uid] & ~held)
        unit.leased &= ~taken
        return taken

    def _set_lease_unit(self, lease: Lease, uid: UnitId, mask: int) -> None:
        self._held_by[lease.peer] += mask.bit_count() - lease.units[uid].bit_count()
        if mask:
            lease.units[uid] = mask
            self._db.execute(
                "UPDATE lease SET samples = ? WHERE id = ? AND epoch = ? AND shard = ?", (self._pack(uid, mask), lease.id, *uid)
            )
        else:
            del lease.units[uid]
            self._units[uid].holders.remove(lease)
            self._db.execute("DELETE FROM lease WHERE id = ? AND epoch = ? AND shard = ?", (lease.id, *uid))

    def _end(self, lease: Lease) -> int:
        """End a lease; returns how many samples become leasable."""
        del self._leases[lease.id]
        self._db.execute("DELETE FROM lease WHERE id = ?", (lease.id,))
        for uid, mask in lease.units.items():
            self._units[uid].leased &= ~mask
            self._units[uid].holders.remove(lease)
            self._freed(uid, mask)
        released = sum(mask.bit_count() for mask in lease.units.values())
        self._held_by[lease.peer] -= released
        if not self._held_by[lease.peer]:
            del self._held_by[lease.peer]
        return released

    def _withdraw(self, contribution: Contribution) -> int:
        """Withdraw a live contribution; returns how many samples become leasable."""
        contribution.live = False
        self._pending.discard((contribution.peer, contribution.number))
        self._db.execute("UPDATE contribution SET live = 0 WHERE peer = ? AND number = ?", (contribution.peer, contribution.number))
        freed = 0
        for uid, mask in contribution.units.items():
            unit = self._units[uid]
            freed += (mask & unit.pending).bit_count()
            unit.pending &= ~mask
            self._freed(uid, mask)
        return freed

    def _count(self, contribution: Contribution) -> None:
        contribution.counted = True
        self._pending.discard((contribution.peer, contribution.number))
        for uid, mask in contribution.units.items():
            unit = self._units[uid]
            self._by_peer[contribution.peer] += (mask & ~unit.counted).bit_count()
            # Withdrawn before and in a state after all: whoever leased these samples since must not train them again.
            self._strip(uid, mask)
            unit.counted |= mask
            unit.pending &= ~mask

    def _freed(self, uid: UnitId, mask: int) -> None:
        if mask:
            heapq.heappush(self._free, (uid[0], self._units[uid].position))

    # -- the head

    def _follow_head(self, before: State | None) -> None:
        """The head was `before`; usually the new one is its child, and nothing else can have changed."""
        head = self.tree.head
        if before is not None and head.parent == before.digest:
            return self._include(set(head.contributions()))
        included = {pair for state in self.tree.chain() for pair in state.contributions()}
        if not self._included <= included:
            self._leave_branch(included)
            return
        self._include(included - self._included)

    def _include(self, pairs: set[tuple[str, int]]) -> None:
        for pair in pairs & self._contributions.keys():
            self._count(self._contributions[pair])
        self._included |= pairs

    def _leave_branch(self, included: set[tuple[str, int]]) -> None:
        """The head is on another branch: what was counted on ours only is withdrawn, as its peers drop it too."""
        for pair in sorted(self._included - included):
            contribution = self._contributions.get(pair)
            if contribution and contribution.live:
                contribution.live = False
                self._db.execute("UPDATE contribution SET live = 0 WHERE peer = ? AND number = ?", pair)
        self._rebuild()

    # -- start

    def _load(self) -> None:
        now = self._clock()
        for lease_id, peer, epoch, shard, samples in self._db.execute("SELECT id, peer, epoch, shard, samples FROM lease"):
            lease = self._leases.setdefault(lease_id, Lease(lease_id, peer, now + self.lease_seconds))
            lease.units[epoch, shard] = int.from_bytes(samples, "little")
        for peer, number, live in self._db.execute("SELECT peer, number, live FROM contribution"):
            self._contributions[peer, number] = Contribution(peer, number, {}, live=bool(live))
        for peer, number, epoch, shard, samples in self._db.execute("SELECT peer, number, epoch, shard, samples FROM contribution_unit"):
            self._contributions[peer, number].units[epoch, shard] = int.from_bytes(samples, "little")
        for digest, parent, round_, samples, members, reporters in self._db.execute(
            "SELECT digest, parent, round, samples, members, reporters FROM state ORDER BY round"
        ):
            pairs = tuple((peer, number, count) for peer, number, count in json.loads(members))
            self.tree.add(State(digest, parent, round_, samples, pairs, json.loads(reporters)))

    def _rebuild(self) -> None:
        """Work out every unit's masks from leases, contributions and the head's chain."""
        now = self._clock()
        self._units: dict[UnitId, Unit] = {}
        self._orders: dict[int, _Order] = {}
        self._free: list[tuple[int, int]] = []
        self._frontier = (0, 0)
        self._by_peer: Counter[str] = Counter()
        self._held_by: Counter[str] = Counter()
        self._pending: set[tuple[str, int]] = set()
        self._included = {pair for state in self.tree.chain() for pair in state.contributions()}
        for lease in self._leases.values():
            for uid, mask in lease.units.items():
                unit = self._unit(uid)
                unit.leased |= mask
                unit.holders.append(lease)
                self._held_by[lease.peer] += mask.bit_count()
        for pair, contribution in self._contributions.items():
            contribution.counted = False
            for uid, mask in contribution.units.items():
                unit = self._unit(uid)
                if contribution.live:
                    unit.pending |= mask
                    unit.leased &= ~mask
            if contribution.live:
                self._pending.add(pair)
        for state in self.tree.chain():
            for pair in state.contributions():
                if pair in self._contributions:
                    self._count(self._contributions[pair])
        for peer in {lease.peer for lease in self._leases.values()} | {peer for peer, _ in self._pending}:
            self._seen.setdefault(peer, now)
        self._next_expiry = now

    # -- small things

    def _touch(self, peer: str) -> None:
        self._seen[peer] = self._clock()

    def _live_of(self, peer: str) -> list[Contribution]:
        return [self._contributions[pair] for pair in sorted(self._pending) if pair[0] == peer]

    def _masks(self, keys: Iterable[str]) -> Masks:
        """Masks per unit of sample keys; Refused for a key that the dataset does not have or that is given twice."""
        texts: dict[str, list[str]] = {}
        for key in keys:
            unit, _, index = key.rpartition(":")
            texts.setdefault(unit, []).append(index)
        masks: Masks = {}
        for unit, indices in texts.items():
            uid, mask = self._unit_mask(unit, [int(index) for index in indices])
            if masks.get(uid, 0) & mask:
                raise _given_twice(f"{unit}:{indices[0]}")
            masks[uid] = masks.get(uid, 0) | mask
        return masks

    def _unit_mask(self, unit: str, indices: list[int]) -> tuple[UnitId, int]:
        epoch, shard = (int(part) for part in unit.split(":"))
        last = max(indices)
        if shard >= len(self._shards) or last >= self._shards[shard]:
            raise Refused(422, "no_such_sample", f"The dataset has no sample {unit}:{last}.", "Check which run this is.")
        if len(set(indices)) < len(indices):
            raise _given_twice(f"{unit}:{Counter(indices).most_common(1)[0][0]}")
        return (epoch, shard), sum(map((1).__lshift__, indices))

    def _full(self, uid: UnitId) -> int:
        return (1 << self._shards[uid[1]]) - 1

    def _pack(self, uid: UnitId, mask: int) -> bytes:
        return mask.to_bytes((self._shards[uid[1]] + 7) // 8, "little")

    @staticmethod
    def _sums(units: Iterable[Unit]) -> tuple[int, int, int]:
        leased = pending = counted = 0
        for unit in units:
            leased, pending, counted = (
                leased + unit.leased.bit_count(),
                pending + unit.pending.bit_count(),
                counted + unit.counted.bit_count(),
            )
        return leased, pending, counted


def _given_twice(key: str) -> Refused:
    return Refused(422, "key_twice", f"Sample {key} is given twice.", "Give each key once.")


def _indices(mask: int) -> list[int]:
    return [index for index in range(mask.bit_length()) if mask >> index & 1]


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
