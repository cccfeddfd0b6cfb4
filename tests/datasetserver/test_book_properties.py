"""Whatever peers do, and in whatever order: no sample is lost, none is counted twice, and a restart changes nothing.

More of it: `pytest tests/datasetserver/test_book_properties.py --hypothesis-profile=deep --hypothesis-seed=1 -s`, which takes and prints
more than 10,000 steps.
"""

import itertools
import sqlite3
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from datasetserver.book import Book
from datasetserver.refused import Refused
from datasetserver.store import SCHEMA
from datasetserver.tree import State
from swarm.protocol import sample_key

SHARDS = (3, 5, 2)
PEERS = st.sampled_from(["alice", "bob", "carol"])
COPY_SECONDS = 20


class LedgerMachine(RuleBasedStateMachine):
    """Peers lease, register, report on any branch, give back, vanish, are late; the host pauses; the server restarts, its clock jumps."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.now, self.state = 0.0, "running"
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        self.db.executescript(SCHEMA)
        self.names = (f"lease{number:06d}" for number in itertools.count())
        self.book = self.open()
        self.leases, self.offered, self.states = [], [], []

    def open(self):
        periods = {"lease_seconds": 60, "grace_seconds": 60, "copy_seconds": COPY_SECONDS}
        book = Book(self.db, shards=SHARDS, seed=3, **periods, order=lambda: self.state, clock=lambda: self.now)
        book._names = self.names  # else what a restart makes of the leases' order could not be repeated
        return book

    def teardown(self):
        """At the end everybody is gone, and a newcomer gets all that was not counted: nothing is lost."""
        self.now, self.state = self.now + 1000, "running"
        self.book.sweep()
        self.book.sweep()  # what ended leases leave of contributions has had its grace as well
        epochs = range(self.book.shard_epochs.last_epoch + 1)
        everything = {sample_key(epoch, shard, index) for epoch in epochs for shard, size in enumerate(SHARDS) for index in range(size)}
        granted = self.keys_of(self.book.lease("dora", max(1, len(everything) - self.book.shard_epochs.totals()["counted"])))
        assert len(granted) == len(set(granted))
        assert everything - self.claimed() == set() == set(granted) & self.counted()
        self.db.close()

    @rule(peer=PEERS, want=st.integers(1, 12))
    def lease(self, peer, want):
        before = self.claimed() - self.late(peer)
        try:
            grant = self.book.lease(peer, want)
        except Refused as refused:
            assert (refused.code, self.state) == ("run_paused", "paused")
            return
        keys = self.keys_of(grant)
        assert len(keys) >= want
        assert not before & set(keys), "granted what somebody holds"
        self.leases.append((peer, grant.lease_id, keys))

    @staticmethod
    def keys_of(grant):
        return [sample_key(*uid, index) for uid, skip in grant.shard_epochs for index in range(SHARDS[uid[1]]) if index not in skip]

    def late(self, peer):
        """What may be given to `peer` as well: leased long ago by one lease of another peer, and neither pending nor counted."""
        late = set()
        for lease in self.book._leases.values():
            for uid, mask in lease.shard_epochs.items():
                item = self.book.shard_epochs._shard_epochs[uid]
                if lease.peer != peer and lease.since + COPY_SECONDS <= self.now and len(item.holders) == 1:
                    late |= {sample_key(*uid, index) for index in range(item.samples) if (mask & item.leased) >> index & 1}
        return late

    @rule()
    def pause_or_resume(self):
        self.state = "running" if self.state == "paused" else "paused"

    @rule(data=st.data(), number=st.integers(1, 4), share=st.floats(0.2, 1))
    def contribute(self, data, number, share):
        if not self.leases:
            return
        peer, _, keys = data.draw(st.sampled_from(self.leases))
        part = keys[: max(1, int(len(keys) * share))]
        try:
            self.book.contribute(peer, number, part)
        except Refused:
            return
        self.offered.append((peer, number, len(part)))

    @rule(data=st.data(), peer=PEERS, number=st.integers(5, 9), ahead=st.integers(0, 2))
    def offer_without_a_server(self, data, peer, number, ahead):
        """Samples of anybody's, and of shard epochs that nobody had: nobody loses by it what it holds."""
        epoch = max(0, self.book.shard_epochs.last_epoch + ahead - 1)
        keys = {sample_key(epoch, shard, index) for shard in range(2) for index in range(SHARDS[shard])}
        keys |= set(data.draw(st.sampled_from(self.leases))[2]) if self.leases else set()
        held = {p: self.held_by(p) for p in {lease[0] for lease in self.leases} - {peer}}
        known = self.book._contributions.get((peer, number))
        try:
            contribution = self.book.contribute(peer, number, sorted(keys), offered=True)
        except Refused:
            return
        assert known is contribution or (not known and contribution.samples + contribution.repeated == len(keys))
        assert held == {p: self.held_by(p) for p in held}
        self.offered.append((peer, number, len(keys)))

    def held_by(self, peer):
        return {item.uid: item.held_by(peer) for item in self.book.shard_epochs.known() if item.held_by(peer)}

    @rule(data=st.data())
    def report(self, data):
        """A new state on any known state, or after one whose report was lost."""
        parent = data.draw(st.sampled_from([None, "lost", *self.states]))
        offered = sorted({(peer, number): count for peer, number, count in self.offered}.items())
        choice = data.draw(st.lists(st.sampled_from(offered), min_size=1, max_size=3)) if offered else []
        members = tuple({peer: (peer, number, count) for (peer, number), count in choice}.values()) or (("dora", 1, 4),)
        base = parent if isinstance(parent, State) else None
        depth, samples = (base.round, base.samples) if base else (0, 0) if parent is None else (4, 90)
        own = sum(count for _, _, count in members)
        name = f"{len(self.states):064x}"
        state = State(name, base.digest if base else ("f" * 64 if parent else "e" * 64), depth + 1, samples + own, members)
        try:
            self.book.add_final(state, "alice")
        except Refused:
            return
        self.states.append(state)

    @rule(data=st.data(), whole=st.booleans())
    def release(self, data, whole):
        if self.leases:
            peer, lease_id, keys = data.draw(st.sampled_from(self.leases))
            self.book.release(lease_id, peer, None if whole else keys[::2])

    @rule(data=st.data())
    def renew(self, data):
        if self.leases:
            peer, lease_id, _ = data.draw(st.sampled_from(self.leases))
            try:
                self.book.renew(lease_id, peer)
            except Refused as refused:
                assert refused.status == 410

    @rule(seconds=st.sampled_from([1, 30, 61, 200, 1e6]))
    def wait(self, seconds):
        self.now += seconds
        self.book.sweep()

    @rule(seconds=st.sampled_from([0, -1e4, 1e4]))
    def restart(self, seconds):
        """On a machine whose clock began anew, perhaps."""
        self.now += seconds
        self.book.save()
        self.book = self.open()

    def claimed(self):
        return self.keys_in(lambda item: item.leased | item.pending | item.counted)

    def counted(self):
        return self.keys_in(lambda item: item.counted)

    @staticmethod
    def claims(book):
        """What is claimed of each known shard epoch; to take another in hand would have it summed up again."""
        return {item.uid: found for item in book.shard_epochs.known() if any(found := (item.leased, item.pending, item.counted))}

    def keys_in(self, mask):
        return {
            sample_key(*item.uid, index) for item in self.book.shard_epochs.known() for index in range(item.samples) if mask(item) >> index & 1
        }

    @invariant()
    def count_the_step(self):
        LedgerMachine.steps += 1

    @invariant()
    def every_sample_is_in_exactly_one_state(self):
        for item in self.book.shard_epochs.known():
            masks = (item.available, item.leased, item.pending, item.counted)
            assert sum(mask.bit_count() for mask in masks) == item.samples
        assert sum(self.book.shard_epochs.totals().values()) % sum(SHARDS) == 0

    @invariant()
    def counted_is_what_the_heads_chain_holds(self):
        included = {pair for state in self.book.tree.chain() for pair in state.contributions()}
        expected = set()
        for pair in included & set(self.book._contributions):
            for uid, mask in self.book._contributions[pair].shard_epochs.items():
                expected |= {(uid, index) for index in range(SHARDS[uid[1]]) if mask >> index & 1}
        assert self.book.shard_epochs.totals()["counted"] == len(expected) == sum(self.book.samples_by_peer().values())

    @invariant()
    def memory_equals_what_a_restart_would_read(self):
        self.book.save()
        again = self.open()
        ours, theirs = self.claims(self.book), self.claims(again)
        assert ours == theirs
        assert again.tree.head == self.book.tree.head
        assert {state.digest: state for state in again.tree} == {state.digest: state for state in self.book.tree}

    @invariant()
    def what_a_peer_holds_is_known(self):
        held = Counter()
        for lease in self.book._leases.values():
            held[lease.peer] += sum(mask.bit_count() for mask in lease.shard_epochs.values())
        waiting = Counter()
        for peer, number in self.book._pending:
            waiting[peer] += self.book._contributions[peer, number].samples
        holdings = self.book._holdings
        assert (+holdings.leased, +holdings.pending) == (+held, +waiting)
        assert holdings.leases == Counter(lease.peer for lease in self.book._leases.values())

    @invariant()
    def what_the_ledger_counts_is_what_was_registered(self):
        """Of each contribution once, of the head's chain, worked out anew."""
        said = {}
        for state in self.book.tree.chain():
            for peer, number, samples in state.members:
                said.setdefault((peer, number), samples)
        known = self.book._contributions
        own = sum(min(samples, known[pair].samples + known[pair].repeated) for pair, samples in said.items() if pair in known)
        assert self.book.counted_samples == own
        tree = self.book.tree
        assert all(self.book.counted_samples >= state.counted for state in tree if tree._is_live(state))
        assert tree.head is tree._best()

    @invariant()
    def sums_that_are_kept_are_those_worked_out_anew(self):
        shard_epochs = self.book.shard_epochs
        known = {kind: sum(getattr(item, kind).bit_count() for item in shard_epochs.known()) for kind in ("leased", "pending", "counted")}
        epochs = (shard_epochs.last_epoch + 1) * sum(SHARDS)
        assert shard_epochs.totals() == {"available": epochs - sum(known.values()), **known}
        counted = Counter()
        for item in shard_epochs.known():
            counted[item.uid[0]] += item.counted.bit_count()
        lowest = next(epoch for epoch in itertools.count() if counted[epoch] != sum(SHARDS))
        assert shard_epochs.epoch_progress() == (lowest, counted[lowest])

    @invariant()
    def nothing_available_is_out_of_reach(self):
        for item in self.book.shard_epochs.known():
            if item.available and item.place < self.book.shard_epochs.frontier:
                assert item.place in self.book.shard_epochs.freed


def test_ledger_keeps_every_sample_in_exactly_one_state():
    deep = settings.get_current_profile_name() == "deep"
    run_state_machine_as_test(LedgerMachine, settings=settings(max_examples=600 if deep else 60, stateful_step_count=40, deadline=None))
    print(f"{LedgerMachine.steps} steps")
    assert LedgerMachine.steps > (10_000 if deep else 500)
