"""The ledger's rules, with a clock passed in and SQLite in memory."""

import sqlite3
from dataclasses import replace

import pytest

from datasetserver.book import Book
from datasetserver.holdings import Allowance
from datasetserver.owners import Sender
from datasetserver.refused import Refused
from datasetserver.store import SCHEMA
from datasetserver.tree import State
from swarm.protocol import NO_LEASE, sample_key
from tests.clock import Clock

BASE = "0" * 64
SHARDS = (4, 4, 3)


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def db():
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(SCHEMA)
    yield connection
    connection.close()


@pytest.fixture
def book(db, clock):
    return open_book(db, clock)


def open_book(db, clock, total=0, **options):
    """A book of what was saved last."""
    return Book(db, shards=SHARDS, seed=7, total_samples=total, lease_seconds=60, grace_seconds=60, clock=clock, **options)


def reopen(book, db, clock):
    book.save()
    return open_book(db, clock)


def keys(grant):
    return [sample_key(epoch, shard, index) for (epoch, shard), skip in grant.shard_epochs for index in range(SHARDS[shard]) if index not in skip]


def state(name, parent, round_, samples, *members):
    return State(digest(name), digest(parent) if parent else BASE, round_, samples, tuple(members))


def digest(name):
    return name.encode().hex().rjust(64, "0")


def refusal(code):
    return pytest.raises(Refused, check=lambda refused: refused.code == code)


def test_an_epoch_holds_every_sample_once_and_the_next_begins_without_a_barrier(book):
    granted = keys(book.lease("alice", 11)) + keys(book.lease("bob", 11))
    assert sorted(granted) == sorted(sample_key(e, s, i) for e in (0, 1) for s, n in enumerate(SHARDS) for i in range(n))


def test_order_of_shards_depends_on_the_epoch_and_not_on_who_asks(db, clock, book):
    together = [uid for uid, _ in book.lease("alice", 44).shard_epochs]
    other = sqlite3.connect(":memory:", isolation_level=None)
    other.executescript(SCHEMA)
    one_by_one = [book.lease(f"peer{n}", 1).shard_epochs[0][0] for book in [open_book(other, clock)] for n in range(len(together))]
    other.close()
    assert one_by_one == together
    assert len({tuple(shard for epoch, shard in together if epoch == e) for e in range(4)}) > 1


def test_expired_lease_is_granted_to_the_next_peer(book, clock):
    first = keys(book.lease("alice", 4))
    clock.now += 61
    assert keys(book.lease("bob", 4)) == first


def test_renewed_lease_stays_with_its_peer_and_an_expired_one_cannot_be_renewed(book, clock):
    grant = book.lease("alice", 4)
    for _ in range(3):
        clock.now += 40
        book.renew(grant.lease_id, "alice")
    assert not set(keys(book.lease("bob", 11))) & set(keys(grant))
    clock.now += 61
    with refusal("lease_lost"):
        book.renew(grant.lease_id, "alice")


def test_a_peer_that_holds_too_much_gets_nothing_until_it_registers_or_releases_some(db, clock):
    book = open_book(db, clock, allowance=Allowance(7, 7))
    first, second = book.lease("alice", 1), book.lease("alice", 1)
    with refusal("too_many_leased"):
        book.lease("alice", 1)
    assert book.lease("bob", 1)
    book.contribute("alice", 1, keys(first)[:2])
    third = book.lease("alice", 1)
    with refusal("too_many_leased"):
        book.lease("alice", 1)
    book.save()
    book = open_book(db, clock, allowance=Allowance(7, 7))
    with refusal("too_many_leased"):
        book.lease("alice", 1)
    book.release(second.lease_id, "alice", None)
    book.release(third.lease_id, "alice", None)
    assert book.lease("alice", 1)
    clock.now += 61
    assert book.lease("alice", 100), "none of the others is held any more"


def test_a_lease_is_its_peers_own(book):
    grant = book.lease("alice", 4)
    with refusal("lease_lost"):
        book.renew(grant.lease_id, "mallory")
    assert book.release(grant.lease_id, "mallory", None) == 0
    assert book.release(grant.lease_id, "mallory", keys(grant)) == 0


def test_freed_samples_of_the_lowest_epoch_go_first(book):
    first, _ = book.lease("alice", 1), book.lease("bob", 22)
    book.release(first.lease_id, "alice", None)
    assert keys(book.lease("carol", 1)) == keys(first)


def test_a_released_unit_leaves_out_what_a_contribution_holds(book):
    grant = book.lease("alice", 1)
    mine = keys(grant)
    book.contribute("alice", 1, mine[:2])
    book.release(grant.lease_id, "alice", None)
    assert keys(book.lease("bob", 1)) == mine[2:]


def test_registering_again_is_fine_with_the_same_keys_only(book):
    mine = keys(book.lease("alice", 4))
    book.contribute("alice", 1, mine[:2])
    book.contribute("alice", 1, mine[:2][::-1])
    with refusal("number_taken"):
        book.contribute("alice", 1, mine)
    assert book.shard_epochs.totals()["pending"] == 2


def test_samples_of_others_and_counted_samples_cannot_be_registered(book):
    hers = keys(book.lease("alice", 4))
    with refusal("not_held"):
        book.contribute("bob", 1, hers)
    book.contribute("alice", 1, hers)
    book.add_final(state("a", None, 1, len(hers), ("alice", 1, len(hers))), "alice")
    with refusal("not_held"):
        book.contribute("alice", 2, hers[:1])
    with refusal("no_such_sample"):
        book.contribute("alice", 2, ["0:3:0"])
    with refusal("key_twice"):
        book.contribute("alice", 2, ["0:0:0", "0:0:0"])


def test_one_report_counts_the_samples_of_all_members_also_of_the_dead(book, clock):
    hers, his = keys(book.lease("alice", 4)), keys(book.lease("bob", 4))
    book.contribute("alice", 1, hers)
    book.contribute("bob", 5, his)
    book.add_final(state("a", None, 1, len(hers) + len(his), ("alice", 1, len(hers)), ("bob", 5, len(his))), "alice")
    clock.now += 1000
    assert book.samples_by_peer() == {"alice": len(hers), "bob": len(his)}
    assert not set(keys(book.lease("carol", 3))) & {*hers, *his}


def test_a_contribution_registered_after_its_round_was_reported_is_counted(book):
    mine = keys(book.lease("alice", 4))
    book.add_final(state("a", None, 1, len(mine), ("alice", 1, len(mine))), "bob")
    assert book.shard_epochs.totals()["counted"] == 0
    assert book.contribute("alice", 1, mine).counted
    assert book.shard_epochs.totals()["counted"] == len(mine)


def test_an_epochs_last_shards_go_to_a_second_peer_when_their_holder_is_late(db, clock):
    book = open_book(db, clock, copy_seconds=600)
    slow = book.lease("alice", 1)
    others = len(keys(book.lease("bob", 1)) + keys(book.lease("bob", 1)))
    assert not set(keys(book.lease("carol", 1))) & set(keys(slow)), "a copy already"
    for _ in range(20):
        clock.now += 50
        book.renew(slow.lease_id, "alice")
    assert not set(keys(book.lease("carol", others + 1))) & set(keys(slow)), "what others gave up goes first"
    assert not set(keys(book.lease("alice", 1))) & set(keys(slow)), "a copy of its own"
    assert keys(book.lease("dora", 1)) == keys(slow)
    assert not set(keys(book.lease("emil", 1))) & set(keys(slow)), "a third copy"
    assert book.shard_epochs.totals()["counted"] == 0


@pytest.mark.parametrize("first", ["alice", "carol"])
def test_of_two_that_have_the_same_shard_the_first_to_register_has_it_and_nothing_counts_twice(db, clock, first):
    book = open_book(db, clock, copy_seconds=50)
    slow = book.lease("alice", 1)
    book.lease("bob", 10)
    clock.now += 55
    both = keys(slow)
    mine = keys(book.lease("carol", 1))
    assert mine == both
    second = "carol" if first == "alice" else "alice"
    assert book.contribute(first, 1, both[:2]).samples == 2
    late = book.contribute(second, 1, both)
    assert (late.samples, late.repeated) == (len(both) - 2, 2)
    book = reopen(book, db, clock)
    book.add_final(state("a", None, 1, len(both) + 2, (first, 1, 2), (second, 1, len(both))), first)
    assert book.samples_by_peer() == {first: 2, second: len(both) - 2}
    assert book.shard_epochs.totals()["counted"] == len(both)


