"""The ledger's rules: which samples are available, leased, pending in a contribution, or counted, and what peers may do with them.

Sets of samples are bit masks (`samples.py`); whose they are is told by `shard_epochs.py`. What must survive is written to SQLite
(`store.py`) by `save`; deadlines are not, since after a restart every lease gets a full period again. Not thread-safe, and what it
promises is durable only when the caller has saved and committed: see `ledger.py`.
"""

import secrets
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile

from datasetserver.holdings import Allowance, Holdings
from datasetserver.lineage import Lineage
from datasetserver.owners import NOBODY, Owners, Sender
from datasetserver.refused import Refused
from datasetserver.reports import News, Reports
from datasetserver.samples import Masks, ShardEpochId, full, indices, parse_keys, size
from datasetserver.shard_epochs import Contribution, Lease, ShardEpoch, ShardEpochs
from datasetserver.store import Store
from datasetserver.tree import State
from datasetserver.wrong_states import WrongStates
from swarm.budget import Budgets
from swarm.protocol import MAX_KEYS, NO_LEASE, RunState

ANY_HOLDS = Allowance(2 * MAX_KEYS, 2 * MAX_KEYS)
"""A peer that trains holds what one contribution may have, and what it leased ahead; one that holds more trains nothing."""
_NAMES = 256
_COSTLY_PER_SECOND, _COSTLY_AT_ONCE = 0.5, 64
"""What one owner says that changes the branch, or of a state whose parent is unknown: in a run of 5,000 rounds one takes up to 400 ms. Of an honest
peer there are a few: what it tells of a lost branch follows what it told before."""
_STEPS, _SHARD_EPOCHS = 4_000_000, 100_000
"""Steps of the tree (`StateTree.steps`), and shard epochs in one list of keys, that take as long as one such and count as one."""
_NEGLIGIBLE = 0.01
"""As 1,000 shard epochs: no honest contribution has more. Budgets are remembered of those who spend some."""
_MOST_WITHDRAWN = 4096
"""Contributions of one owner that were withdrawn and that no state is said to have: 30 MB where each has samples of 1,500 shards."""


@dataclass(frozen=True)
class Grant:
    """A new lease: per shard epoch the samples in it that may not be trained."""

    lease_id: str
    shard_epochs: list[tuple[ShardEpochId, list[int]]]


