"""Each invariant is one that can fail."""

import json
import sqlite3
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from datasetserver.book import Book
from datasetserver.shard_epochs import Contribution
from datasetserver.store import SCHEMA
from datasetserver.tree import State
from peer.contracts import SyncReport
from peer.sync.engine.state import first_state
from simulation.checks import Breach, Checks
from simulation.machine import Machine


class World:
    strangers = ()
    run = SimpleNamespace(members_of="")

    def __init__(self):
        self.loop = SimpleNamespace(time=lambda: 1.0)

    def stop(self):
        pass

    def committed(self, commit):
        pass


class Scene:
    def __init__(self):
        self.checks = Checks(World())
        self.flushed = []
        self.machine = SimpleNamespace(peer="ann", short="ann", sidecar=object(), disk=SimpleNamespace(flushed=lambda: self.flushed))
        self.offers({("ann", 1): 8, ("ann", 2): 8, ("bob", 1): 8, ("bob", 2): 8})
        db = sqlite3.connect(":memory:", isolation_level=None)
        db.executescript(SCHEMA)
        self.book = Book(db, shards=[8] * 8, seed=1, clock=lambda: 1.0)

    def leases(self, peer, number):
        """A shard epoch, and contribution `number` of it."""
        ((item, _),) = self.book.lease(peer, 8).shard_epochs
        keys = [f"{item[0]}:{item[1]}:{index}" for index in range(8)]
        self.checks.ledger.registers(SimpleNamespace(peer=peer, short=peer), number, keys)
        self.book.contribute(peer, number, keys)
        return item

    def reports(self, number=1, parent=0, samples=16):
        members = tuple((peer, number, 8) for peer in ("ann", "bob"))
        return self.book.add_final(State(f"{number:064x}", f"{parent:064x}", number, samples, members), "ann")

    def offers(self, known):
        self.checks._offers |= {key: (b"bytes", samples) for key, samples in known.items()}

    def adopts(self, digest, parent, round, samples, members, machine=None):
        line = {"digest": digest, "parent": parent, "round": round, "samples": samples, "members": members, "how": "averaged"}
        self.checks.appended(machine or self.machine, "/rounds.jsonl", json.dumps(line).encode())

    def broken(self):
        try:
            self.checks.raise_if_broken()
        except Breach as breach:
            return str(breach)
        return ""


@pytest.fixture
def scene():
    scene = Scene()
    scene.adopts("one", "base", 1, 16, [["ann", 1, 8], ["bob", 1, 8]])
    assert not scene.broken()
    return scene


def test_a_round_more_breaks_nothing(scene):
    scene.adopts("two", "one", 2, 32, [["ann", 2, 8], ["bob", 2, 8]])
    assert not scene.broken()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (("other", "base", 1, 16, [["ann", 1, 8], ["bob", 1, 8]]), "one group made two states"),
        (("two", "one", 2, 24, [["ann", 1, 8]]), "twice in the lineage"),
        (("two", "one", 2, 31, [["ann", 2, 8], ["bob", 2, 8]]), "not those of its parent and members"),
        (("two", "gone", 2, 32, [["ann", 2, 8], ["bob", 2, 8]]), "never adopted by anybody"),
        (("two", "one", 2, 25, [["ann", 2, 9]]), "not those it was offered with"),
        (("two", "one", 2, 24, [["cy", 1, 8]]), "not those it was offered with"),
        (("one", "base", 1, 8, [["ann", 1, 8]]), "two stories"),
    ],
)
def test_a_round_that_breaks_a_promise_is_named(scene, line, says):
    scene.adopts(*line)
    assert says in scene.broken()


def test_nobody_adopts_what_a_stranger_made_up(scene):
    scene.checks.forged["two"] = False
    scene.adopts("two", "one", 2, 32, [["ann", 2, 8], ["bob", 2, 8]])
    assert "which a stranger made up" in scene.broken()


def test_of_strangers_nobody_knows_what_they_offered(scene):
    scene.checks._world.strangers = ("cy",)
    scene.adopts("two", "one", 2, 24, [["cy", 1, 8]])
    assert not scene.broken()


def test_in_a_run_for_members_no_stranger_is_in_a_state(scene):
    scene.checks._world.strangers, scene.checks._world.run = ("cy",), SimpleNamespace(members_of="key")
    scene.adopts("two", "one", 2, 24, [["cy", 1, 8]])
    assert "cy is no member" in scene.broken()