def test_a_copy_stays_with_who_is_left(db, clock):
    book = open_book(db, clock, copy_seconds=50)
    slow = book.lease("alice", 1)
    book.lease("bob", 10)
    clock.now += 55
    copy = book.lease("carol", 1)
    assert book.release(slow.lease_id, "alice", None) == 0, "carol has it still"
    assert not set(keys(book.lease("dora", 1))) & set(keys(slow))
    assert book.release(copy.lease_id, "carol", None) == len(keys(slow))
    assert keys(book.lease("dora", 1)) == keys(slow)


def test_a_paused_run_leases_nothing_and_takes_what_was_trained(db, clock):
    orders = ["running"]
    book = open_book(db, clock, order=lambda: orders[0])
    grant = book.lease("alice", 4)
    mine = keys(grant)
    orders[0] = "paused"
    with refusal("run_paused") as paused:
        book.lease("alice", 1)
    assert paused.value.status == 503
    for _ in range(10):
        clock.now += 50
        book.renew(grant.lease_id, "alice")
    book.contribute("alice", 1, mine)
    book.add_final(state("a", None, 1, len(mine), ("alice", 1, len(mine))), "alice")
    assert (book.state, book.shard_epochs.totals()["counted"]) == ("paused", len(mine))
    orders[0] = "running"
    assert not set(keys(book.lease("bob", 1))) & set(mine)
    orders[0] = "ended"
    with refusal("run_finished") as ended:
        book.lease("bob", 1)
    assert ended.value.status == 410


def test_what_was_offered_while_the_server_was_away_counts_where_nobody_else_has_it(db, clock, book):
    hers, his = keys(book.lease("alice", 4)), keys(book.lease("bob", 4))
    book.contribute("bob", 1, his[:1])
    book = reopen(book, db, clock)
    repeated = [sample_key(*(int(part) for part in key.split(":")[:2]), 0) for key in (hers[0], his[1])]
    offered = sorted({*hers, *his[:2], *repeated, "1:0:0", "1:1:1"})
    with refusal("not_held"):
        book.contribute("alice", 1, offered)
    for _ in range(2):
        contribution = book.contribute("alice", 1, offered, offered=True)
        assert contribution.samples == len(hers) + 2, "hers, and the two of the next epoch"
        assert contribution.samples + contribution.repeated == len(offered)
    again = reopen(book, db, clock)
    assert again.contribute("alice", 1, offered, offered=True).repeated == contribution.repeated
    with refusal("number_taken"):
        again.contribute("alice", 1, offered[1:], offered=True)
    again.add_final(state("a", None, 1, len(offered), ("alice", 1, len(offered))), "alice")
    assert again.shard_epochs.totals()["counted"] == len(hers) + 2
    assert again.counted_samples == again.shard_epochs.totals()["counted"] + again.repeated_samples == len(offered), "the sum is seen to agree"
    assert again.repeated_samples == contribution.repeated > 0
    rest = keys(again.lease("carol", 11))
    assert not {"1:0:0", "1:1:1", *hers, *his} & set(rest)


def test_of_two_peers_that_trained_the_same_without_a_lease_the_first_to_register_has_it(book):
    book.lease("carol", 1)
    for peer, kept in (("alice", 4), ("bob", 0)):
        contribution = book.contribute(peer, 1, [f"1:0:{index}" for index in range(4)], offered=True)
        assert (contribution.samples, contribution.repeated) == (kept, 4 - kept)
    book.add_final(state("a", None, 1, 8, ("alice", 1, 4), ("bob", 1, 4)), "bob")
    assert book.samples_by_peer() == {"alice": 4} and book.repeated_samples == 4


def test_nobody_takes_samples_of_epochs_to_come_by_having_trained_them(book):
    book.lease("carol", 1)
    assert book.contribute("alice", 1, ["2:0:0"], offered=True).repeated == 1
    for _ in "as often as it is said":
        one = book.contribute("alice", 2, ["1:0:0", "999999999:0:0"], offered=True)
        assert (one.samples, one.repeated) == (1, 1)
    assert book.shard_epochs.last_epoch == 1


def test_pending_contributions_of_a_gone_peer_are_leasable_after_the_grace(book, clock):
    mine = keys(book.lease("alice", 4))
    book.contribute("alice", 1, mine)
    clock.now += 119
    book.sweep()
    assert book.shard_epochs.totals()["pending"] == len(mine)
    clock.now += 2
    book.sweep()
    assert book.shard_epochs.totals()["pending"] == 0
    assert keys(book.lease("bob", 1)) == mine
    with refusal("withdrawn"):
        book.contribute("alice", 1, mine)


def test_a_withdrawn_contribution_that_is_final_after_all_counts_once(book, clock):
    mine = keys(book.lease("alice", 4))
    book.contribute("alice", 1, mine)
    clock.now += 121
    assert keys(book.lease("bob", 1)) == mine
    book.add_final(state("a", None, 1, len(mine), ("alice", 1, len(mine))), "carol")
    with refusal("not_held"):
        book.contribute("bob", 1, mine)
    assert book.shard_epochs.totals() == {"available": 11 - len(mine), "leased": 0, "pending": 0, "counted": len(mine)}


def test_a_contribution_that_a_later_one_of_its_peer_has_passed_is_given_to_others_though_the_peer_lives(book):
    """Seen in the code: a peer that was killed and came back kept what its dead process had registered from everybody, for as long as it lived."""
    lost, other = keys(book.lease("alice", 4)), keys(book.lease("bob", 4))
    book.contribute("alice", 1, lost)  # and was killed
    book.contribute("bob", 1, other)
    book.add_final(state("a", None, 1, len(other), ("bob", 1, len(other))), "bob")
    assert book.shard_epochs.totals()["pending"] == len(lost)
    again = keys(book.lease("alice", 3))
    book.contribute("alice", 2, again)
    book.add_final(state("b", "a", 2, len(other) + len(again), ("alice", 2, len(again))), "bob")
    assert book.shard_epochs.totals()["pending"] == 0
    assert keys(book.lease("bob", 1)) == lost
    with refusal("withdrawn"):
        book.contribute("alice", 1, lost)


def test_what_may_be_in_a_state_whose_report_was_lost_is_not_given_to_others(book, db, clock):
    """After an outage of many rounds: their contributions are told of, but only the last rounds."""
    mine = [keys(book.lease("alice", 1)) for _ in range(5)]
    for number, some in enumerate(mine, 1):
        book.contribute("alice", number, some, offered=True)
    samples = [sum(map(len, mine[: n + 1])) for n in range(5)]
    for again in range(2):
        book.add_final(state("c", "b", 3, samples[2], ("alice", 3, len(mine[2]))), "bob")
        book.add_final(state("d", "c", 4, samples[3] + 4, ("alice", 4, len(mine[3])), ("bob", 1, 4)), "bob")
        book.add_final(state("e", "d", 5, samples[4] + 4, ("alice", 5, len(mine[4]))), "bob")
        assert book.shard_epochs.totals()["pending"] == len(mine[0]) + len(mine[1]), again
        book = reopen(book, db, clock)
    book.add_final(state("b", "a", 2, samples[1], ("alice", 2, len(mine[1]))), "alice")
    book.add_final(state("a", None, 1, samples[0], ("alice", 1, len(mine[0]))), "alice")
    assert book.shard_epochs.totals()["pending"] == 0 and book.samples_by_peer()["alice"] == samples[4]


@pytest.mark.parametrize("restarts", [False, True])
def test_what_is_registered_late_from_before_a_lost_report_gives_to_nobody_what_that_state_may_have(book, db, clock, restarts):
    mine = [keys(book.lease("alice", 1)) for _ in range(3)]
    his = keys(book.lease("bob", 1))
    book.contribute("bob", 1, his)
    one, two, three = map(len, mine)
    before = one + two + len(his)
    book.add_final(state("a", None, 1, one, ("alice", 1, one)), "bob")
    book.add_final(state("c", "b", 3, before, ("bob", 1, len(his))), "bob")
    for number, some in enumerate(mine, 1):
        book.contribute("alice", number, some)
    book = reopen(book, db, clock) if restarts else book
    book.add_final(state("d", "c", 4, before + three, ("alice", 3, three)), "bob")
    for each in (book, reopen(book, db, clock)):
        assert each.samples_by_peer() == {"alice": one + three, "bob": len(his)}
        assert each.shard_epochs.totals()["pending"] == two, "her second may be in b, which nobody told of"


