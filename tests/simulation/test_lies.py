"""A reducer that signs two means of its share: members find it out, and nobody else is banned."""

from types import SimpleNamespace

import pytest

from simulation.checks import Breach, Checks, Commit
from simulation.faults import parse_strikes
from simulation.lies import MOST_PARTED, MOST_TAKEN, Lies
from simulation.world import Scenario, World
from tests.simulation.test_scenarios import assert_holds


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_reducer_that_gives_one_member_another_mean_is_banned_within_twenty_rounds(wire):
    world = World(Scenario(seed=10, peers=4, hours=0.015, faults=(), members=True, two_faced=True, wire=wire))
    outcome = world.play()
    assert_holds(outcome)
    lies = world.checks.lies
    assert lies.proven and lies.proven.keys() <= world.strangers and 1 <= min(lies.proven.values()) <= 3
    told = {machine.peer: machine.disk.root() / "state" / "proofs.json" for machine in world.machines}
    assert all(path.exists() for path in told.values()), "every honest peer has the proof"
    assert {*world.server.proven.peers()} == lies.proven.keys(), "so has the server"
    assert outcome.rounds > 8


def test_peers_that_die_and_lose_their_disks_are_not_framed_by_a_reducer_that_lies():
    strikes = "failpoint@60/1(name=mean_complete,action=power,seconds=5);failpoint@120/2(name=outer_step,action=kill,seconds=5)"
    world = World(Scenario(seed=10, peers=4, hours=0.05, members=True, two_faced=True, strikes=parse_strikes(strikes)))
    outcome = world.play()
    assert_holds(outcome)
    assert outcome.failpoints == {"mean_complete": 1, "outer_step": 1} and world.checks.lies.proven.keys() <= world.strangers


@pytest.mark.parametrize(("wire", "averaging"), [("fp16", "mean"), ("int4", "centered")])
def test_a_reducer_that_gives_all_one_wrong_mean_is_banned_within_twenty_rounds_and_its_state_discarded(wire, averaging):
    """It answers no checker, whose list of inputs came with its mean."""
    world = World(Scenario(seed=5, peers=4, hours=0.02, faults=(), members=True, wrong_mean=True, wire=wire, averaging=averaging))
    assert_holds(outcome := world.play())
    lies = world.checks.lies
    assert lies.proven and lies.proven.keys() <= world.strangers and 1 <= len(lies.taken[min(lies.proven)]) <= 20
    told = {machine.peer: machine.disk.root() / "state" / "proofs.json" for machine in world.machines}
    assert all(path.exists() for path in told.values()), "every honest peer has the proof"
    assert {*world.server.proven.peers()} == lies.proven.keys(), "so has the server"
    (wrong,) = world.checks.buried
    before = world.checks.commits[wrong].parent
    assert outcome.buried == 1 and world.server.bans.discarded == {wrong} and lies.made((before, world.checks.commits[wrong].members))
    lineage = world.checks.lineage(world.tip())
    assert before in lineage and wrong not in lineage, "the run goes on from the state before it"
    assert world.server.book.tree.get(wrong) is None and world.server.book.tree.get(before) is not None


# ---------------------------------------------------------------- the checks themselves


MEMBERS = (("ann", 1, 8), ("bob", 1, 8))


def checks(strangers=()):
    return Checks(SimpleNamespace(loop=SimpleNamespace(time=lambda: 1.0), strangers=set(strangers), stop=lambda: None))


def broken(checks):
    try:
        checks.raise_if_broken()
    except Breach as breach:
        return str(breach)
    return ""


def test_that_an_honest_peer_is_banned_is_a_breach():
    watched = checks(strangers=["QmLiar"])
    watched.closings({"proven": "QmLiar"})
    assert not broken(watched)
    watched.closings({"proven": "QmHonest"})
    assert "the honest peer Honest is banned" in broken(watched)


def test_a_state_that_no_liar_made_and_the_server_discards_is_a_breach():
    for made, wrong in (("wrong", ""), ("turned for one", "no liar made it"), ("honest", "no liar made it"), ("unknown", "no liar made it")):
        watched = checks()
        watched.lies.told("base", MEMBERS, "QmLiar")
        watched.lies.told("other", MEMBERS)
        parents = {"wrong": "base", "turned for one": "other", "honest": "third"}
        watched.commits |= {name: Commit(name, parent, 1, 16, MEMBERS, {}) for name, parent in parents.items()}
        watched.buries(made)
        assert wrong in broken(watched) and bool(broken(watched)) == bool(wrong)


def test_a_state_that_is_made_on_a_discarded_one_long_after_is_a_breach():
    clock = SimpleNamespace(now=0.0)
    world = SimpleNamespace(loop=SimpleNamespace(time=lambda: clock.now), strangers={"ann", "bob"}, stop=lambda: None, committed=lambda commit: None)
    world.run = SimpleNamespace(members_of="")
    watched = Checks(world)
    watched.discarded["one"] = 0.0
    watched._commit(None, "one", "base", 1, 16, MEMBERS)
    clock.now = 600.0
    watched._commit(None, "two", "one", 2, 24, (("ann", 2, 8),))
    assert not broken(watched), "by one that may not have heard of it"
    clock.now = 601.0
    watched._commit(None, "three", "two", 3, 32, (("ann", 3, 8),))
    assert "the state three was made on one, which the host had discarded 600 s before" in broken(watched)


def test_a_round_that_a_liar_parts_may_have_two_states_and_no_other_may():
    lies = Lies()
    lies.told("base", [list(member) for member in MEMBERS])
    assert lies.may_differ(("base", MEMBERS)) and not lies.may_differ(("one", MEMBERS)) and not lies.may_differ(("base", MEMBERS[:1]))


def test_lies_that_nobody_proves_are_a_breach_after_twenty_rounds():
    lies = Lies()
    assert not any(lies.parts((str(number), MEMBERS)) for number in range(MOST_PARTED - 1))
    assert not lies.parts(("0", MEMBERS)), "a third state of one round is no other round"
    assert "nobody has a proof" in lies.parts(("last", MEMBERS))
    assert not lies.proves("QmLiar", {"QmLiar"}) and not lies.parts(("more", MEMBERS))

def test_wrong_means_that_nobody_proves_are_a_breach_after_twenty_rounds_of_one_liar():
    lies = Lies()
    for number in range(MOST_TAKEN):
        for liar in ("QmOne", "QmTwo"):
            lies.told(f"{liar} {number}", MEMBERS, liar)
    assert not any(lies.takes((f"QmOne {number}", MEMBERS)) for number in range(MOST_TAKEN - 1))
    assert not lies.takes(("QmTwo 0", MEMBERS)) and not lies.takes(("an honest one", MEMBERS))
    assert "nobody has a proof" in lies.takes((f"QmOne {MOST_TAKEN - 1}", MEMBERS))
    assert not lies.proves("QmOne", {"QmOne"}) and not lies.takes((f"QmOne {MOST_TAKEN - 1}", MEMBERS))

