"""How much one owner's peers may lease, and for how much of it they get receipts: both follow what came of what they leased before."""

import sqlite3
from collections import Counter
from contextlib import closing

import pytest

from datasetserver.book import Book, Grant
from datasetserver.holdings import Allowance
from datasetserver.owners import Owners, Sender
from datasetserver.refused import Refused
from datasetserver.shard_epochs import Contribution
from datasetserver.store import SCHEMA, Store
from datasetserver.tree import State
from swarm.protocol import NO_LEASE, sample_key
from tests.clock import Clock
from tests.datasetserver.test_book import BASE, digest

TARGET, AHEAD, SHARD = 64, 32, 8
ALLOWED = Allowance(4 * TARGET, 64 * TARGET)


@pytest.fixture
def db():
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.executescript(SCHEMA)
        yield db


@pytest.fixture
def book(db):
    return open_book(db)


def open_book(db, allowance=ALLOWED, shard=SHARD, vouches=True) -> Book:
    return Book(db, shards=[shard] * 500, seed=7, lease_seconds=60, grace_seconds=60, allowance=allowance, vouches=vouches, clock=Clock(1000.0))


def of_one_token(book: Book, count: int) -> list[str]:
    peers = [f"peer {number}" for number in range(count)]
    for peer in peers:
        book.admit(peer, Sender("lab", ("lab",)))
    return peers


class Peer:
    """Alone in its run, it leases some samples ahead, trains them, and closes a round with TARGET of them."""

    def __init__(self, book: Book, name: str = "alice"):
        self.book, self.name, self.held, self.number = book, name, [], 0

    def train_a_round(self) -> Contribution:
        while len(self.held) < TARGET + AHEAD:
            self.held += leased(self.book, self.name, AHEAD)
        self.number += 1
        mine, self.held = self.held[:TARGET], self.held[TARGET:]
        contribution = self.book.contribute(self.name, self.number, mine)
        settle(self.book, (self.name, self.number, TARGET))
        return contribution


def leased(book: Book, peer: str, want: int = 10**6) -> list[str]:
    return keys_of(book.lease(peer, want))


def keys_of(grant: Grant) -> list[str]:
    return [sample_key(*uid, index) for uid, skip in grant.shard_epochs for index in range(SHARD) if index not in skip]


def settle(book: Book, *members: tuple[str, int, int]) -> None:
    """The next state has these contributions."""
    parent, number, samples = (book.tree.head.digest, book.tree.head.round, book.tree.head.samples) if book.tree.head else (BASE, 0, 0)
    state = State(digest(f"state {number}"), parent, number + 1, samples + sum(member[2] for member in members), tuple(members))
    book.add_final(state, members[0][0])


def test_a_newcomer_gets_little_at_once_and_more_as_its_work_is_settled(book):
    alice = Peer(book)
    assert ALLOWED.first <= len(leased(book, "bob")) < ALLOWED.first + SHARD, "however much it asks for"
    with pytest.raises(Refused, match=f"of {ALLOWED.first}"):
        book.lease("bob", 1)
    for _ in range(20):
        assert alice.train_a_round().vouched
    assert ALLOWED.samples(book.samples_by_peer()["alice"]) == ALLOWED.first + 20 * TARGET
    assert len(alice.held) + len(leased(book, "alice")) >= ALLOWED.first + 20 * TARGET
    assert ALLOWED.samples(60 * TARGET) == ALLOWED.samples(10**9) == ALLOWED.most


@pytest.mark.parametrize("target", [64, 512])
def test_each_of_forty_peers_of_one_token_has_a_shard_also_after_a_power_cut(db, target):
    """A shard of 256 is more than a slow peer asks for, and 40 of them are more than a newcomer may lease."""
    book = open_book(db, Allowance.of(target), shard=256)
    peers = of_one_token(book, 40)
    for _ in range(3):
        for peer in peers:
            book.lease(peer, 30)
        book._clock.now += 121
        book.sweep()


@pytest.mark.parametrize("shard", [1, 8, 100])
def test_each_of_forty_peers_of_one_token_has_a_step_also_where_shards_are_smaller(db, shard):
    """Batches of 128 samples: a peer asks for two of them, and for the rest as long as it has less."""
    book = open_book(db, Allowance.of(64), shard=shard)
    held = Counter()
    for peer in of_one_token(book, 40):
        while held[peer] < 256:
            grant = book.lease(peer, 256 - held[peer])
            held[peer] += sum(shard - len(skip) for _, skip in grant.shard_epochs)
    assert len(held) == 40 and sum(held.values()) > book._holdings.allowance.first
    with pytest.raises(Refused, match="of 5000"):
        book.lease(peer, 1)