@pytest.mark.parametrize(("members_of", "closing", "says"), [("key", 2, ""), ("key", 1, "one group made two states"), ("", 2, "one group")])
def test_a_group_that_is_closed_again_makes_another_state_in_a_run_for_members_alone(scene, members_of, closing, says):
    scene.checks._world.run = SimpleNamespace(members_of=members_of)
    for digest, number in (("two", 1), ("2nd", closing)):
        scene.checks.closings({"averaged": f"closing {number}", "made": digest})
        scene.adopts(digest, "one", 2, 32, [["ann", 2, 8], ["bob", 2, 8]])
    assert says in scene.broken() if says else not scene.broken()


def test_nobody_goes_back_to_an_ancestor_unless_it_was_started_again(scene):
    two = ("two", "one", 2, 32, [["ann", 2, 8], ["bob", 2, 8]])
    one = ("one", "base", 1, 16, [["ann", 1, 8], ["bob", 1, 8]])
    scene.adopts(*two)
    scene.machine.sidecar = object()
    scene.adopts(*one)
    assert not scene.broken()
    scene.adopts(*two)
    scene.adopts(*one)
    assert "went back" in scene.broken()


def test_the_bytes_of_a_contribution_are_one(scene):
    scene.checks.ledger.registers(scene.machine, 3, [f"0:0:{index}" for index in range(8)])

    def offer(content):
        buffer = SimpleNamespace(bytes=lambda: SimpleNamespace(numpy=lambda: content))
        scene.checks.said(scene.machine, "offer", {"number": 3, "samples": 8}, [buffer])

    offer(b"same")
    offer(b"same")
    assert not scene.broken()
    offer(b"other")
    assert "bytes of contribution 3 changed" in scene.broken()


def reports(scene, digest):
    scene.checks.told(scene.machine, "final", {"digest": digest}, [])
    return scene.broken()


@pytest.mark.parametrize("digest", ["one-of-two-peers", "two-of-two-peers"])
def test_what_is_reported_is_on_the_disk_of_who_reports_it(scene, digest):
    scene.adopts("one-of-two-peers", "one", 2, 32, [["ann", 2, 8], ["bob", 2, 8]])
    scene.offers({("ann", 3): 8})
    scene.adopts("two-of-two-peers", "one-of-two-peers", 3, 40, [["ann", 3, 8]])
    scene.adopts("two-of-two-peers", "one-of-two-peers", 3, 40, [["ann", 3, 8]], SimpleNamespace(peer="bob", short="bob", sidecar=object()))
    scene.flushed = [f"/state/samples-16-{digest[:12]}.state"]
    assert not reports(scene, digest)
    scene.flushed = ["/state/samples-16-another-four.state", f"/state/samples-16-{digest[:12]}.tmp"]
    assert "which its disk may lose" in reports(scene, digest), "also what another peer says it has"


def test_what_was_final_on_a_branch_that_was_left_since_may_be_heard_late(scene):
    scene.adopts("one-of-two-peers", "one", 2, 32, [["ann", 2, 8], ["bob", 2, 8]])
    scene.adopts("another-branch", "one", 2, 24, [["bob", 2, 8]])
    assert not reports(scene, "one-of-two-peers")


def test_the_bytes_of_a_state_are_those_of_its_digest(scene):
    state = first_state("run", "schema", torch.zeros(4), 0)
    landed = {"digest": state.digest, "header": state.header.to_json()}
    scene.checks.told(scene.machine, "rebase", landed, [state.buffer])
    assert not scene.broken()
    state.buffer.floats()[0] = 1
    scene.checks.told(scene.machine, "rebase", landed, [state.buffer])
    assert "not those of its digest" in scene.broken()


def test_a_contribution_is_done_once_it_is_in_a_state_that_was_reported(scene):
    scene.flushed = ["/state/samples-16-one.state"]
    scene.checks.final["one"] = 1
    scene.checks.done(scene.machine, 1)
    assert not scene.broken()
    scene.checks.done(scene.machine, 2)
    assert "taken for done" in scene.broken()


def test_what_is_in_the_state_is_not_given_up(scene):
    scene.checks.lost(scene.machine, 2, "one")
    scene.checks.lost(scene.machine, 1, "base")
    assert not scene.broken()
    scene.checks.lost(scene.machine, 1, "one")
    assert "given up, and is in the state" in scene.broken()


@pytest.mark.parametrize("numbers", [[3], [3, 4, 5], []])
def test_the_books_have_the_contributions_that_the_trainer_works_on(scene, numbers):
    accounts = SimpleNamespace(state_dict=lambda: {"contributions": {3: ["a"], 4: ["b"]}})
    scene.checks.books(scene.machine, accounts, [4, 3])
    assert not scene.broken()
    scene.checks.books(scene.machine, accounts, numbers)
    assert "other contributions" in scene.broken()


