"""What a contribution weighs with the host's receipt and without one, and that nobody gains by a false one."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from peer.contracts import Member
from peer.sync.engine.net.messages import Join
from peer.sync.engine.net.streams import PeerLost
from peer.sync.engine.round import arrivals
from peer.sync.engine.round.groups import Group, NoGroup, Standing, Ticket, group_of, ticket_of
from peer.sync.engine.round.leading import JOIN
from peer.sync.engine.state import Head
from swarm.receipts import Receipts, sign_receipt
from swarm.run_config import RunConfig
from tests.peer.sync.swarm_tools import ANYTHING, ticket, until
from tests.peer.sync.test_matchmaking import peers

MOST = 100
STANDING = Standing(Head("p", 0), has_samples=True, ready_seconds=0.0)


@pytest.fixture
def receipts(key) -> Receipts:
    return Receipts.of(run_of(key))


def run_of(key) -> RunConfig:
    return RunConfig(run_name="ours", members_of=key.public)


def proved(key, peer, samples) -> Ticket:
    return replace(ticket(peer, samples=samples), receipt=sign_receipt(key, run_of(key), peer, 1, samples))


def weights(*tickets) -> list[int]:
    return [member.samples for member in Group.of(tickets, "x").weighed]


def test_with_a_receipt_a_contribution_counts_in_full_and_without_one_as_the_lower_median_of_those_with(key):
    honest = [proved(key, "a", 8), proved(key, "b", 12), proved(key, "c", 40), proved(key, "d", 10)]
    assert weights(*honest, ticket("liar", samples=100), ticket("late", samples=3)) == [8, 12, 40, 10, 3, 10]


def test_tiny_receipts_do_not_take_a_round_from_members_without_one(key):
    honest = [ticket(name, samples=200) for name in "cdefghijkl"]
    assert weights(proved(key, "a", 4096), proved(key, "b", 1), *honest) == [4096, 1, *[200] * 10], "the server is away"
    assert weights(*[proved(key, name, 1) for name in "ab"], ticket("liar", samples=4096), *honest) == [1, 1, *[200] * 11]


@pytest.mark.parametrize("claim", [1, 200, 4096])
def test_in_a_group_of_two_the_one_without_a_receipt_has_at_most_half_and_a_tiny_receipt_takes_no_more_than_half(key, claim):
    for samples in (1, 200, 4096):
        assert weights(proved(key, "a", samples), ticket("b", samples=claim)) == [samples, min(claim, samples)]
    assert weights(proved(key, "a", 1), ticket("b", samples=claim)) == [1, 1]


def test_where_nobody_has_a_receipt_all_count_as_they_say(key):
    """The server is away, or all bring their own pictures."""
    assert weights(ticket("a", samples=8), ticket("b", samples=100)) == [8, 100]
    assert Group.of([ticket("a", samples=8)], "x").announcement().receipts == ()


def test_what_a_contribution_weighs_is_part_of_its_groups_name(key):
    with_one, without = Group.of([proved(key, "a", 8), ticket("b")], "x"), Group.of([ticket("a", samples=8), ticket("b")], "x")
    assert with_one.id != without.id


FALSE = {
    "for more samples": lambda key: {"samples": 9},
    "for fewer samples": lambda key: {"samples": 7},
    "of another number": lambda key: {"number": 2},
    "of another peer": lambda key: {"receipt": sign_receipt(key, run_of(key), "b", 1, 8)},
    "of another run": lambda key: {"receipt": sign_receipt(key, RunConfig(run_name="theirs"), "a", 1, 8)},
    "forged": lambda key: {"receipt": "0" * 128},
}


@pytest.mark.parametrize("what", FALSE)
def test_a_ticket_with_a_receipt_that_is_not_exactly_its_own_is_refused(key, receipts, what):
    mine = {"parent": "p", "number": 1, "samples": 8, "norm": 1.0, "receipt": sign_receipt(key, run_of(key), "a", 1, 8)}
    assert ticket_of(Join(**mine), "a", MOST, receipts).receipt == mine["receipt"]
    with pytest.raises(PeerLost, match="host did not sign its receipt"):
        ticket_of(Join(**{**mine, **FALSE[what](key)}), "a", MOST, receipts)


def announced(key, us, changed, receipts):
    """What we make of a group of a leader, another member and us; `changed`: what the leader does to the receipts, in the order of the ids."""
    group = Group.of([proved(key, "leader", 8), proved(key, "other", 8), us], "x")
    return group_of(group.announcement().model_copy(update={"receipts": changed(group.receipts)}), us, "leader", STANDING, MOST, receipts)


LIES = {
    "forged one of another member's": (lambda r: (r[0], "0" * 128, r[2]), "a false receipt of other"),
    "gave itself another's": (lambda r: (r[1], r[1], r[2]), "a false receipt of leader"),
    "left ours out": (lambda r: (r[0], r[1], ""), "another receipt of ours"),
    "left all out": (lambda r: (), "no receipts, and we brought one"),
    "gave fewer than there are members": (lambda r: r[:2], "2 receipts for 3 members"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_leader_that_lies_about_receipts_is_the_culprit(key, receipts, lie):
    us, (changed, fault) = proved(key, "us", 8), LIES[lie]
    assert len(announced(key, us, lambda r: r, receipts).receipts) == 3
    with pytest.raises(PeerLost, match=fault) as caught:
        announced(key, us, changed, receipts)
    assert caught.value.culprits == ("leader",)


def test_a_run_that_is_not_for_members_has_no_receipts(key):
    """Some of its peers may not know the host's key, and could not tell a forged one."""
    receipt, none = sign_receipt(key, RunConfig(run_name="ours"), "other", 1, 8), Receipts.of(RunConfig(run_name="ours"))
    with pytest.raises(PeerLost, match="host did not sign its receipt"):
        ticket_of(Join(parent="p", number=1, samples=8, norm=1.0, receipt=receipt), "other", MOST, none)
    us, leader = ticket("us"), ticket("leader")
    group = Group.of([us, leader, replace(ticket("other"), receipt=receipt)], "x")
    with pytest.raises(PeerLost, match="a false receipt of other") as caught:
        group_of(group.announcement(), us, "leader", STANDING, MOST, none)
    assert caught.value.culprits == ("leader",)