def test_many_peers_of_one_token_hold_no_more_than_any_may(db):
    book = open_book(db, Allowance(2 * SHARD, 5 * SHARD))
    *some, last = of_one_token(book, 5)
    for peer, want in zip(some, [10**6, 1, 1, 1], strict=True):
        book.lease(peer, want)
    with pytest.raises(Refused, match="holds 40 samples by 4 leases"):
        book.lease(last, 1)
    with pytest.raises(Refused, match="of 16"):
        book.lease(some[0], 1)


def hoard(book: Book, peers: list[str], numbers: range = range(1, 4)) -> list[Contribution]:
    """Each registers what the one before it gave back: one lease for all."""
    registered = []
    for number in numbers:
        for peer in peers:
            mine = leased(book, peer, 2 * TARGET)[: 2 * TARGET]
            registered.append(book.contribute(peer, number, mine))
            book.release(NO_LEASE, peer, mine)
    return [contribution for contribution in registered if contribution.vouched]


def size_of(contributions: list[Contribution]) -> int:
    return sum(contribution.samples + contribution.repeated for contribution in contributions)


def test_ids_that_hold_nothing_cost_nothing(db):
    """144 ms a lease with 100,000 of them: all in the one thread of the ledger."""
    owners, asked = Owners(Store(db, [8])), []
    for number in range(50):
        owners.admit(f"id{number}", Sender(address="198.51.100.7"))
    owners.admit("other", Sender(address="198.51.100.8"))

    class Amounts(Counter):
        def get(self, peer, default=None):
            asked.append(peer)
            return super().get(peer, default)

    assert owners.total("id3", Amounts(id3=5, id4=2, other=9)) == 7 and not asked
    assert owners.total("other", Amounts(id3=5, other=9)) == 9 and owners.total("unknown", {"unknown": 3}) == 3
    assert not owners.one


@pytest.mark.parametrize("sender", [Sender("volunteer", {"volunteer"}), Sender(address="198.51.100.7")])
def test_one_owner_speaks_for_so_many_ids_and_no_more(db, monkeypatch, sender):
    monkeypatch.setattr("datasetserver.owners.MOST_IDS", 3)
    owners = Owners(Store(db, [8]))
    for name in ("one", "two", "three", "one"):
        owners.admit(name, sender)
    with pytest.raises(Refused, check=lambda refused: refused.code == "too_many_members"):
        owners.admit("four", sender)
    owners.admit("three", sender)
    owners.admit("four", Sender(address="198.51.100.8"))
    assert not owners.knows("five")


def test_samples_that_are_given_back_and_leased_again_get_no_more_receipts_than_the_allowance(db, book):
    peers = of_one_token(book, 20)
    assert size_of(hoard(book, peers)) == ALLOWED.first
    book.save()
    book = open_book(db)
    of_one_token(book, 20)
    assert not hoard(book, peers, range(4, 5)), "a restart forgets none"


def test_a_receipt_stays_with_the_address_that_got_it_also_when_its_peer_speaks_from_another_and_after_a_restart(db, book):
    peers = [f"peer {number}" for number in range(20)]
    got = []
    for number in range(1, 4):
        for peer in peers:
            book.admit(peer, Sender(address="192.0.2.1"))
            got += hoard(book, [peer], range(number, number + 1))
            book.admit(peer, Sender(address="198.51.100.1"))
    assert size_of(got) == ALLOWED.first
    book.save()
    again = open_book(db)
    for peer in peers:
        again.admit(peer, Sender(address="192.0.2.1"))
    assert not hoard(again, peers, range(4, 5))


def test_a_number_that_its_peer_has_passed_gets_no_receipt(book):
    """No state takes it, until the host discards the one that holds the later number."""
    book.contribute("alice", 9, leased(book, "alice", SHARD))
    settle(book, ("alice", 9, SHARD))
    assert not book.contribute("alice", 8, leased(book, "alice", SHARD)).vouched