@pytest.mark.parametrize("restarts", [False, True])
def test_after_a_lost_report_what_is_registered_late_still_tells_what_a_later_contribution_has_passed(book, db, clock, restarts):
    mine = [keys(book.lease("alice", 1)) for _ in range(3)]
    one, _, three = map(len, mine)
    book.add_final(state("b", "a", 2, 4 + one, ("alice", 1, one)), "bob")
    for number, some in enumerate(mine, 1):
        book.contribute("alice", number, some)
    book = reopen(book, db, clock) if restarts else book
    book.add_final(state("c", "b", 3, 4 + one + three, ("alice", 3, three)), "bob")
    for each in (book, reopen(book, db, clock)):
        assert each.samples_by_peer() == {"alice": one + three} and each.shard_epochs.totals()["pending"] == 0


def test_giving_back_keys_withdraws_their_contribution(book):
    grant = book.lease("alice", 4)
    mine = keys(grant)
    book.contribute("alice", 1, mine)
    assert book.release(grant.lease_id, "alice", mine) == 0, "the lease does not hold them any more"
    assert book.release(NO_LEASE, "alice", mine) == len(mine)
    assert book.release(NO_LEASE, "alice", mine) == 0
    assert keys(book.lease("bob", 1)) == mine


def test_keys_given_back_by_the_name_of_an_earlier_lease_are_left_to_the_later_one(book):
    first = book.lease("alice", 4)
    book.release(first.lease_id, "alice", None)
    again = book.lease("alice", 4)
    assert keys(again) == keys(first)
    assert book.release(first.lease_id, "alice", keys(first)) == 0
    assert book.contribute("alice", 1, keys(again)).samples == len(keys(again))


def test_the_head_is_the_state_with_more_samples_then_the_smaller_digest(book):
    assert book.add_final(state("b", None, 1, 5, ("alice", 1, 5)), "alice").digest == digest("b")
    assert book.add_final(state("c", None, 1, 5, ("bob", 1, 5)), "bob").digest == digest("b")
    assert book.add_final(state("a", None, 1, 5, ("carol", 1, 5)), "carol").digest == digest("a")
    assert book.add_final(state("d", "c", 2, 6, ("bob", 2, 1)), "bob").digest == digest("d")


def test_of_two_means_of_one_group_the_head_is_the_one_that_more_owners_stand_on_then_more_peers(book, db, clock):
    """A reducer that lies in the last round has told two: no round after it decides which one the run has."""
    mallory, bob = Sender("mallory", ("mallory", "bob")), Sender("bob", ("mallory", "bob"))
    for peer in ("m1", "m2", "m3"):
        book.admit(peer, mallory)
    book.admit("bob", bob)
    members = ("alice", 1, 5), ("bob", 1, 5)
    assert book.add_final(state("a", None, 1, 10, *members), "m1").digest == digest("a")
    assert book.add_final(state("b", None, 1, 10, *members), "m2").digest == digest("a")
    assert book.add_final(state("b", None, 1, 10, *members), "m3").digest == digest("b")  # two peers, one owner
    assert book.add_final(state("a", None, 1, 10, *members), "m3").digest == digest("a")
    assert book.add_final(state("b", None, 1, 10, *members), "bob").digest == digest("b")
    assert book.add_final(state("a", None, 1, 10, *members), "m2").digest == digest("b")  # three peers, and still one owner
    assert reopen(book, db, clock).tree.head.digest == digest("b")


def test_a_branch_that_all_who_reported_it_have_left_is_not_the_head_however_much_it_counts(book, db, clock):
    """Seed 17000455: at a run's end the server gave out a state of one sample more, on which nobody stood."""
    hers, his = keys(book.lease("alice", 4)), keys(book.lease("bob", 3))
    book.contribute("alice", 1, hers)
    book.contribute("bob", 1, his)
    more, less = (digest(name) for name in ("more", "less"))
    assert book.add_final(state("more", None, 1, 4, ("alice", 1, 4)), "alice").digest == more
    assert book.add_final(state("less", None, 1, 3, ("bob", 1, 3)), "bob").digest == more
    assert book.add_final(state("less", None, 1, 3, ("bob", 1, 3)), "alice").digest == less, "she has moved"
    assert reopen(book, db, clock).tree.head.digest == less
    assert book.add_final(state("more", None, 1, 4, ("alice", 1, 4)), "alice").digest == more, "and back"
    assert reopen(book, db, clock).tree.head.digest == more
    assert book.add_final(state("on", "less", 2, 3, ("carol", 1, 0)), "alice").digest == less
    assert book.samples_by_peer() == {"bob": 3} and reopen(book, db, clock).tree.head.digest == less
    book.add_final(state("more", None, 1, 4, ("alice", 1, 4)), "dan")
    assert book.tree.head.digest == more, "somebody stands there"


def test_a_peer_has_left_its_branch_also_when_the_state_that_it_tells_of_has_enough_reporters(book, db, clock):
    hers, his = keys(book.lease("alice", 4)), keys(book.lease("bob", 3))
    book.contribute("alice", 1, hers)
    book.contribute("bob", 1, his)
    more = book.add_final(state("more", None, 1, 4, ("alice", 1, 4)), "alice")
    one, two = state("one", None, 1, 3, ("bob", 1, 3)), state("two", "one", 2, 3, ("carol", 1, 0))
    book.add_final(one, "bob")
    for number in range(100):
        assert book.add_final(replace(two, reporters=[]), f"peer{number}") is more, "alice stands there"
    crowd = book.tree.get(two.digest)
    assert book.add_final(replace(two, reporters=[]), "alice").digest == one.digest
    assert len(crowd.reporters) == 64, "what is written anew with each report stays short"
    assert crowd.standing == {*crowd.reporters, "alice"}, "36 others are listed nowhere, so they need not have left any state"
    again = reopen(book, db, clock)
    assert again.tree.head.digest == one.digest and again.tree.get(two.digest) == crowd
    assert again.add_final(replace(two, reporters=[]), "alice").digest == one.digest
    again.add_final(state("three", "two", 3, 3, ("carol", 2, 0)), "alice")
    for number in range(70):
        again.add_final(state("three", "two", 3, 3, ("carol", 2, 0)), f"peer{number}")
    assert again.tree.get(digest("three")).standing == {"alice", *(f"peer{number}" for number in range(64))} and not again.tree.get(two.digest).standing
    again.discard([digest("three")])
    assert again.tree.get(two.digest).standing == set(crowd.reporters), "of those that it does not list nobody knows"
    assert reopen(again, db, clock).tree.get(two.digest) == again.tree.get(two.digest)
    assert again.tree.get(one.digest).standing == {"bob"} and not again.tree.stands_somewhere("peer99")


def test_where_a_peer_stands_is_what_it_told_last_also_if_that_is_of_an_earlier_round(book, db, clock):
    """Seeds 64000234 and 64000385: two had told of the run's last state and followed six others, to another last state of as many rounds."""
    hers, his = keys(book.lease("alice", 4)), keys(book.lease("bob", 3))
    book.contribute("alice", 1, hers)
    book.contribute("bob", 1, his)
    for name, parent, number in (("a1", None, 1), ("a2", "a1", 2), ("a3", "a2", 3)):
        book.add_final(state(name, parent, number, 4, ("alice", number, 4 if number == 1 else 0)), "alice")
    assert book.tree.head.digest == digest("a1")
    b1, b2 = state("b1", None, 1, 3, ("bob", 1, 3)), state("b2", "b1", 2, 3, ("bob", 2, 0))
    for told in (b1, b2):
        book.add_final(told, "bob")
    assert book.tree.head.digest == digest("a1")
    book.add_final(state("a1", None, 1, 4, ("alice", 1, 4)), "alice")
    assert book.tree.head.digest == digest("a1"), "it tells late of what came before"
    book.add_final(b2, "alice")
    assert book.tree.get(b2.digest).standing == {"alice", "bob"}
    assert book.tree.head.digest == b1.digest and reopen(book, db, clock).tree.head.digest == b1.digest


def test_of_a_round_whose_place_in_the_line_is_unknown_nobody_is_taken_to_stand_there(book):
    hers = keys(book.lease("alice", 4))
    book.contribute("alice", 1, hers)
    book.add_final(state("a9", "a8", 9, 4, ("alice", 9, 0)), "alice")
    book.add_final(state("a3", "a2", 3, 4, ("alice", 3, 0)), "alice")
    assert book.tree.get(digest("a9")).standing == {"alice"}


def test_samples_of_a_branch_that_lost_are_leasable_and_come_back_with_it(book):
    hers, his = keys(book.lease("alice", 4)), keys(book.lease("bob", 3))
    lease = book.lease("alice", 1)
    book.contribute("alice", 1, hers[:1])
    book.contribute("bob", 1, his)
    book.add_final(state("x", None, 1, 1, ("alice", 1, 1)), "alice")
    book.add_final(state("y", None, 1, len(his), ("bob", 1, len(his))), "bob")
    assert book.samples_by_peer() == {"bob": len(his)}
    book.contribute("alice", 2, hers[1:])
    book.contribute("alice", 3, keys(lease))
    more = len(hers) - 1 + len(keys(lease))
    book.add_final(state("z", "x", 2, len(hers), ("alice", 2, len(hers) - 1)), "dora")
    book.add_final(state("w", "z", 3, 1 + more, ("alice", 3, len(keys(lease)))), "dora")
    assert book.samples_by_peer() == {"alice": 1 + more}
    assert book.shard_epochs.totals()["counted"] == 1 + more
    assert keys(book.lease("carol", 1)) == his