def test_over_the_wire_an_unproved_claim_weighs_no_more_than_the_proved_and_a_false_receipt_comes_into_no_group(key, receipts, virtual):
    async def scenario(nodes):
        found = await peers(nodes, 4, receipts=receipts)
        for peer, samples in zip(found[:3], (8, 9, 10), strict=True):
            peer.brings = {"member": Member(peer.id, 1, samples), "receipt": sign_receipt(key, run_of(key), peer.id, 1, samples)}
        liar = found[3]
        liar.brings = {"member": Member(liar.id, 1, 100)}
        groups = await asyncio.gather(*(peer.form(found) for peer in found))
        assert len({group.id for group in groups}) == 1 and {m.peer: m.samples for m in groups[0].weighed}[liar.id] == 9
        for peer in found:
            peer.matchmaker.over()
        liar.brings["receipt"] = sign_receipt(key, run_of(key), liar.id, 1, 9)
        *others, refused = await asyncio.gather(*(peer.form(found) for peer in found), return_exceptions=True)
        assert isinstance(refused, NoGroup) and {len(group.members) for group in others} == {3}

    virtual(scenario)


def test_a_leader_waits_no_more_for_one_that_came_with_a_false_receipt_and_leaves_it_out(key, receipts, virtual):
    """It used to wait for as long as it grants to that peer, and granted more each time: the row member-over-claimed took 15 of 36 rounds."""

    async def scenario(nodes):
        leader, other, liar = await peers(nodes, 3, receipts=receipts)
        leader.company.averaged([liar.id])
        coming = asyncio.gather(leader.form([other, liar]), other.form([leader]))
        await until(lambda: leader.matchmaker._leading._gathering and other.id in leader.matchmaker._leading._gathering.waiting)
        clock = asyncio.get_running_loop().time
        began = clock()
        with contextlib.closing(await liar.streams.open(leader.id, JOIN)) as channel:
            await channel.send(Join(parent="p", number=1, samples=8, norm=1.0, receipt="0" * 128), seconds=60)
            with pytest.raises(PeerLost, match="host did not sign its receipt"):
                await channel.receive(ANYTHING, seconds=60)
        group, _ = await coming
        assert {member.peer for member in group.members} == {leader.id, other.id} and leader.company.left_out(liar.id)
        assert clock() - began < arrivals.UNKNOWN_SECONDS / 2 and liar.id not in leader.matchmaker._leading._arrivals._late

    virtual(scenario)