def test_samples_that_another_registered_first_count_as_well(book):
    """A copy of a late shard: its receipt is for all of its samples, of which none counts for its peer."""
    book._copy_seconds, book._holdings.allowance = 1.0, Allowance(12 * SHARD, 12 * SHARD)
    late = leased(book, "late", SHARD)
    for number in range(42):
        book.lease(f"peer {number}", 12 * SHARD)
    assert book.shard_epochs.frontier[0] == 1, "the rest of the epoch is given out"
    book._clock.now += 2
    copy = leased(book, "second", SHARD)
    assert copy == late
    assert book.contribute("late", 1, late).vouched
    again = book.contribute("second", 1, copy)
    assert (again.samples, again.repeated, again.vouched) == (0, SHARD, "peer second")
    assert book._holdings.vouched["peer second"] == SHARD


def test_a_contribution_in_a_state_makes_room_for_receipts_again_and_so_does_a_later_one_of_its_peer(book):
    peers = of_one_token(book, 2)
    got = hoard(book, peers)
    assert size_of(got) == ALLOWED.first and not book.contribute(peers[0], 9, leased(book, peers[0], SHARD)).vouched
    settle(book, (peers[0], 9, SHARD))
    ours = sum(c.samples for c in got if c.peer == peers[0])
    room = ours + SHARD  # what was counted is one more each
    assert size_of(hoard(book, peers[1:], range(11, 40))) <= room and book._holdings.receipts[peers[0]] == {}


def test_a_ledger_of_before_there_were_receipts_has_none(db):
    book = open_book(db, vouches=False)
    mine = leased(book, "alice", SHARD)
    book.contribute("alice", 1, mine)
    book.save()
    db.execute("DROP TABLE vouched")
    db.executescript(SCHEMA)
    assert not open_book(db).contribute("alice", 1, mine).vouched


def test_an_allowance_is_in_rounds_and_never_too_small_for_a_fast_peer_in_small_rounds():
    assert Allowance.of(2048) == Allowance(8192, 131_072)
    assert Allowance.of(16) == Allowance(5_000, 20_000)
    assert Allowance.of(300_000) == Allowance(400_000, 400_000)


def settle_as(book: Book, reporter: str, *members: tuple[str, int, int]) -> State:
    """The next state has these contributions, says `reporter`."""
    head = book.tree.head
    parent, number, samples = (head.digest, head.round, head.samples) if head else (BASE, 0, 0)
    state = State(digest(f"{reporter} {number}"), parent, number + 1, samples + sum(member[2] for member in members), tuple(members))
    book.add_final(state, reporter)
    return state


def again(state: State) -> State:
    return State(state.digest, state.parent, state.round, state.samples, state.members)


def two_owners(book: Book) -> tuple[str, str]:
    book.admit("alice", Sender("lab", ("lab", "club")))
    book.admit("bob", Sender("club", ("lab", "club")))
    return "alice", "bob"


def with_receipts(book: Book, peer: str) -> Contribution:
    """The last contribution of as many as its owner's allowance has room for: it holds all that is left of it."""
    number = max((n for p, n in book._contributions if p == peer), default=0)
    while room := ALLOWED.samples(sum(book.samples_by_peer().values())) - book._holdings.vouched[book.owner_of(peer)]:
        number += 1
        mine = leased(book, peer, min(room, SHARD))[:room]
        given = book.contribute(peer, number, mine)
        assert given.vouched
    return given


def test_a_state_that_one_owner_alone_reports_frees_no_receipt_of_its_own_but_those_of_others(book):
    alice, bob = two_owners(book)
    mine, other = with_receipts(book, alice), book.contribute(bob, 1, leased(book, bob, SHARD))
    first = settle_as(book, alice, (alice, mine.number, mine.samples), (bob, 1, SHARD))
    book.add_final(again(first), alice)
    assert other.vouched and not book._holdings.awaits(bob, 1)
    assert book._holdings.awaits(alice, mine.number) and book._holdings.vouched["token lab"] == ALLOWED.first
    book.add_final(again(first), bob)
    assert book._holdings.vouched["token lab"] == 0


def test_a_report_by_another_owner_frees_what_all_states_before_it_hold(db, book):
    alice, bob = two_owners(book)
    mine = with_receipts(book, alice)
    book.contribute(bob, 1, leased(book, bob, SHARD))
    states = [settle_as(book, alice, (alice, number, SHARD)) for number in range(1, mine.number + 1)]
    assert book._holdings.vouched["token lab"] == ALLOWED.first
    book.add_final(again(states[4]), bob)
    assert book._holdings.vouched["token lab"] == ALLOWED.first - 5 * SHARD
    book.save()
    restarted = open_book(db)
    assert restarted._holdings.vouched["token lab"] == ALLOWED.first - 5 * SHARD, "a restart says the same"
    settle_as(restarted, bob, (bob, 1, SHARD))
    assert restarted._holdings.vouched["token lab"] == 0