def test_a_lost_report_does_not_make_the_work_before_it_leasable(book):
    mine, more = keys(book.lease("alice", 4)), keys(book.lease("alice", 3))
    book.contribute("alice", 1, mine)
    book.contribute("alice", 3, more)
    book.add_final(state("a", None, 1, 10, ("alice", 1, 10)), "alice")
    book.add_final(state("c", "b", 3, 30, ("alice", 3, 10)), "alice")
    assert book.shard_epochs.totals()["counted"] == len(mine) + len(more)
    book.add_final(state("b", "a", 2, 20, ("alice", 2, 10)), "bob")
    assert book.shard_epochs.totals()["counted"] == len(mine) + len(more)


@pytest.mark.parametrize(
    "wrong",
    [
        state("b", "b", 2, 20, ("alice", 2, 10)),
        state("b", "a", 2, 20, ("alice", 2, 5), ("alice", 3, 5)),
        state("b", None, 1, 20, ("alice", 2, 10)),
        state("a", None, 1, 10, ("bob", 1, 10)),
    ],
)
def test_a_state_that_contradicts_what_is_known_is_refused(book, wrong):
    book.add_final(state("a", None, 1, 10, ("alice", 1, 10)), "alice")
    with refusal("contradiction"):
        book.add_final(wrong, "mallory")
    assert book.tree.head.digest == digest("a")


@pytest.mark.parametrize("figures", [(3, 20), (2, 21)])
def test_a_state_that_does_not_follow_from_its_parent_is_none_of_its_children(book, figures):
    """Either may be the lie. In a circle of lies nothing hangs."""
    book.add_final(state("a", None, 1, 10, ("alice", 1, 10)), "alice")
    book.add_final(state("b", "a", *figures, ("alice", 2, 10)), "mallory")
    book.add_final(state("x", "y", 5, 30, ("alice", 2, 10)), "mallory")
    book.add_final(state("y", "x", 5, 30, ("alice", 2, 10)), "mallory")
    assert book.tree.head.digest == digest("a") and book.tree.get(digest("b")).gaps == 1
    assert {one.digest for one in book.tree.following(digest("x"))} == {digest("x"), digest("y")}
    assert book.add_final(state("c", "a", 2, 12, ("alice", 2, 2)), "alice").digest == digest("c")


def test_who_is_the_first_to_report_a_state_cannot_say_that_it_holds_nothing_of_the_others(db, clock, book):
    """A liar reads a new digest in the DHT, and the honest report a state only once it is final."""
    before = final(book, 1, None, 1, 0)
    mine, more = keys(book.lease("alice", 4)), keys(book.lease("bob", 4))
    book.contribute("alice", 2, mine)
    book.contribute("bob", 1, more)
    samples = before + len(mine) + len(more)
    true = state("two", "alice1", 2, samples, ("alice", 2, len(mine)), ("bob", 1, len(more)))
    lies = [
        state("two", "alice1", 2, before + 2, ("mallory", 1, 2)),
        state("two", "alice1", 2, samples, ("mallory", 1, samples - before)),
        state("two", "nowhere", 2, samples, ("alice", 2, len(mine)), ("bob", 1, len(more))),
        state("two", "alice1", 7, samples, ("alice", 2, len(mine)), ("bob", 1, len(more))),
    ]
    book.save()
    for lie in lies:
        book = open_book(db, clock)
        book.add_final(replace(lie, reporters=[]), "mallory")
        book.add_final(state("three", "two", 9, samples + 1, ("mallory", 2, 1)), "mallory")
        assert book.add_final(replace(true, reporters=[]), "alice").digest == true.digest
        assert book.counted_samples == samples and book.samples_by_peer() == {"alice": before + len(mine), "bob": len(more)}
        with refusal("contradiction"):
            book.add_final(replace(lie, reporters=[]), "mallory")
        assert book.add_final(state("child", "two", 3, samples + 1, ("alice", 3, 1)), "alice").equals(true)
        assert book.tree.get(digest("child")).gaps == 0


def of_three_owners(db, clock, **options):
    """alice, bob and mallory, who has a second peer."""
    book, tokens = open_book(db, clock, **options), {"a", "b", "m"}
    for peer, token in (("alice", "a"), ("bob", "b"), ("mallory", "m"), ("mallory2", "m")):
        book.admit(peer, Sender(token, tokens))
    return book


def a_round_and_a_lie(book):
    """Two honest contributions, the true story of the first round, and another that counts two samples more, by a round that mallory made up."""
    held = {peer: keys(book.lease(peer, 1)) for peer in ("alice", "bob", "mallory", "mallory2")}
    for peer, some in held.items():
        book.contribute(peer, 1, some[:3] if peer in ("alice", "bob") else some[:1])
    true = state("one", None, 1, 6, ("alice", 1, 3), ("bob", 1, 3))
    made_up = state("made up", None, 1, 7, ("alice", 1, 3), ("bob", 1, 3), ("mallory", 1, 1))
    return true, made_up, state("one", "made up", 2, 8, ("mallory2", 1, 1))


def test_what_two_owners_tell_of_a_state_no_third_tells_otherwise(db, clock):
    """Else one member put a state of its own before the honest ones, and had all of them discarded with it."""
    book = of_three_owners(db, clock)
    true, made_up, lie = a_round_and_a_lie(book)
    for peer in ("alice", "bob"):
        book.add_final(replace(true, reporters=[]), peer)
    book.add_final(made_up, "mallory")
    with refusal("contradiction"):
        book.add_final(lie, "mallory2")
    assert book.tree.get(true.digest).equals(true)


@pytest.mark.parametrize("first", ["true", "lie"])
def test_of_two_stories_the_one_that_more_owners_tell_is_kept(db, clock, first):
    book = of_three_owners(db, clock)
    true, made_up, lie = a_round_and_a_lie(book)
    book.add_final(made_up, "mallory")
    if first == "true":
        book.add_final(replace(true, reporters=[]), "alice")
        assert book.add_final(replace(lie, reporters=[]), "mallory2").equals(lie)
    else:
        book.add_final(replace(lie, reporters=[]), "mallory2")
        with refusal("contradiction"):
            book.add_final(replace(true, reporters=[]), "alice")
    with refusal("contradiction"):
        book.add_final(replace(true, reporters=[]), "alice")
    book.add_final(replace(true, reporters=[]), "bob")
    for one in (book, reopen(book, db, clock)):
        assert one.tree.get(true.digest).equals(true) and set(one.tree.get(true.digest).reporters) == {"alice", "bob"}
    with refusal("contradiction"):
        book.add_final(replace(lie, reporters=[]), "mallory")
    for number in range(80):
        book.add_final(state(f"s{number}", "one", 2, 7, ("nobody", number, 1)), "mallory")
        with refusal("contradiction"):
            book.add_final(state(f"s{number}", "one", 2, 6, ("nobody", number, 0)), "mallory")
    assert max(map(len, book._reports._untaken.values())) == 64


def test_what_was_said_to_follow_a_discarded_state_comes_back_when_it_is_reported_as_it_is(db, clock):
    orders = []
    book = of_three_owners(db, clock, discarded=lambda: orders)
    true, made_up, lie = a_round_and_a_lie(book)
    book.add_final(made_up, "mallory")
    book.add_final(lie, "mallory2")
    for peer in ("alice", "bob"):
        with refusal("contradiction"):
            book.add_final(state("two", "one", 1, 9, ("nobody", 1, 0)), peer)
    orders.append(made_up.digest)
    book.sweep()
    assert book.tree.head is None
    with refusal("discarded"):
        reopen(book, db, clock).add_final(state("two", "one", 2, 6, ("nobody", 1, 0)), "bob")
    assert book.add_final(replace(true, reporters=[]), "alice").equals(true)
    again = reopen(book, db, clock)
    assert again.add_final(state("two", "one", 2, 6, ("nobody", 1, 0)), "bob").equals(true) and len(list(again.tree)) == 2