def test_what_is_reported_was_adopted_by_somebody(scene):
    scene.adopts("one-of-two-peers", "one", 2, 32, [["ann", 2, 8], ["bob", 2, 8]])
    scene.flushed = ["/state/samples-16-one-of-two-p.state"]
    assert not reports(scene, "one-of-two-peers")
    assert "nobody adopted" in reports(scene, "nobody's")


@pytest.mark.parametrize(("held", "drawn", "broken"), [(["a", "b"], "ab", False), (["a"], "ab", True), (["a", "a"], "a", True), (["a", "b"], "a", True)])
def test_every_sample_is_held_or_reported_once(scene, held, drawn, broken):
    accounts = SimpleNamespace(state_dict=lambda: {"open": held, "contributions": {}, "aside": []})
    scene.machine.source = SimpleNamespace(held=set(drawn))
    scene.checks.accounts(scene.machine, accounts)
    assert bool(scene.broken()) == broken


@pytest.mark.parametrize(("held", "broken"), [("", False), ("ab", False), ("abc", True), ("abd", True)])
def test_who_leaves_keeps_no_sample_but_those_of_its_last_state(scene, held, broken):
    accounts = SimpleNamespace(state_dict=lambda: {"open": ["c"], "contributions": {3: ["a", "b"], 4: ["d"]}, "aside": []})
    scene.machine.source = SimpleNamespace(held=set(held))
    scene.checks.left(scene.machine, accounts, {3: 7})
    assert bool(scene.broken()) == broken


def test_what_is_offered_was_registered_with_as_many_samples(scene):
    buffer = SimpleNamespace(bytes=lambda: SimpleNamespace(numpy=lambda: b"bytes"))
    scene.checks.ledger.registers(scene.machine, 3, ["0:0:1", "0:0:2"])
    scene.checks.said(scene.machine, "offer", {"number": 3, "samples": 8}, [buffer])
    assert "other samples than were registered" in scene.broken()


def test_a_contribution_is_its_keys(scene):
    scene.checks.ledger.registers(scene.machine, 3, ["0:0:1", "0:0:2"])
    scene.checks.ledger.registers(scene.machine, 3, ["0:0:1", "0:0:2"])
    assert not scene.broken()
    scene.checks.ledger.registers(scene.machine, 3, ["0:0:1", "0:0:3"])
    assert "two lists of samples" in scene.broken()


@pytest.mark.parametrize(
    ("streams", "tasks", "files", "says"),
    [(64, 72, 160, ""), (65, 1, 1, "65 streams, at most 64"), (1, 73, 1, "73 tasks, at most 72"), (1, 1, 161, "161 files, at most 160")],
)
def test_what_a_peer_holds_is_bounded(scene, streams, tasks, files, says):
    scene.checks._world.network = SimpleNamespace(hosts={"ann": 1, "bob": 2})
    open_task = SimpleNamespace(done=lambda: False)
    scene.machine.host = SimpleNamespace(pipes=range(streams))
    scene.machine.trainer, scene.machine.sidecar = None, SimpleNamespace(tasks=[open_task] * tasks)
    scene.machine.disk = SimpleNamespace(names=range(files))
    scene.checks.bounds(scene.machine)
    assert says in scene.broken() and bool(scene.broken()) == bool(says)


def test_messages_are_bounded(scene):
    scene.checks.traffic(15 * 9 * 10, 10, 3)
    assert not scene.broken()
    scene.checks.traffic(15 * 9 * 10 + 1, 10, 3)
    assert "messages in 10 rounds of 3 peers" in scene.broken()


# ------------------------------------------------------------------------------------------------------------ the ledger


def ledger_of(scene):
    """One round of two contributions is counted, one contribution is pending, one shard epoch leased."""
    shard_epochs = [scene.leases("ann", 1), scene.leases("bob", 1)]
    scene.reports()
    pending = scene.leases("ann", 2)
    scene.book.lease("bob", 8)
    scene.checks.ledger.whole(scene.book)
    assert not scene.broken() and scene.book.counted_samples == 16
    return [*(scene.book.shard_epochs[item] for item in shard_epochs), scene.book.shard_epochs[pending]]


def lose(book, counted, pending):
    counted.counted = 0


def count_too_much(book, counted, pending):
    pending.counted = 1


def lose_pending(book, counted, pending):
    pending.pending = 0