def test_the_word_of_a_second_owner_is_kept_however_many_peers_of_the_first_said_it_before(book):
    alice, bob = two_owners(book)
    mine = with_receipts(book, alice)
    state = settle_as(book, alice, (alice, mine.number, mine.samples))
    for peer in of_one_token(book, 100):
        book.add_final(again(state), peer)
    assert book._holdings.vouched["token lab"] == ALLOWED.first and len(book.tree.head.reporters) == 64
    book.add_final(again(state), bob)
    assert book._holdings.vouched["token lab"] == 0


def test_in_a_run_with_one_owner_its_own_report_is_enough(book):
    alice, *_ = of_one_token(book, 2)
    mine = with_receipts(book, alice)
    settle_as(book, alice, (alice, mine.number, mine.samples))
    assert book._holdings.vouched["token lab"] == 0


@pytest.mark.parametrize("seconded", [True, False])
def test_what_was_settled_before_the_host_discards_it_leaves_room_for_receipts(db, book, seconded):
    """All of a token's work is in a state that goes. Where it alone reported that, its receipts still wait."""
    alice, bob = two_owners(book)
    mine = with_receipts(book, alice)
    state = settle_as(book, alice, (alice, mine.number, mine.samples))
    if seconded:
        book.add_final(again(state), bob)
    book._to_discard = lambda: {state.digest}
    book.sweep()
    assert book.tree.head is None
    assert book._holdings.vouched["token lab"] == (0 if seconded else ALLOWED.first)
    assert bool(book.contribute(alice, mine.number + 1, leased(book, alice, SHARD)).vouched) is seconded
    book.save()
    assert open_book(db)._holdings.vouched["token lab"] == (SHARD if seconded else ALLOWED.first), "a restart says the same"


def test_what_a_peer_passed_before_a_lost_report_makes_room_also_after_a_restart(db, book):
    alice, bob = two_owners(book)
    for number in (1, 2):
        assert book.contribute(alice, number, leased(book, alice, SHARD)).vouched
    first = settle_as(book, bob, (alice, 2, SHARD))
    lost = State(digest("lost"), digest("nobody said"), 5, first.samples + 3 * SHARD, ((bob, 1, SHARD),))
    book.contribute(bob, 1, leased(book, bob, SHARD))
    book.add_final(lost, bob)
    assert book.tree.head is lost and lost.bridge == first.digest
    assert book._holdings.vouched["token lab"] == 0
    book.save()
    assert open_book(db)._holdings.vouched["token lab"] == 0


def test_the_server_countersigns_what_two_owners_stand_behind_and_never_two_branches(db, book):
    alice, bob = two_owners(book)
    assert book.countersign() == ""
    mine, other = [book.contribute(peer, 1, leased(book, peer, SHARD)) for peer in (alice, bob)]
    first = settle_as(book, alice, (alice, 1, mine.samples))
    assert book.countersign() == "", "one owner's word"
    book.add_final(again(first), bob)
    assert book.countersign() == first.digest
    # Another branch has more samples, and both owners behind it; a restart changes nothing.
    larger = State(digest("elsewhere"), BASE, 1, mine.samples + other.samples, ((alice, 1, mine.samples), (bob, 1, other.samples)))
    book.add_final(larger, alice)
    book.add_final(again(larger), bob)
    assert book.tree.head is larger and book.countersign() == "", "nobody is sent to a branch that the run has left, nor to two"
    book.save()
    restarted = open_book(db)
    two_owners(restarted)
    assert restarted.tree.head.digest == larger.digest and restarted.countersign() == ""
    restarted._to_discard = lambda: {first.digest}
    assert restarted.countersign() == larger.digest, "the host's word ended the first branch"