def test_a_state_that_was_countersigned_and_goes_with_a_discarded_one_keeps_no_other_from_it(db, clock):
    book = of_three_owners(db, clock)
    for number, parent in ((1, None), (2, "s1")):
        mine = keys(book.lease("alice", 1))
        book.contribute("alice", number, mine)
        for peer in ("alice", "bob"):
            book.add_final(state(f"s{number}", parent, number, number * 3, ("alice", number, 3)), peer)
    assert book.countersign() == digest("s2")
    book.discard([digest("s1")])
    for peer in ("alice", "bob"):
        book.add_final(state("new", None, 1, 3, ("alice", 1, 3)), peer)
    for one in (book, reopen(book, db, clock)):
        assert one.countersign() == digest("new")


def test_on_one_owners_word_nobody_loses_what_he_leased(db, clock):
    """A sample of each shard that the others hold, registered, withdrawn and put into a made-up state: all their work of a round was refused."""
    book = of_three_owners(db, clock)
    grant = book.lease("mallory", 11)
    trap = keys(grant)[:1]
    book.contribute("mallory", 1, trap)
    book.release(NO_LEASE, "mallory", trap)
    book.release(grant.lease_id, "mallory", None)
    held = keys(book.lease("alice", 11))
    assert trap[0] in held
    book.add_final(state("made up", None, 1, 1, ("mallory", 1, 1)), "mallory")
    assert book.counted_samples == 1
    ours = [key for key in held if key.rpartition(":")[0] == trap[0].rpartition(":")[0]]
    contribution = book.contribute("alice", 1, ours)
    assert (contribution.samples, contribution.repeated) == (len(ours) - 1, 1)
    for one in (book, reopen(book, db, clock)):
        one.add_final(state("one", None, 1, len(ours), ("alice", 1, len(ours))), "alice")
        assert (one.counted_samples, one.shard_epochs.totals()["counted"]) == (len(ours), len(ours) - 1)


def test_once_two_owners_tell_of_a_withdrawn_contribution_its_samples_are_nobody_elses(db, clock):
    book = of_three_owners(db, clock)
    mine = keys(book.lease("alice", 1))
    book.contribute("alice", 1, mine)
    clock.now += 121
    assert keys(book.lease("bob", 1)) == mine
    book.add_final(state("a", None, 1, len(mine), ("alice", 1, len(mine))), "alice")
    assert book.unsure
    for one in (book, reopen(book, db, clock)):
        one.add_final(state("a", None, 1, len(mine), ("alice", 1, len(mine))), "bob")
        assert not one.unsure
        with refusal("not_held"):
            one.contribute("bob", 1, mine)


def test_of_what_one_owners_peers_registered_and_gave_back_the_first_is_forgotten(db, clock, monkeypatch):
    monkeypatch.setattr("datasetserver.book._MOST_WITHDRAWN", 4)
    book = of_three_owners(db, clock)
    told = keys(book.lease("mallory2", 1))
    book.contribute("mallory2", 1, told)
    book.add_final(state("a", None, 1, 3, ("mallory2", 1, 3)), "mallory2")
    book.add_final(state("b", None, 1, 4, ("mallory2", 1, 3), ("mallory", 1, 1)), "mallory")
    for number in range(1, 41):
        mine = keys(book.lease("mallory", 1))[:1]
        book.contribute("mallory", number, mine)
        book.release(NO_LEASE, "mallory", mine)
        if number in (7, 20):
            book.save()
    for one in (book, reopen(book, db, clock)):
        numbers = sorted(number for peer, number in one._contributions if peer == "mallory")
        assert numbers[0] == 1 and len(numbers) <= 6 and numbers[-4:] == [37, 38, 39, 40], "a state has the first"
    rows = db.execute("SELECT COUNT(*) FROM contribution_unit WHERE peer = 'mallory'").fetchone()
    assert rows[0] == len(numbers)
    with refusal("withdrawn"):
        book.contribute("mallory", 40, mine)
    book.contribute("mallory", 5, keys(book.lease("mallory", 1))[:1])  # forgotten, and comes again before it is written
    assert reopen(book, db, clock)._contributions["mallory", 5].live


def test_registrations_that_send_the_run_from_branch_to_branch_are_bounded_too(db, clock, monkeypatch):
    monkeypatch.setattr("datasetserver.book._COSTLY_AT_ONCE", 6)
    book = of_three_owners(db, clock)
    before = final(book, 1, None, 1, 0)
    for name, start, reporter in (("left", 0, "mallory"), ("right", 100, "mallory2")):
        members = [(f"mallory{number}", start + 2, 1) for number in range(3, 40)]
        book.add_final(state(name, "alice1", 2, before + len(members), *members), reporter)
    for number in range(3, 40):
        book.admit(f"mallory{number}", Sender("m", {"a", "b", "m"}))
    with refusal("too_many_branches"):
        for number in range(3, 40):
            for start in (0, 100) if number % 2 else (100, 0):
                book.contribute(f"mallory{number}", start + 2, ["0:0:0"], offered=True)
    book.contribute("bob", 1, keys(book.lease("bob", 1)))


def test_whose_next_contributions_a_liar_names_pays_nothing_for_it(db, clock):
    book = of_three_owners(db, clock)
    before = final(book, 1, None, 1, 0)
    for name, reporter, first in (("left", "mallory", 2), ("right", "mallory2", 3)):
        members = [("alice", first, 4)]
        book.add_final(state(name, "alice1", 2, before + 4, *members), reporter)
    for number in (2, 3):
        book.contribute("alice", number, keys(book.lease("alice", 4)))
    assert book.tree.head.round == 2 and set(book._costly._of) <= {"token m"} | {"token a"} and book._costly._of["token a"]._left >= 62


def test_a_state_that_is_far_ahead_keeps_no_samples_from_who_trained_them(db, clock):
    book = of_three_owners(db, clock)
    mine = keys(book.lease("alice", 1))
    book.contribute("alice", 1, mine)
    clock.now += 121
    assert keys(book.lease("bob", 1)) == mine
    book.add_final(state("far", "nowhere", 2**53, 2**53, ("alice", 1, len(mine))), "mallory")
    for peer in ("alice", "bob"):
        book.add_final(state("a", None, 1, len(mine), ("alice", 1, len(mine))), peer)
    assert not book.unsure


def test_what_was_said_to_follow_a_discarded_state_is_remembered_over_a_restart(db, clock):
    book = of_three_owners(db, clock)
    book.discard([digest("bad")])
    for name, parent, round_ in (("child", "bad", 2), ("grandchild", "child", 3)):
        with refusal("discarded"):
            book.add_final(state(name, parent, round_, 9, ("nobody", round_, 1)), "alice")
    again = reopen(book, db, clock)
    with refusal("contradiction"):  # and what cannot be changes nothing of that
        again.add_final(state("grandchild", "other", 3, 0, ("nobody", 3, 1)), "mallory")
    for peer in ("alice", "bob"):
        with refusal("discarded"):
            again.add_final(state("great grandchild", "grandchild", 4, 10, ("nobody", 4, 1)), peer)


def test_an_untaken_word_counts_when_the_state_is_told_again(db, clock):
    book = of_three_owners(db, clock)
    true, made_up, lie = a_round_and_a_lie(book)
    book.add_final(made_up, "mallory")
    book.add_final(lie, "mallory2")
    with refusal("contradiction"):
        book.add_final(replace(true, reporters=[]), "alice")
    book.discard([made_up.digest])
    book.add_final(replace(true, reporters=[]), "bob")
    assert book.tree.get(true.digest).owners == 2


def test_keys_of_very_many_shard_epochs_are_bounded(db, clock, monkeypatch):
    monkeypatch.setattr("datasetserver.book._SHARD_EPOCHS", 10)
    book = of_three_owners(db, clock)
    far = [sample_key(epoch, 0, 0) for epoch in range(320)]
    assert book.release("no such lease", "mallory", far) == 0
    for _ in range(2):
        assert book.release(NO_LEASE, "mallory", far) == 0
    with refusal("too_many_branches"):
        book.release(NO_LEASE, "mallory", far)
    clock.now += 600
    with refusal("no_such_sample"):
        book.release(NO_LEASE, "mallory", [*far, *far, "0:0:99"])
    with refusal("too_many_branches"):
        book.contribute("mallory2", 1, far[:1])
    assert set(book._costly._of) == {"token m"}
    monkeypatch.setattr("datasetserver.book._SHARD_EPOCHS", 100_000)
    book.contribute("alice", 1, keys(book.lease("alice", 1)))
    assert set(book._costly._of) == {"token m"}, "in a crowd the honest would be remembered in the liar's place"