class Book:
    """The ledger's state in memory, read from `db`, and written to it by `save`.

    shards: number of samples per shard. generations: see `ShardEpochs`. allowance: see `Holdings`. vouches: whether contributions get
    receipts. most_of_one: samples of one member that a state may have, 0: any number. copy_seconds: after which the rest of an epoch goes to a
    second peer; 0: never.
    order: the host's. extended: to how many samples the host lets the run go on; 0: to total_samples. discarded: digests of states that the
    host names as forged.
    clock: seconds, monotonic. names: for leases, which nobody can guess. Every method but `sweep` may raise Refused, and then has changed nothing.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        *,
        shards: Sequence[int],
        seed: int,
        generations: Sequence[tuple[int, int]] = (),
        total_samples: int = 0,
        extended: Callable[[], int] = lambda: 0,
        lease_seconds: float = 60.0,
        grace_seconds: float = 60.0,
        allowance: Allowance = ANY_HOLDS,
        vouches: bool = False,
        most_of_one: int = 0,
        copy_seconds: float = 0.0,
        order: Callable[[], RunState] = lambda: "running",
        discarded: Callable[[], Collection[str]] = lambda: (),
        clock: Callable[[], float],
        names: Iterator[str] | None = None,
    ):
        self._store, self._shards, self._seed, self._total, self._clock = Store(db, shards), shards, seed, total_samples, clock
        self._generations = generations
        self.lease_seconds, self.grace_seconds = lease_seconds, grace_seconds
        self._copy_seconds, self._order, self._extended = copy_seconds, order, extended
        self._holdings, self._vouches = Holdings(allowance), vouches
        self._to_discard = discarded
        self._arrived = float("inf")
        self._seen: dict[str, float] = {}
        self._names = names or _unguessable()
        self._owners = Owners(self._store)
        self._costly = Budgets(_COSTLY_PER_SECOND, _COSTLY_AT_ONCE, clock=clock)
        self._leases = self._kept_leases()
        self._contributions = {c.id: c for c in self._store.contributions()}
        self._withdrawn: defaultdict[str, dict[tuple[str, int], None]] = defaultdict(dict)
        """By owner those that were withdrawn, the first first."""
        self._reports = Reports(self._store, self._owners, self._registered, most_of_one)
        self.tree = self._reports.tree
        self.wrong = WrongStates(self._store, self.tree, lambda: self._reports.sure)
        self._lineage = Lineage(self.tree, self._registered)
        self._rebuild()
        for contribution in [c for c in self._contributions.values() if not (c.live or c.counted)]:
            self._note_withdrawn(contribution)
        self._begun = self.shard_epochs.last_epoch
        """The last epoch of which a shard epoch was leased; after a restart that of any shard epoch we know."""

    # -- what peers ask for

    def admit(self, peer: str, sender: Sender) -> None:
        """`sender` is about to ask something for `peer`; see `Owners`. Raises Refused (403)."""
        self._owners.admit(peer, sender)

    def arrived(self, at: float) -> None:
        """What is asked next came at `at`, by the clock. Leases end as of then: a disk that hung for 70 s since costs no peer its lease."""
        self._arrived = at

    def owner_of(self, peer: str) -> str:
        return self._owners.of(peer)

    def owners_of(self, peers: Iterable[str]) -> dict[str, str]:
        """Who answers for each of those of them that ever came."""
        return {peer: self._owners.of(peer) for peer in peers if self._owners.knows(peer) or peer in self._seen or peer in self._by_peer}

    def lease(self, peer: str, want_samples: int) -> Grant:
        """Grant `peer` the next shard epochs with at least `want_samples` samples together, or as many as it may hold; no barrier between epochs.

        Shard epochs that others gave up go first; then copies of those that others are late with, of which the first to register has the
        samples; then new ones.
        """
        self.sweep()
        self._refuse_when_over()
        want_samples = min(want_samples, self._holdings.room(self._owners, peer, self._by_peer))
        lease = Lease(next(self._names), peer, self._clock() + self.lease_seconds, self._clock())
        for item, mask in chain(self.shard_epochs.returned(), self._late(peer), self.shard_epochs.ahead()):
            lease.shard_epochs[item.uid] = mask
            item.holders.append(lease)
            want_samples -= mask.bit_count()
            if want_samples <= 0:
                break
        self._leases[lease.id] = lease
        self._holdings.lease(peer, lease.samples)
        self._begun = max(self._begun, *(epoch for epoch, _ in lease.shard_epochs))
        self._touch(peer)
        for uid, mask in lease.shard_epochs.items():
            self._store.set_lease_shard(lease, uid, mask)
        return Grant(lease.id, [(uid, indices(~mask & full(self._shards[uid[1]]))) for uid, mask in lease.shard_epochs.items()])

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

        Keys: those that the lease still holds. With NO_LEASE, those that `peer` holds by any lease; a contribution of which it gives back a
        key is withdrawn as a whole then, since it will not be in any state. Keys that it does not hold, and leases that ended, are
        passed over: replays do no harm.
        """
        self.sweep()
        self._touch(peer)
        lease = self._leases.get(lease_id)
        if lease_id != NO_LEASE and (lease is None or lease.peer != peer):
            return 0
        if keys is None:
            return self._end(lease) if lease else 0
        masks = self._masks(peer, keys)
        if lease:
            return self._give_up(lease, masks)
        withdrawn = [c for c in self._live_of(peer) if any(mask & masks.get(uid, 0) for uid, mask in c.shard_epochs.items())]
        released = sum(self._withdraw(contribution) for contribution in withdrawn)
        for uid, mask in masks.items():
            if taken := self._strip(uid, mask, peer=peer):  # else `_free` would draw the order of any epoch that a request names
                released += self._free(uid, taken)
        return released

    def contribute(self, peer: str, number: int, keys: Sequence[str], *, offered: bool = False) -> Contribution:
        """Register what contribution `number` of `peer` holds, before it is offered. Again with equal keys is fine.

        Refused with 409 for other keys under a number that is taken, and for keys that the peer holds no lease for. But one that was
        `offered` already, while we were away, may be in a state by now: of its samples those are the peer's that nobody else holds,
        and the others are repetitions. So every sample counts once, however often it was trained.
        """
        self.sweep()
        self._touch(peer)
        masks = self._masks(peer, keys)
        known = self._contributions.get((peer, number))
        if known:
            return _same(known, masks, offered=offered)
        contribution = self._of_offered(peer, number, masks) if offered else self._of_leased(peer, number, masks)
        if not contribution.registered_samples:
            return contribution
        self._contributions[contribution.id] = contribution
        self._store.add_contribution(contribution)
        for uid, mask in masks.items():
            self._strip(uid, mask, peer=peer)
        for uid, mask in contribution.shard_epochs.items():
            self.shard_epochs[uid].pending |= mask
        self._await(contribution)
        if (peer, number) in self._lineage.included:
            self._count(contribution)
            for pair in self._lineage.came(peer, number, self._pending):
                self._withdraw(self._contributions[pair])
        if contribution.owner:
            self._charge(contribution)
        before, steps = self.tree.head, self.tree.steps
        self.tree.count_again((peer, number))
        if not self._follow_head(before):  # a liar may have told of states with the next contributions of others: who told pays
            self._costs(self._owners.of(self.tree.head.reporters[0]), 1 + (self.tree.steps - steps) / _STEPS)
        return contribution

    def samples_of(self, peer: str, number: int) -> Masks:
        """What was registered of a contribution, without what others hold; empty where nothing was."""
        known = self._contributions.get((peer, number))
        return dict(known.shard_epochs) if known else {}

    def add_final(self, state: State, reporter: str) -> State:
        """Take note of a final state, whoever reports it, and count the registered samples of all members; returns the head.

        Refused with 409 when it contradicts itself, or what is known of that state; with 429 when this owner's reports cost too much.
        """
        self.sweep()
        self._touch(reporter)
        owner, before, known, steps = self._owners.of(reporter), self.tree.head, self.tree.get(state.digest), self.tree.steps
        self._refuse_costly(owner)
        costs = self.tree.has_gap(state) and not (known and known.equals(state))
        try:
            news = self._reports.add(state, reporter)
            costs |= news is News.REDRAWN
            if news is News.REDRAWN:
                self._change_branch()
            elif news is News.ADDED:
                costs |= not self._follow_head(before)
            elif news is News.BACKED:
                self._settle()
        finally:
            self._costs(owner, costs + (self.tree.steps - steps) / _STEPS)
        return self.tree.head

    def countersign(self) -> str:
        """See `Reports.countersign`."""
        self._discard()
        return self._reports.countersign()

    def sweep(self) -> None:
        """End leases that were not renewed in time, and withdraw what peers that are long gone left pending."""
        self._discard()
        now = min(self._clock(), self._arrived)
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
    def state(self) -> RunState:
        """What the host ordered; ended in any case once we have counted all the run's samples."""
        return "ended" if self._total and self.counted_samples >= max(self._total, self._extended()) else self._order()

    @property
    def told(self) -> State | None:
        """The state that newcomers hear of; None: none. They wait for who has it, and end where it has all the run's samples.

        So one owner's word is not enough while there is more: with one report a peer could end all that start. Once we have counted all samples, or
        before two owners stand behind any state, it is the head, if it has no more samples than we count.
        """
        sure, head = self._reports.sure, self.tree.head
        if sure is not None and self.state != "ended":
            return sure
        return head if head is not None and head.samples <= head.counted else sure

    @property
    def counted_samples(self) -> int:
        """In the head's chain, repeated ones included, whatever reports say."""
        return self.tree.head.counted if self.tree.head else 0

    @property
    def repeated_samples(self) -> int:
        """Of `counted_samples`, those trained once more though they counted already; the rest is what the ledger has as counted."""
        return max(0, self.counted_samples - sum(self._by_peer.values()))

    def samples_by_peer(self) -> Mapping[str, int]:
        """Counted samples per peer."""
        return dict(self._by_peer)

    def save(self) -> None:
        """Write to SQLite what has changed since the last time, in the caller's transaction."""
        self._store.flush()

    # -- who gets what

    def _refuse_when_over(self) -> None:
        samples = self.counted_samples
        if self.state == "ended":
            raise Refused(410, "run_finished", f"The run is finished: {samples} samples are in it.", "Export the result.")
        if self.state == "paused":
            raise Refused(503, "run_paused", f"The host has paused the run at {samples} samples.", "Wait; ask again as Retry-After says.")

    def _late(self, peer: str) -> Iterator[tuple[ShardEpoch, int]]:
        """What one other peer holds for long of a shard epoch, in epochs that are otherwise given out; the longest held first."""
        latest = self._clock() - self._copy_seconds if self._copy_seconds else float("-inf")
        for lease in takewhile(lambda lease: lease.since <= latest, self._leases.values()):
            for item in map(self.shard_epochs.__getitem__, lease.shard_epochs if lease.peer != peer else ()):
                if item.uid[0] < self.shard_epochs.frontier[0] and len(item.holders) == 1 and item.leased:
                    yield item, item.leased

    # -- what costs the ledger much

    def _refuse_costly(self, owner: str) -> None:
        if self._costly.is_spent(owner):
            raise Refused(429, "too_many_branches", "What this owner's peers say changes the run's branch too often.", "Say the rest later.")

    def _costs(self, owner: str, amount: float) -> None:
        if amount >= _NEGLIGIBLE:
            self._costly.take(owner, amount)

    def _masks(self, peer: str, keys: Iterable[str]) -> Masks:
        owner, keys = self._owners.of(peer), list(keys)
        self._refuse_costly(owner)
        try:
            masks = parse_keys(keys, self.shard_epochs.samples)
        except Refused:
            self._costs(owner, len(keys) / _SHARD_EPOCHS)
            raise
        self._costs(owner, len(masks) / _SHARD_EPOCHS)
        return masks

    # -- changes of one sample's state

    def _refuse_foreign(self, peer: str, uid: ShardEpochId, mask: int) -> None:
        item = self.shard_epochs.get(uid)
        lost = mask & ~item.held_by(peer) if item else mask
        if lost:
            counted = ", which is counted already." if item and item.counted & lost else "."
            message = f"{peer} does not hold sample {uid[0]}:{uid[1]}:{indices(lost)[0]}{counted}"
            raise Refused(409, "not_held", message, "Drop these samples and lease again.")

    def _of_leased(self, peer: str, number: int, masks: Masks) -> Contribution:
        """A contribution of samples that the peer leased, with a receipt if there is room for one. Refused (409) for others."""
        for uid, mask in masks.items():
            self._refuse_foreign(peer, uid, mask)
        room = self._vouches and self._may_come(peer, number) and self._has_room(peer, masks)
        return self._made(peer, number, masks, vouched=self._owners.of(peer) if room else "")

    def _of_offered(self, peer: str, number: int, masks: Masks) -> Contribution:
        """One that is with the swarm already. Of samples that the peer holds no lease for, anybody could name any.

        They are believed within the owner's allowance, which only a state gives back that peers of two owners stand behind; beyond it they
        count for nothing.
        """
        held = {uid: own for uid, mask in masks.items() if (item := self.shard_epochs.get(uid)) and (own := mask & item.held_by(peer))}
        charged = size(held) < size(masks) and self._has_room(peer, masks)
        return self._made(peer, number, masks if charged else held, charged=self._owners.of(peer) if charged else "")

    def _made(self, peer: str, number: int, masks: Masks, **owner: str) -> Contribution:
        last = self._begun + 1  # what one request asks for does not begin an epoch
        shard_epochs = {uid: own for uid, mask in masks.items() if uid[0] <= last and (own := mask & self._open_to(peer, uid))}
        return Contribution(peer, number, shard_epochs, repeated=size(masks) - size(shard_epochs), **owner)

    def _has_room(self, peer: str, masks: Masks) -> bool:
        return self._holdings.may_vouch(self._owners, peer, size(masks), self._by_peer)

    def _open_to(self, peer: str, uid: ShardEpochId) -> int:
        """The samples of a shard epoch that the peer may make its own: those it leased, and those nobody has."""
        item = self.shard_epochs[uid]
        return item.held_by(peer) & item.leased | item.available

    def _strip(self, uid: ShardEpochId, mask: int, *, peer: str | None = None) -> int:
        """Take samples out of the leases (of one peer) that hold them; returns those taken."""
        item, taken = self.shard_epochs.get(uid), 0
        for lease in item.holders[:] if item else ():
            held = lease.shard_epochs[uid] & mask if peer in (None, lease.peer) else 0
            if held:
                taken |= held
                self._take(lease, item, held)
        return taken

    def _take(self, lease: Lease, item: ShardEpoch, mask: int) -> None:
        left = lease.shard_epochs[item.uid] & ~mask
        self._holdings.leased[lease.peer] -= mask.bit_count()
        self._store.set_lease_shard(lease, item.uid, left)
        if left:
            lease.shard_epochs[item.uid] = left
        else:
            del lease.shard_epochs[item.uid]
            item.holders.remove(lease)

    def _give_up(self, lease: Lease, masks: Masks) -> int:
        """Of these samples, those that the lease holds go back; returns how many become leasable."""
        released = 0
        for uid, mask in masks.items():
            if held := lease.shard_epochs.get(uid, 0) & mask:
                self._take(lease, self.shard_epochs[uid], held)
                released += self._free(uid, held)
        return released

    def _end(self, lease: Lease) -> int:
        """End a lease; returns how many samples become leasable."""
        del self._leases[lease.id]
        self._store.remove_lease(lease)
        self._holdings.end_lease(lease.peer, lease.samples)
        for uid in lease.shard_epochs:
            self.shard_epochs[uid].holders.remove(lease)
        return sum(self._free(uid, mask) for uid, mask in lease.shard_epochs.items())

    def _withdraw(self, contribution: Contribution) -> int:
        """Withdraw a live contribution; returns how many samples become leasable."""
        self._not_pending(contribution)
        self._set_withdrawn(contribution)
        for uid, mask in contribution.shard_epochs.items():
            self.shard_epochs[uid].pending &= ~mask
        return sum(self._free(uid, mask) for uid, mask in contribution.shard_epochs.items())

    def _set_withdrawn(self, contribution: Contribution) -> None:
        contribution.live = False
        self._store.set_contribution(contribution)
        self._note_withdrawn(contribution)

    def _note_withdrawn(self, contribution: Contribution) -> None:
        """Of too many of one owner the first are forgotten, but for those that may count again. So each new one looks at two."""
        mine = self._withdrawn[self._owners.of(contribution.peer)]
        mine[contribution.id] = None
        for pair in list(islice(mine, min(2, max(0, len(mine) - _MOST_WITHDRAWN)))):
            del mine[pair]
            if self.tree.is_told(pair) or self._holdings.awaits(*pair):
                mine[pair] = None
            else:
                self._store.remove_contribution(self._contributions.pop(pair))

    def _count(self, contribution: Contribution) -> None:
        contribution.counted = True
        self._not_pending(contribution)
        for uid, mask in contribution.shard_epochs.items():
            item = self.shard_epochs[uid]
            self._by_peer[contribution.peer] += (mask & ~item.counted).bit_count()
            item.counted |= mask
            item.pending &= ~mask

    def _keep_from_others(self) -> None:
        """What was withdrawn is in a state after all: whoever leased its samples since must not train them.

        Not on one owner's word: he could make up a state with a sample of each shard that the others hold, and all their work would be refused. Who
        has trained such samples meanwhile registers them as repeated.
        """
        sure = self._reports.sure
        for pair in [pair for pair, number in sorted(self.unsure.items()) if sure and number <= sure.round]:
            del self.unsure[pair]
            for uid, mask in self._contributions[pair].shard_epochs.items():
                self._strip(uid, mask)

    def _free(self, uid: ShardEpochId, mask: int) -> int:
        """A claim on these samples has ended; returns how many of them are leasable now."""
        item = self.shard_epochs[uid]
        freed = mask & item.available
        if freed:
            self.shard_epochs.free(item)
        return freed.bit_count()

    def _charge(self, contribution: Contribution) -> None:
        self._holdings.vouch(contribution.owner, *contribution.id, contribution.registered_samples)

    def _settle(self, *, anew: bool = False) -> None:
        """Make room for receipts again; see `Reports.settle`."""
        self._reports.settle(self._holdings, anew=anew)
        self._keep_from_others()

    def _may_come(self, peer: str, number: int) -> bool:
        """Whether a state may still take it: none takes an earlier one than the peer's last."""
        return number > self._lineage.last.get(peer, 0)

    def _await(self, contribution: Contribution) -> None:
        self._pending.add(contribution.id)
        self._holdings.pending[contribution.peer] += contribution.samples

    def _not_pending(self, contribution: Contribution) -> None:
        """It is not pending any more."""
        if contribution.id in self._pending:
            self._pending.remove(contribution.id)
            self._holdings.not_pending(contribution.peer, contribution.samples)

    # -- the head

    def _follow_head(self, before: State | None) -> bool:
        """The head was `before`; usually the new one is its child, and nothing else can have changed. Returns whether the branch is the same."""
        if self.tree.head is before:
            return True
        following = self.tree.since(before)
        if following is None:
            self._change_branch()
            return False
        for state in following:
            for pair in self._lineage.passed(state, self._pending):
                self._withdraw(self._contributions[pair])
            self._include(state, self._lineage.included)
            self._lineage.extend(state)
        self._settle()
        return True

    def _include(self, state: State, known: Collection[tuple[str, int]] = ()) -> None:
        """A state of the head's chain, the newest so far. known: contributions that are counted already."""
        for pair in sorted((set(state.contributions()) & self._contributions.keys()).difference(known)):
            self._count(self._contributions[pair])
            if not self._contributions[pair].live:
                self.unsure.setdefault(pair, state.round)

    def _change_branch(self) -> None:
        """What was counted on the head's former chain only is withdrawn, as its peers drop it too."""
        before = self._lineage.included
        self._lineage.read()
        for pair in sorted(before - self._lineage.included):
            contribution = self._contributions.get(pair)
            if contribution and contribution.live:
                self._set_withdrawn(contribution)
        if not before <= self._lineage.included:
            return self._rebuild()
        for state in self.tree.chain():
            self._include(state, before)
            self.unsure |= {pair: state.round for pair in state.contributions() if pair in self.unsure}  # in another state now
        self._settle(anew=True)

    def _registered(self, pair: tuple[str, int]) -> int:
        contribution = self._contributions.get(pair)
        return contribution.registered_samples if contribution else 0

    def _discard(self) -> None:
        """Do what the host ordered since: forget states that it names, and all that descend from them."""
        if new := self._reports.are_new(self._to_discard()):
            self.discard(new)

    def discard(self, digests: Collection[str]) -> None:
        """Forget these states, which the host has discarded, and all that descend from them."""
        settled = [c for c in self._charged() if not self._holdings.awaits(*c.id)]
        self._reports.discard(digests)
        self._change_branch()
        self._forgive(settled)

    def _forgive(self, settled: Iterable[Contribution]) -> None:
        """What was settled before the host discarded states stays so: else an honest token would answer for all the work that it lost."""
        for contribution in settled:
            if self._holdings.awaits(*contribution.id):
                self._holdings.settle([contribution.id], {NOBODY})
                contribution.vouched = contribution.charged = ""
                self._store.set_owner(contribution)

    def _charged(self) -> Iterator[Contribution]:
        return (contribution for contribution in self._contributions.values() if contribution.owner)

    # -- start

    def _kept_leases(self) -> dict[str, Lease]:
        """Each with a full period."""
        leases = {lease.id: lease for lease in self._store.leases()}
        for lease in leases.values():
            lease.deadline, lease.since = self._clock() + self.lease_seconds, self._clock()
        return leases

    def _rebuild(self) -> None:
        """Work out whose every sample is from leases, contributions and the head's chain."""
        now = self._clock()
        self.shard_epochs = ShardEpochs(self._shards, self._seed, self._generations)
        self._by_peer: Counter[str] = Counter()
        self._holdings = Holdings(self._holdings.allowance)
        for lease in self._leases.values():
            self._holdings.lease(lease.peer, lease.samples)
            for uid in lease.shard_epochs:
                self.shard_epochs[uid].holders.append(lease)
        self._pending: set[tuple[str, int]] = set()
        self.unsure: dict[tuple[str, int], int] = {}
        """Contributions that were withdrawn and count after all, by a state of this round that one owner alone tells: see `_keep_from_others`."""
        for contribution in self._contributions.values():
            contribution.counted = False
            if contribution.live:
                self._await(contribution)
            for uid, mask in contribution.shard_epochs.items():
                self.shard_epochs[uid].pending |= mask if contribution.live else 0
        for state in self.tree.chain():
            self._include(state)
        for contribution in self._charged():
            self._charge(contribution)
        self._settle(anew=True)
        for peer in {lease.peer for lease in self._leases.values()} | {peer for peer, _ in self._pending}:
            self._seen.setdefault(peer, now)
        self._next_expiry = now

    # -- small things

    def _touch(self, peer: str) -> None:
        self._seen[peer] = self._clock()

    def _live_of(self, peer: str) -> list[Contribution]:
        return [self._contributions[pair] for pair in sorted(pair for pair in self._pending if pair[0] == peer)]


def _unguessable() -> Iterator[str]:
    """Names of 128 random bits; many at once, for each call of the system lets go of the interpreter's lock."""
    while True:
        block = secrets.token_hex(16 * _NAMES)
        yield from (block[at : at + 32] for at in range(0, len(block), 32))


def _same(known: Contribution, masks: Masks, *, offered: bool) -> Contribution:
    """`known`, whose number was given again; Refused (409) when the samples are others, or when it was withdrawn.

    Of an offered one, those that it held no lease for may have been left out.
    """
    name = f"Contribution {known.number} of {known.peer}"
    others = any(mask & ~masks.get(uid, 0) for uid, mask in known.shard_epochs.items())
    left_out = offered and not (known.repeated or known.charged)
    if others or (known.registered_samples != size(masks) and not left_out):
        raise Refused(409, "number_taken", f"{name} was registered with other samples.", "Use a new number.")
    if not (known.live or known.counted):
        raise Refused(409, "withdrawn", f"{name} was withdrawn.", "Drop it: others may train its samples.")
    return known