@pytest.mark.parametrize(("address", "older"), [("192.0.2.1", False), (None, False), ("192.0.2.1", True)])
def test_after_a_restart_no_member_alone_vouches_for_its_own_state_where_no_token_is_asked_for(db, book, address, older):
    """older: the ledger is of a version that kept no addresses."""
    book.admit("alice", Sender(address=address))
    book.admit("mallory", Sender(address="198.51.100.1"))
    made = [book.contribute(peer, 1, leased(book, peer, SHARD)) for peer in ("alice", "mallory")]
    first = settle_as(book, "alice", ("alice", 1, made[0].samples))
    book.add_final(again(first), "mallory")
    own = settle_as(book, "mallory", ("mallory", 1, made[1].samples))
    assert book.tree.head is own and book.countersign() == first.digest
    book.save()
    if older:
        db.execute("DELETE FROM peer_address")
    restarted = open_book(db)
    assert restarted.tree.head.digest == own.digest and restarted.countersign() == first.digest
    restarted.admit("mallory", Sender(address="198.51.100.1"))
    more = restarted.contribute("mallory", 2, leased(restarted, "mallory", SHARD))
    settle_as(restarted, "mallory", ("mallory", 2, more.samples))
    assert restarted.countersign() == first.digest
    restarted.admit("alice", Sender(address=address))
    restarted.add_final(again(restarted.tree.head), "alice")
    assert restarted.countersign() == restarted.tree.head.digest


def test_two_ids_of_one_address_are_one_witness_also_after_a_restart(db, book):
    for peer, address in (("alice", "192.0.2.1"), ("mallory", "198.51.100.1"), ("her other id", "198.51.100.1")):
        book.admit(peer, Sender(address=address))
    mine = book.contribute("mallory", 1, leased(book, "mallory", SHARD))
    own = settle_as(book, "mallory", ("mallory", 1, mine.samples))
    book.add_final(again(own), "her other id")
    book.save()
    assert book.countersign() == open_book(db).countersign() == ""


def test_what_is_countersigned_goes_on_along_its_branch(book):
    alice, *_ = of_one_token(book, 2)
    for number in (1, 2, 3):
        made = book.contribute(alice, number, leased(book, alice, SHARD))
        settle_as(book, alice, (alice, number, made.samples))
        assert book.countersign() == book.tree.head.digest and book.tree.head.round == number


def first_keys(count: int) -> list[str]:
    return [sample_key(0, number // SHARD, number % SHARD) for number in range(count)]


def of_two_owners(book: Book) -> None:
    for peer in ("mallory", "alice"):
        book.admit(peer, Sender(f"token of {peer}", ("token of mallory", "token of alice")))


def made_up_round(book: Book, number: int) -> None:
    """With samples that nobody leased, in a state that nobody else knows of."""
    book.contribute("mallory", number, first_keys(TARGET), offered=True)
    parent, before, samples = (book.tree.head.digest, book.tree.head.round, book.tree.head.samples) if book.tree.head else (BASE, 0, 0)
    made_up = State(digest(f"made up {number}"), parent, before + 1, samples + TARGET, (("mallory", number, TARGET),))
    book.add_final(made_up, "mallory")


def test_what_nobody_leased_counts_within_the_allowance_until_another_owner_reports_the_state(db):
    """One id ended a run of 100,000 samples by 49 such rounds, each of the same samples."""
    book = open_book(db, vouches=False)
    of_two_owners(book)
    for number in range(1, 21):
        made_up_round(book, number)
    assert book.counted_samples == ALLOWED.first + TARGET, "four rounds, and one for the round that was new"
    assert len(book._contributions) == 5, "what is beyond is not kept"
    book.save()
    book = open_book(db, vouches=False)
    of_two_owners(book)
    made_up_round(book, 21)
    assert book.counted_samples == ALLOWED.first + TARGET, "also after a restart"
    head = book.tree.head
    book.add_final(again(head), "alice")
    made_up_round(book, 22)
    assert book.counted_samples == ALLOWED.first + 2 * TARGET


def test_of_what_was_offered_beyond_the_allowance_the_leased_samples_count(db):
    book = open_book(db, vouches=False)
    of_two_owners(book)
    mine = leased(book, "mallory", TARGET)[:TARGET]
    more = [key for key in first_keys(ALLOWED.first + TARGET) if key not in mine][: ALLOWED.first]
    for _ in "as often as it is said":
        contribution = book.contribute("mallory", 1, mine + more, offered=True)
        assert (contribution.samples, contribution.repeated, contribution.charged) == (TARGET, 0, "")
    assert book.contribute("mallory", 2, more, offered=True).samples == ALLOWED.first