def test_a_state_whose_true_story_came_second_is_the_same_after_a_restart(db, clock, book):
    before = final(book, 1, None, 1, 0)
    mine = keys(book.lease("alice", 4))
    book.contribute("alice", 2, mine)
    book.add_final(state("two", "alice1", 2, before + 1, ("mallory", 1, 1)), "mallory")
    book.add_final(state("two", "alice1", 2, before + len(mine), ("alice", 2, len(mine))), "alice")
    again = reopen(book, db, clock)
    assert again.counted_samples == book.counted_samples == before + len(mine)
    assert again.tree.head.equals(book.tree.head) and again.tree.head.reporters == ["alice"]


def test_another_story_of_the_head_is_taken_from_one_that_has_told_of_a_later_round(book):
    """The head was still the story before, of which nobody had told: all that was asked in the same moment failed, and again for ever."""
    before = final(book, 1, None, 1, 0)
    mine = keys(book.lease("bob", 4))
    book.contribute("bob", 1, mine)
    book.add_final(state("far", "nowhere", 99, 2**30, ("mallory", 1, 1)), "mallory")
    assert book.add_final(state("two", "alice1", 2, before + 1, ("bob", 1, 1)), "bob").digest == digest("two")
    book.add_final(state("two", "alice1", 2, before + len(mine), ("bob", 1, len(mine))), "mallory")
    assert book.tree.get(digest("two")).reporters == ["mallory"]
    assert book.tree.head.digest == digest("alice1"), "mallory has left the second round"


def test_a_gap_that_was_closed_and_is_open_again_counts_the_same_after_a_restart(db, clock, book):
    """The ancestor that the ledger kept for the state with the gap was read again though there was none any more, and stood in the way."""
    before = final(book, 1, None, 1, 0)
    mine, more = keys(book.lease("bob", 4)), keys(book.lease("bob", 4))
    book.contribute("bob", 1, mine)
    book.contribute("bob", 2, more)
    book.add_final(state("three", "two", 3, before + 1 + len(more), ("bob", 2, len(more))), "bob")
    assert book.tree.get(digest("three")).bridge == digest("alice1")
    book.add_final(state("two", "alice1", 2, before + 1, ("bob", 1, 1)), "bob")
    assert (book.tree.get(digest("three")).bridge, book.tree.head.gaps) == (None, 0)
    restarted = reopen(book, db, clock)
    for one in (book, restarted):
        one.add_final(state("two", "alice1", 2, before + len(mine), ("bob", 1, len(mine))), "bob")
    assert restarted.tree.get(digest("three")) == book.tree.get(digest("three"))
    assert restarted.tree.get(digest("three")).gaps == 1
    assert (restarted.tree.head, restarted.counted_samples) == (book.tree.head, book.counted_samples)
    assert restarted.samples_by_peer() == book.samples_by_peer()


def test_a_finished_run_leases_no_more(db, clock):
    book = open_book(db, clock, total=7)
    mine = keys(book.lease("alice", 7))
    book.contribute("alice", 1, mine)
    book.add_final(state("a", None, 1, len(mine), ("alice", 1, len(mine))), "alice")
    with refusal("run_finished"):
        book.lease("alice", 1)


def test_a_restart_keeps_everything_and_gives_leases_a_full_period(db, clock, book):
    grant = book.lease("alice", 8)
    mine = keys(grant)
    book.contribute("alice", 1, mine[:3])
    book.contribute("alice", 2, mine[3:5])
    book.add_final(state("a", None, 1, 3, ("alice", 1, 3)), "alice")
    before = book.shard_epochs.totals()
    clock.now += 59
    again = reopen(book, db, clock)
    assert again.shard_epochs.totals() == before
    clock.now += 59
    again.renew(grant.lease_id, "alice")
    assert again.tree.head.reporters == ["alice"]
    assert again.samples_by_peer() == {"alice": 3}


def test_a_dataset_that_grew_has_its_new_shards_from_the_next_epoch_on(db, clock):
    book = open_book(db, clock)
    for _ in range(2):
        book.lease("alice", 1)
    book.save()
    shards = (*SHARDS, 5)
    book = Book(db, shards=shards, generations=[(0, 3), (1, 4)], seed=7, clock=clock)
    rest = [book.lease("alice", 1).shard_epochs for _ in range(5)]
    assert rest[0][0][0][0] == 0, "the last shard epoch of the epoch that was begun"
    assert sorted(uid for shard_epochs in rest for uid, _ in shard_epochs)[1:] == [(1, shard) for shard in range(4)]
    assert book.shard_epochs.totals() == {"available": 0, "leased": 11 + 16, "pending": 0, "counted": 0}
    with refusal("no_such_sample"):
        book.contribute("alice", 1, ["0:3:0"])
    book.contribute("alice", 1, [sample_key(1, 3, index) for index in range(5)])
    assert book.shard_epochs.last_epoch == 1


def test_a_run_that_has_all_its_samples_goes_on_when_it_is_extended(db, clock):
    extended = [0]
    book = open_book(db, clock, total=4, extended=lambda: extended[0])
    mine = keys(book.lease("alice", 4))
    book.contribute("alice", 1, mine)
    book.add_final(state("a", None, 1, len(mine), ("alice", 1, len(mine))), "alice")
    assert book.state == "ended"
    extended[0] = 100
    assert book.state == "running" and keys(book.lease("bob", 1))


# -- what the ledger counts itself


def final(book, number, parent, round_, before, peer="alice"):
    """A contribution of a whole shard epoch and a state with it; the samples in the state."""
    mine = keys(book.lease(peer, 1))
    book.contribute(peer, number, mine)
    book.add_final(state(f"{peer}{number}", parent, round_, before + len(mine), (peer, number, len(mine))), peer)
    return before + len(mine)


def test_a_run_ends_on_what_was_registered_and_not_on_what_is_reported(db, clock):
    book = open_book(db, clock, total=8)
    mine = keys(book.lease("alice", 3))
    book.contribute("alice", 1, mine)
    book.add_final(state("a", None, 1, 2**40, ("alice", 1, 2**40)), "alice")
    assert (book.counted_samples, book.state) == (len(mine), "running")
    repeated = book.contribute("bob", 1, mine, offered=True)
    assert repeated.samples == 0
    for number, (peer, many) in enumerate([("bob", 2**40), ("bob", 2**40), ("alice", 2**40)], 2):
        book.add_final(state(f"a{number}", "a" if number == 2 else f"a{number - 1}", number, number * 2**40, (peer, 1, many)), "alice")
    assert book.counted_samples == 2 * len(mine), "repeated samples count, and a contribution once"
    assert reopen(book, db, clock).counted_samples == 2 * len(mine)


def test_a_state_counts_more_once_a_member_registers_late_and_its_branch_may_become_the_head(book, db, clock):
    first, second = keys(book.lease("alice", 1)), keys(book.lease("bob", 1))
    book.contribute("alice", 1, first[:1])
    book.add_final(state("a", None, 1, 1, ("alice", 1, 1)), "alice")
    book.add_final(state("b", None, 1, len(second), ("bob", 1, len(second))), "bob")
    assert book.tree.head.digest == digest("a")
    assert book.contribute("bob", 1, second).counted
    assert (book.tree.head.digest, book.counted_samples, book.samples_by_peer()) == (digest("b"), len(second), {"bob": len(second)})
    assert reopen(book, db, clock).tree.head == book.tree.head


def test_a_report_with_an_unknown_parent_is_kept_and_says_nothing_until_its_members_count(book, db, clock):
    before = final(book, 1, None, 1, 0)
    head = book.tree.head
    book.add_final(state("x", "lost", 7, 2**53, ("mallory", 1, 1)), "mallory")
    assert book.tree.head is head and book.tree.get(digest("x")).bridge == head.digest
    after = final(book, 2, "lost too", 3, before + 10)
    assert book.tree.head.gaps == 1 and book.counted_samples == after - 10, "nothing for the gap"
    again = reopen(book, db, clock)
    assert again.tree.head == book.tree.head and again.tree.get(digest("x")) == book.tree.get(digest("x"))


def test_a_ledger_of_before_that_was_hit_goes_on_from_the_honest_head(db, clock):
    book = open_book(db, clock, total=100)
    before = final(book, 1, None, 1, 0)
    book.save()
    members = '[["mallory", 1, 9007199254740992]]'
    db.execute("INSERT INTO state VALUES (?, ?, 9, 9007199254740992, ?, '[\"mallory\"]')", (digest("x"), digest("lost"), members))
    book = open_book(db, clock, total=100)
    assert (book.state, book.tree.head.digest, book.counted_samples) == ("running", digest("alice1"), before)