def withdraw(book, counted, pending):
    book._contributions["ann", 2].live = False


def be_in_two_states(book, counted, pending):
    counted.pending = 1


def hold_other_keys(book, counted, pending):
    book._contributions["ann", 2].shard_epochs = {(7, 7): 255}


def lose_keys(book, counted, pending):
    book._contributions["ann", 2].shard_epochs = {}


def count_without_a_state(book, counted, pending):
    book._contributions["ann", 2].counted = True


def count_for_nobody(book, counted, pending):
    book.tree.head.counted = 24


def have_one_twice(book, counted, pending):
    book._contributions["bob", 1].shard_epochs = dict(book._contributions["ann", 1].shard_epochs)


def wait_twice(book, counted, pending):
    book._contributions["bob", 3] = Contribution("bob", 3, dict(book._contributions["ann", 2].shard_epochs))


def lease_twice(book, counted, pending):
    lease = next(lease for lease in book._leases.values() if lease.shard_epochs)
    ((uid, _),) = lease.shard_epochs.items()
    book.shard_epochs[uid].holders.append(lease)


FAULTS = {
    lose: "are lost",
    count_too_much: "counted without a contribution",
    lose_pending: "are lost",
    withdraw: "pending without a contribution",
    be_in_two_states: "pending without a contribution",
    hold_other_keys: "the ledger has 8 samples",
    lose_keys: "the ledger has 0 samples",
    count_without_a_state: "its state says otherwise",
    count_for_nobody: "24 samples are counted",
    have_one_twice: "",
    wait_twice: "waits in two contributions",
    lease_twice: "in two states",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_ledger_that_counts_wrong_is_named(scene, fault):
    counted, _, pending = ledger_of(scene)
    fault(scene.book, counted, pending)
    scene.checks.ledger.whole(scene.book)
    assert scene.broken() and FAULTS[fault] in scene.broken()


def test_ledger_and_states_agree_to_the_sample(scene):
    """`scene`, whose digests are names, and a ledger with the same round."""
    ledger_of(scene)
    first = f"{1:064x}"
    scene.offers({("ann", 3): 8})
    scene.adopts(first, "root", 1, 16, [["ann", 1, 8], ["bob", 1, 8]]) if first not in scene.checks.commits else None
    agrees = scene.checks.ledger.agrees
    assert agrees(scene.book, [first], ()) == ""
    assert "the ledger's head is" in agrees(scene.book, ["another"], ())
    scene.book.tree.head.counted = 15
    assert "16 samples are in the state, 15 in the ledger" in agrees(scene.book, [first], ())
    del scene.book._contributions["bob", 1]
    scene.book.tree.head.counted = 8
    assert "is not in the ledger" in agrees(scene.book, [first], ())
    assert agrees(scene.book, [first], {"bob"}) == "", "it died before it could say so"


def test_what_a_peer_had_not_written_yet_is_lost_once_it_dies(scene):
    """Seed 16000312: two that came back waited for a state that nobody had."""
    assert not scene.checks.is_lost("one", {"bob"})
    scene.checks._on_disk = lambda machine: {"one"}
    scene.checks.died(scene.machine)
    assert not scene.checks.is_lost("one", {"bob"})
    scene.checks._on_disk = lambda machine: set()
    scene.checks.died(scene.machine)
    assert scene.checks.is_lost("one", {"bob"})


def test_a_head_that_died_with_all_who_held_it_is_the_ledgers_alone(scene):
    ledger_of(scene)
    first = f"{1:064x}"
    scene.adopts(first, "root", 1, 16, [["ann", 1, 8], ["bob", 1, 8]]) if first not in scene.checks.commits else None
    bob = SimpleNamespace(peer="bob", short="bob", sidecar=object())
    scene.offers({("bob", 1): 8})
    scene.adopts("anew", "base", 1, 8, [["bob", 1, 8]], bob)
    agrees = scene.checks.ledger.agrees
    assert "the ledger's head is" in agrees(scene.book, ["anew"], ())
    assert agrees(scene.book, ["anew"], {"ann"}) == ""


def test_where_all_who_could_report_a_state_died_the_ledger_may_count_a_branch_that_lost(scene):
    """Seed 13000012: the head's parent is known to nobody, so the ledger takes another state for it."""
    ledger_of(scene)
    first, lost, third, head = (f"{number:064x}" for number in (1, 2, 3, 4))
    scene.adopts(first, "root", 1, 16, [["ann", 1, 8], ["bob", 1, 8]]) if first not in scene.checks.commits else None
    scene.leases("eve", 1)
    scene.book.add_final(State(lost, first, 2, 24, (("eve", 1, 8),)), "eve")
    scene.leases("ann", 3)
    scene.book.add_final(State(head, third, 4, 32, (("ann", 3, 8),)), "ann")
    dan = [["dan", 1, 4], ["dan", 2, 4]]
    scene.offers({("dan", 1): 4, ("dan", 2): 4, ("ann", 3): 8})
    scene.adopts("second", first, 2, 20, dan[:1])
    scene.adopts(third, "second", 3, 24, dan[1:])
    scene.adopts(head, third, 4, 32, [["ann", 3, 8]])
    agrees = scene.checks.ledger.agrees
    assert scene.book.tree.head.digest == head and scene.book.counted_samples == 32
    assert agrees(scene.book, [head], {"dan"}) == ""
    assert "is not in the ledger" in agrees(scene.book, [head], ()), "dan lives, and could have said so"
    scene.book.tree.head.counted = 33
    assert "8 of a lost branch" in agrees(scene.book, [head], {"dan"})


def test_what_counts_is_leased_to_nobody_but_a_second_one_that_had_it_as_a_copy(scene):
    ledger_of(scene)
    scene.checks.ledger.watch(scene.book)
    ((uid, _),) = scene.book.lease("eve", 8).shard_epochs
    scene.book.shard_epochs[uid].counted |= 1
    scene.checks.ledger._shard_epoch(scene.book, scene.book.shard_epochs[uid], 1, 0)
    assert "is counted, and leased to be trained once more" in scene.broken()


def test_nobody_registers_what_somebody_else_has(scene):
    scene.checks.ledger.watch(scene.book)
    ((uid, _),) = scene.book.lease("eve", 8).shard_epochs
    keys = [f"{uid[0]}:{uid[1]}:{index}" for index in range(8)]
    scene.book.contribute("fay", 1, keys, offered=True)  # as one that was offered while the server was away: it repeats them
    assert not scene.broken()
    scene.book._refuse_foreign = lambda peer, uid, mask: None
    scene.book.contribute("gil", 1, keys)
    assert "which somebody else has" in scene.broken()


def test_who_has_a_copy_may_register_it_second(scene):
    scene.checks.ledger.watch(scene.book)
    ((uid, _),) = scene.book.lease("eve", 8).shard_epochs
    scene.book._late = lambda peer: [(scene.book.shard_epochs[uid], 0xFF)]
    assert [known for known, _ in scene.book.lease("gil", 8).shard_epochs] == [uid]
    keys = [f"{uid[0]}:{uid[1]}:{index}" for index in range(8)]
    scene.book.contribute("eve", 1, keys)
    assert scene.book.contribute("gil", 1, keys).repeated == 8
    assert not scene.broken()


def test_a_peer_would_go_on_from_what_it_saved_last(scene):
    old, new = (f"/state/samples-{samples:016d}-round-{7:08d}-abc.state" for samples in (90, 80))
    settled = "/settled/round-00000009-samples-0000000099-abc.state"
    scene.machine.disk.names = dict.fromkeys([settled, new])
    scene.checks.saved(scene.machine)
    assert not scene.broken()
    scene.machine.disk.names = dict.fromkeys([old, new, settled])
    scene.checks.saved(scene.machine)
    assert "would go on from" in scene.broken()


@pytest.mark.parametrize(("wait", "told"), [(False, ["withdrew", "gave up d"]), (True, ["withdrew"])])
def test_who_leaves_ends_on_the_state_once_its_last_contribution_is_refused(wait, told):
    """Seed 3 with --peers 3 --members --liars 4: a guest that left was said to differ by what it had no longer to keep."""
    heard = []
    learned = SimpleNamespace(withdrew=lambda: heard.append("withdrew"), gave_up=lambda digest: heard.append(f"gave up {digest}"))
    checks = SimpleNamespace(accounts=lambda *said: None, books=lambda *said: None)
    machine = SimpleNamespace(learned=learned, world=SimpleNamespace(checks=checks), _look=lambda sync: None)
    machine._notice_end = partial(Machine._notice_end, machine)
    sync = SimpleNamespace(
        _work=SimpleNamespace(state=SimpleNamespace(digest="d")), withdraw=lambda number: SyncReport(wait=wait), state_dict=lambda: {"contributions": ()}
    )  # fmt: skip
    accounts = SimpleNamespace(register=lambda number: None, apply=lambda report: None)
    Machine._take(machine, sync, accounts, SyncReport(frozen=7, wait=True), leaves=True)
    assert heard == told