def test_reports_that_are_in_no_chain_of_ours_take_only_so_much_room(book, db, clock, monkeypatch):
    monkeypatch.setattr("datasetserver.reports._MOST_SPARE_MEMBERS", 10)
    monkeypatch.setattr("datasetserver.reports._SPARE_EVERY", 1)
    before = final(book, 1, None, 1, 0)
    for number in range(50):
        parent = "alice1" if number % 2 else f"lost{number}"
        round_, samples = (2, before + 3) if number % 2 else (5, before + 1000)
        members = [(f"mallory{member}", number + 1, 1) for member in range(3)]
        book.add_final(state(f"forged{number}", parent, round_, samples, *members), "mallory")
        assert sum(len(one.members) for one in book.tree) <= 11
    final(book, 2, "alice1", 2, before)
    again = reopen(book, db, clock)
    assert {one.digest for one in again.tree} == {one.digest for one in book.tree}
    assert again.tree.head.digest == digest("alice2")


def test_a_state_that_is_forgotten_and_reported_again_before_it_is_written_is_kept(book, db, clock, monkeypatch):
    monkeypatch.setattr("datasetserver.reports._MOST_SPARE_MEMBERS", 128)
    monkeypatch.setattr("datasetserver.reports._SPARE_EVERY", 1)
    final(book, 1, None, 1, 0)
    for number in range(1, 4):
        book.add_final(state(f"spare{number}", f"lost{number}", 10 - number, 2**20, ("mallory", number, 1)), "mallory")
    assert book.tree.get(digest("spare1")) is None
    book.add_final(state("spare1", "lost1", 9, 2**20, ("mallory", 1, 1)), "bob")
    assert reopen(book, db, clock).tree.get(digest("spare1")) == book.tree.get(digest("spare1"))


def test_a_discarded_state_goes_with_what_follows_and_what_only_seemed_to_goes_on_elsewhere(db, clock):
    orders = set()
    book = open_book(db, clock, total=8, discarded=lambda: orders)
    before = final(book, 1, None, 1, 0)
    bad = final(book, 1, "alice1", 2, before, peer="mallory")
    late = state("orphan", "lost", 9, 2**30, ("carol", 1, 1))
    book.add_final(late, "carol")
    assert late.bridge == digest("mallory1") == book.tree.head.digest
    assert final(book, 2, "mallory1", 3, bad) >= 8 and book.state == "ended"
    orders.add(digest("mallory1"))
    for again in (book, None):
        again = again or open_book(db, clock, total=8)  # without the order: what was done is in the ledger
        again.sweep()
        assert (again.state, again.tree.head.digest, again.counted_samples) == ("running", digest("alice1"), before)
        assert again.tree.get(digest("orphan")).bridge == digest("alice1")
        assert again.samples_by_peer() == {"alice": before}
        for name, parent, round_ in (("mallory1", "alice1", 2), ("alice2", "mallory1", 3), ("new", "alice2", 4), ("newer", "new", 5)):
            with refusal("discarded"):
                again.add_final(state(name, parent, round_, 2**20, ("mallory", 5, 1)), "mallory")
        again.save()


def test_one_request_begins_no_epochs(book):
    book.lease("carol", 1)
    far = [sample_key(epoch, 0, 0) for epoch in range(1000)]
    assert book.contribute("mallory", 1, far, offered=True).samples <= 2
    assert book.contribute("mallory", 2, [sample_key(epoch, 1, 0) for epoch in range(1, 1000)], offered=True).samples == 1
    assert book.shard_epochs.last_epoch == 1


def test_peers_of_one_owner_hold_no_more_than_one_peer_may_and_a_restart_forgets_no_token(db, clock):
    book = open_book(db, clock, allowance=Allowance(7, 7))
    for name in ("one", "two"):
        book.admit(name, Sender("volunteer", {"volunteer"}))
        book.lease(name, 4)
    book.admit("bob", Sender(address="198.51.100.7"))
    assert book.lease("bob", 1)
    for _ in range(2):
        book.admit("three", Sender("volunteer", {"volunteer"}))
        with refusal("too_many_leased"):
            book.lease("three", 1)
        with refusal("other_token"):
            book.admit("one", Sender("thief", {"volunteer", "thief"}))
        book = reopen(book, db, clock)
        book._holdings.allowance = Allowance(7, 7)
    book.admit("one", Sender("heir", {"heir"}))
    with refusal("other_token"):
        book.admit("one", Sender("volunteer", {"volunteer", "heir"}))


def test_what_waits_for_its_round_counts_as_held_beside_as_much_as_was_counted(db, clock):
    book = open_book(db, clock, allowance=Allowance(4, 4))
    total, refusals = 0, 0
    for number in range(1, 9):
        try:
            mine = keys(book.lease("alice", 1))
        except Refused as refused:
            assert refused.code == "too_many_leased"
            refusals += 1
            continue
        book.contribute("alice", number, mine)
        total += len(mine)
    assert refusals and total < 2 * 4 + 4
    pending = sorted(book._pending)
    samples = book._contributions[pending[0]].samples
    book.add_final(state("a", None, 1, samples, (*pending[0], samples)), "alice")
    assert book.lease("alice", 1), "what is final gives room"


def test_giving_back_what_one_does_not_hold_begins_no_epoch(book):
    book.lease("alice", 4)
    drawn = len(book.shard_epochs._orders)
    assert book.release(NO_LEASE, "bob", [sample_key(epoch, 0, 0) for epoch in range(1, 200)]) == 0
    assert len(book.shard_epochs._orders) == drawn and book.shard_epochs.last_epoch == 0


def test_a_report_of_a_number_that_a_peer_never_registered_withdraws_nothing_of_it(book):
    before = final(book, 1, None, 1, 0, peer="mallory")
    held = keys(book.lease("alice", 4))
    book.contribute("alice", 1, held)
    book.contribute("mallory", 2, keys(book.lease("mallory", 4))[:1])
    book.add_final(state("a lie", "mallory1", 2, before + 3, ("alice", 2**53, 2), ("mallory", 2, 1)), "mallory")
    assert book.counted_samples == before + 1
    assert book.contribute("alice", 1, held).live and not set(held) & set(keys(book.lease("bob", 7)))
    book.add_final(state("the truth", "mallory1", 2, before + 4, ("alice", 1, 4)), "alice")
    assert book.counted_samples == before + 4


def test_what_is_registered_late_and_is_in_the_chain_withdraws_what_its_peer_had_before(book):
    first, second = keys(book.lease("alice", 4)), keys(book.lease("alice", 4))
    book.contribute("alice", 1, first)
    book.add_final(state("two", None, 1, 4, ("alice", 2, 4)), "bob")
    assert book.contribute("alice", 1, first).live  # nobody knows yet that number 2 is hers
    book.contribute("alice", 2, second, offered=True)
    with refusal("withdrawn"):
        book.contribute("alice", 1, first)
    assert sorted(keys(book.lease("bob", 4))) == sorted(first)


def test_who_reports_that_a_state_follows_a_discarded_one_keeps_nobody_from_reporting_it_as_it_is(db, clock):
    orders = []
    book = open_book(db, clock, discarded=lambda: orders)
    book.contribute("alice", 1, keys(book.lease("alice", 4)))
    book.add_final(state("one", None, 1, 4, ("alice", 1, 4)), "alice")
    book.contribute("alice", 2, keys(book.lease("alice", 4)))
    orders.append(digest("bad"))
    with refusal("discarded"):
        book.add_final(state("two", "bad", 2, 8, ("alice", 2, 4)), "mallory")
    with refusal("discarded"):  # as long as nobody says otherwise
        book.add_final(state("three", "two", 3, 9, ("alice", 3, 1)), "mallory")
    assert book.add_final(state("two", "one", 2, 8, ("alice", 2, 4)), "alice").digest == digest("two")
    assert book.counted_samples == 8
    with refusal("contradiction"):
        book.add_final(state("two", "bad", 2, 8, ("alice", 2, 4)), "mallory")
    assert book.add_final(state("three", "two", 3, 9, ("alice", 3, 1)), "bob")


def test_members_whom_nobody_knows_cost_no_walk_through_the_chain(book, monkeypatch):
    book.contribute("alice", 1, keys(book.lease("alice", 4)))
    book.add_final(state("one", None, 1, 4, ("alice", 1, 4)), "alice")
    made_up = [(f"nobody{number}", 1, 1) for number in range(512)]
    for name in ("a", "b", "c"):
        book.add_final(state(name, "one", 2, 516, *made_up), "mallory")
    walked, ancestor = [], book.tree._ancestor
    monkeypatch.setattr(book.tree, "_ancestor", lambda one: walked.append(one) or ancestor(one))
    book.add_final(state("d", "one", 2, 516, *made_up), "mallory")
    assert len(walked) < 10 and book.counted_samples == 4


def test_members_that_many_states_have_cost_one_walk_through_the_chain(book, monkeypatch):
    """Else each of 512 members cost one for each of the states: 55 s for one report of a run of 1,000 rounds."""
    for number in range(1, 101):
        book.contribute("alice", number, keys(book.lease("alice", 1)))
        book.add_final(state(f"s{number}", f"s{number - 1}" if number > 1 else None, number, number, ("alice", number, 1)), "alice")
    made_up = [(f"mallory{one}", 1, 1) for one in range(50)]
    for peer, *_ in made_up:
        book.contribute(peer, 1, ["0:0:0"], offered=True)
    for number in range(20):
        book.add_final(state(f"m{number}", "unknown", 2, 60, *made_up), "mallory0")
    walked, ancestor = [], book.tree._ancestor
    monkeypatch.setattr(book.tree, "_ancestor", lambda one: walked.append(one) or ancestor(one))
    book.add_final(state("last", "unknown", 150, 200, *made_up), "mallory0")
    assert len(walked) < 1000, "about 100 for its own figures, as many for each chain that is read"


def test_a_contribution_that_many_states_of_a_chain_have_counts_each_of_them_once_more(book, monkeypatch):
    made_up = [(f"mallory{one}", 1, 1) for one in range(30)]
    for number in range(1, 31):
        book.add_final(state(f"m{number}", f"m{number - 1}" if number > 1 else None, number, 30 * number, *made_up), "mallory0")
    weighed, weigh = [], book.tree._weigh
    monkeypatch.setattr(book.tree, "_weigh", lambda *asked: weighed.append(asked) or weigh(*asked))
    monkeypatch.setattr(book.tree, "_own_count", lambda *asked: pytest.fail("what its members add is looked up anew"))
    book.contribute("mallory0", 1, ["0:0:0"], offered=True)
    assert len(weighed) == 30 and book.counted_samples == 1
    assert {one.counted for one in book.tree} == {1} and sorted(one.own for one in book.tree) == 29 * [0] + [1]


def test_what_is_registered_late_counts_once_in_each_lineage(db, clock, book):
    before = final(book, 1, None, 1, 0)
    mine, more = keys(book.lease("bob", 4)), keys(book.lease("carol", 3))
    bobs, carols = ("bob", 1, len(mine)), ("carol", 1, len(more))
    for name, parent, members in (
        ("left", "alice1", [bobs]),
        ("left2", "left", [bobs]),
        ("right", "alice1", [carols]),
        ("right2", "right", [bobs]),
        ("right3", "right2", [bobs]),
    ):
        of = book.tree.get(digest(parent))
        book.add_final(state(name, parent, of.round + 1, of.samples + sum(samples for *_, samples in members), *members), "bob")
    book.contribute("carol", 1, more)
    book.contribute("bob", 1, mine)
    counted = {one.digest: (one.own, one.counted) for one in book.tree}
    again = reopen(book, db, clock)
    assert {one.digest: (one.own, one.counted) for one in again.tree} == counted
    assert counted[digest("left2")] == (0, before + len(mine)) and counted[digest("left")] == (len(mine), before + len(mine))


def test_another_story_of_a_state_leads_in_no_circle(book):
    """What was taken to come after it may come before it by the new story: the ledger's thread went round and round."""
    book.contribute("mallory", 1, ["0:0:0"], offered=True)
    book.add_final(state("x", "a", 2, 1, ("mallory", 900, 1)), "mallory")
    book.add_final(state("c", "b", 4, 2, ("mallory", 901, 1)), "mallory")
    assert book.tree.get(digest("c")).bridge == digest("x")
    book.add_final(state("x", "d", 100, 3, ("mallory", 1, 1)), "mallory")
    assert book.tree.get(digest("x")).bridge == digest("c") and book.tree.get(digest("c")).bridge != digest("x")
    assert book.tree.head.digest == digest("x") and book.counted_samples == 1


def test_reports_that_are_forgotten_again_leave_nothing_of_the_peers_that_they_name(book, clock):
    tree = book.tree
    for number in range(320):
        clock.now += 2
        made_up = [(f"nobody{number}-{one}", 1, 1) for one in range(512)]
        book.add_final(state(f"s{number}", f"p{number}", 2, 600, *made_up), "mallory")
    kept = list(tree)
    assert len(kept) == 129  # with the head
    assert len(tree._having) == sum(len(one.members) for one in kept) and len(tree._children) == len(kept)


def test_spare_states_of_one_owner_are_a_thousand_however_few_members_they_have(book, clock):
    for number in range(1120):
        clock.now += 2
        book.add_final(state(f"s{number}", f"p{number}", 2, 600, ("nobody", 1, 1)), "mallory")
    assert len(list(book.tree)) == 1025  # with the head


def test_a_lost_branch_is_forgotten_from_its_end(book, clock, monkeypatch):
    monkeypatch.setattr("datasetserver.reports._MOST_SPARE_MEMBERS", 64 * 5)
    before = final(book, 1, None, 1, 0)
    final(book, 1, None, 1, 0, peer="mallory")
    for number in range(2, 33):  # which was left for a better one, and is told at once
        book.add_final(state(f"m{number}", f"m{number - 1}" if number > 2 else "mallory1", number, before, ("nobody", number, 0)), "mallory")
    kept = {one.digest for one in book.tree}
    assert kept == {digest(name) for name in ("alice1", "mallory1", "m2", "m3", "m4", "m5")}


def test_who_sends_the_run_from_branch_to_branch_is_asked_to_wait_and_others_are_not(book, clock):
    before = final(book, 1, None, 1, 0)
    second = final(book, 2, "alice1", 2, before)
    changes = 0
    with refusal("too_many_branches"):
        for number in range(1000):
            book.add_final(state(f"s{number}", f"lost{number}", 9, second + 1, ("mallory", 1, 1)), "mallory")
            changes += 1
    assert changes == 64 and len(list(book.tree)) == 66
    with refusal("too_many_branches"):
        book.add_final(state("any", "alice2", 3, second + 1, ("mallory", 1, 1)), "mallory")
    final(book, 3, "alice2", 3, second)
    clock.now += 2
    book.add_final(state("any", "alice2", 3, second + 1, ("mallory", 1, 1)), "mallory")


def test_of_what_contradicts_what_we_know_too_much_is_too_much(book):
    """Each such story is compared with all states before it is refused."""
    final(book, 1, None, 1, 0)
    for _ in range(64):
        with refusal("contradiction"):
            book.add_final(state("alice1", "lost", 9, 2**20, ("mallory", 1, 1)), "mallory")
    with refusal("too_many_branches"):
        book.add_final(state("alice1", "lost", 9, 2**20, ("mallory", 1, 1)), "mallory")


def test_newcomers_hear_of_no_state_by_the_word_of_one_owner_while_two_stand_behind_another(db, clock):
    """With one report of a state of all the run's samples a member ended every peer that started (exit code 9)."""
    book = of_three_owners(db, clock, total=100)
    book.add_final(state("made-up", "unknown", 9, 100, ("mallory", 1, 5)), "mallory")
    assert book.tree.head.samples == 100 and book.told is None, "none of them is counted"
    mine = keys(book.lease("alice", 3))
    book.contribute("alice", 1, mine)
    one = state("one", None, 1, len(mine), ("alice", 1, len(mine)))
    assert book.add_final(one, "alice") is book.told, "all of its samples are counted"
    book.add_final(one, "bob")
    book.add_final(state("on", "one", 2, len(mine), ("mallory", 1, 0)), "mallory")
    for each in (book, reopen(book, db, clock)):
        assert each.told.digest == digest("one")


def test_once_all_samples_are_counted_newcomers_hear_of_the_last_state_whoever_tells_it(db, clock):
    book = of_three_owners(db, clock, total=6)
    for number, parent in ((1, None), (2, "s1")):
        book.contribute("alice", number, keys(book.lease("alice", 3)))
        book.add_final(state(f"s{number}", parent, number, number * 3, ("alice", number, 3)), "alice")
        if number == 1:
            book.add_final(state("s1", None, 1, 3, ("alice", 1, 3)), "bob")
    assert book.state == "ended" and book.told.digest == digest("s2")


def test_no_member_keeps_the_host_from_discarding_a_state_by_another_whose_digest_begins_alike(db, clock):
    book = of_three_owners(db, clock)
    one = state("one", None, 1, 0, ("alice", 1, 0))
    book.add_final(one, "alice")
    book.add_final(replace(state("two", "unknown", 5, 9, ("mallory", 1, 0)), digest=one.digest[:12] + "0" * 52), "mallory")
    assert book.tree.twin(one.digest) is not None, "each is one owner's word"
    book.add_final(one, "bob")
    assert book.tree.twin(one.digest) is None
