"""A member that fails is dropped, and its group closes again without it: only where nobody can have committed the first closing."""

import asyncio
import contextlib
import dataclasses
import logging

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine import failpoints
from peer.sync.engine.codec import Wire
from peer.sync.engine.net.streams import Refused, Streams
from peer.sync.engine.round import averaging, reduction
from peer.sync.engine.round.averaging import REDUCE, Averager, RoundFailed
from peer.sync.engine.round.company import Company
from peer.sync.engine.round.groups import Group, NoGroup, Standing, rank
from peer.sync.engine.round.leading import JOIN
from peer.sync.engine.round.matchmaking import Matchmaker
from peer.sync.engine.state import Head
from swarm.tasks import end_tasks
from tests.peer.sync.replicas import check_invariants, make_run, peers
from tests.peer.sync.swarm_tools import ANYTHING, PART, ticket, until

pytestmark = pytest.mark.usefixtures("small_parts")
SECONDS = 400.0
LARGE = 4 * PART
AGAIN = "closed again with 3 peers instead of 4"

# ---------------------------------------------------------------- whether a group is void


class Silent(Averager):
    """Takes all parts of its share, and gives nobody a mean."""

    async def _serve(self, channel):
        send = channel.send

        async def swallow(message, payload=b"", *, seconds):
            await (asyncio.Event().wait() if payload else send(message, payload, seconds=seconds))

        channel.send = swallow
        await super()._serve(channel)


class Stingy(Averager):
    """Sends NaN in place of each of its parts."""

    async def _talk(self, channel, share, run):
        await super()._talk(channel, share, dataclasses.replace(run, mine=torch.full_like(run.mine, 255)))


async def average(nodes, wire, *kinds, reducers=None):
    """What each of as many members comes to, by their ids; all reduce, or as many as `reducers` says."""
    members = {node.peer_id: kind(node.peer_id, streams, wire) for kind, (node, streams) in zip(kinds, await nodes.streams(len(kinds)), strict=True)}
    for member in members.values():
        await member.start()
    reducing = tuple(sorted([peer for peer, member in members.items() if type(member) is not Stingy][:reducers]))
    group = Group("p", tuple(Member(peer, 1, 1) for peer in sorted(members)), reducing, "x")
    ones = wire.encode(torch.ones(wire.size))
    results = await asyncio.gather(*(member.average(group, ones) for member in members.values()), return_exceptions=True)
    return {member: result for member, result in zip(members.values(), results, strict=True)}


def test_all_hear_that_a_reducer_gave_up_a_part_that_it_had_not_made(virtual):
    async def scenario(nodes):
        came = await average(nodes, Wire("fp16", LARGE), Averager, Averager, Averager, Stingy, reducers=2)
        assert len(came) == 4 and all(isinstance(result, RoundFailed) for result in came.values())
        assert [result.void for member, result in came.items() if type(member) is Averager] == [True] * 3

    virtual(scenario)


def test_who_has_given_all_its_means_does_not_know_what_the_others_have(virtual, monkeypatch):
    """The silent one has the whole mean itself."""
    for room in (averaging, reduction):
        monkeypatch.setattr(room, "PART_SECONDS", 1.0)
        monkeypatch.setattr(room, "COME_SECONDS", 1.0)

    async def scenario(nodes):
        came = await average(nodes, Wire("fp16", LARGE), Averager, Silent)
        failed, mean = came.values()
        assert isinstance(failed, RoundFailed) and not failed.void and isinstance(mean, averaging.Mean)

    virtual(scenario)


def test_who_dials_a_reducer_that_has_given_up_hears_that_nobody_has_the_mean(virtual):
    async def scenario(nodes):
        (node, streams), (_, late) = await nodes.streams(2)
        averager = Averager(node.peer_id, streams, Wire("fp16", 100))
        await averager.start()
        group = Group("p", (Member(node.peer_id, 1, 1), Member(late.peer_id, 1, 1)), (node.peer_id,), "x")
        giving_up = asyncio.create_task(averager.average(group, Wire("fp16", 100).encode(torch.ones(100))))
        await until(lambda: averager._reductions)
        await end_tasks(giving_up)
        with contextlib.closing(await late.open(node.peer_id, REDUCE)) as channel:
            await channel.send({"group": group.id}, seconds=5)
            with pytest.raises(Refused, match="it left") as caught:
                await channel.receive(ANYTHING, seconds=60)
        assert caught.value.void
        with contextlib.closing(await late.open(node.peer_id, REDUCE)) as channel:
            await channel.send({"group": "another"}, seconds=5)
            with pytest.raises(Refused, match="unknown group") as caught:
                await channel.receive(ANYTHING, seconds=60)
        assert not caught.value.void

    virtual(scenario)


# ---------------------------------------------------------------- who closes it again


class Meeting:
    """A node with a matchmaker, whose state is "p"."""

    def __init__(self, node):
        self.id, self.streams = node.peer_id, Streams(node)
        self.ticket, self.company = ticket(node.peer_id), Company(me=node.peer_id)
        standing = Standing(Head("p", 0), True, 0.0)
        self.matchmaker = Matchmaker(self.id, self.streams, lambda peer: standing, lambda *heard: False, 100, company=self.company)


async def closed(nodes, count):
    """Peers, the leader first, and the group that they have closed."""
    found = sorted([Meeting(await nodes.node()) for _ in range(count)], key=lambda peer: rank("p", peer.id))
    for peer in found:
        await peer.matchmaker.start()
    jobs = (peer.matchmaker.form(peer.ticket, {other.id: True for other in found if other is not peer}) for peer in found)
    groups = await asyncio.gather(*jobs)
    assert len({group.id for group in groups}) == 1 and groups[0].leader == found[0].id
    return found, groups[0]


def test_the_leader_closes_a_group_again_of_those_that_come_back(virtual):
    async def scenario(nodes):
        (leader, other, gone), first = await closed(nodes, 3)
        leader.matchmaker.over()
        jobs = (peer.matchmaker.again(first, peer.ticket, {gone.id} - {peer.id}) for peer in (leader, other))
        again, same = await asyncio.gather(*jobs)
        assert again.id == same.id != first.id and again.peers == {leader.id, other.id}

    virtual(scenario)


def test_who_failed_first_waits_until_its_leader_knows_that_the_group_is_void(virtual):
    """It is not told of the first closing once more, as one is whose stream broke before it heard of it."""

    async def scenario(nodes):
        (leader, other, gone), first = await closed(nodes, 3)
        waiting = asyncio.create_task(other.matchmaker.again(first, other.ticket, {gone.id}))
        await until(lambda: leader.matchmaker._leading._gathering and other.id in leader.matchmaker._leading._gathering.waiting)
        leader.matchmaker.over()
        again = await leader.matchmaker.again(first, leader.ticket, {gone.id})
        assert (await waiting).id == again.id and again.peers == {leader.id, other.id}

    virtual(scenario)


def test_a_leader_of_before_says_the_first_closing_again_and_nobody_goes_there(virtual):
    async def scenario(nodes):
        (leader, other, gone), first = await closed(nodes, 3)

        async def say_again(channel):
            await channel.receive(ANYTHING, seconds=5)
            await channel.send(first.announcement(), seconds=5)

        await leader.streams.serve(JOIN, say_again)
        with pytest.raises(NoGroup, match="closes no group again"):
            await other.matchmaker.again(first, other.ticket, {gone.id})

    virtual(scenario)


def test_without_its_leader_or_anybody_else_no_group_is_closed_again(virtual):
    async def scenario(nodes):
        (leader, other, third), first = await closed(nodes, 3)
        leader.matchmaker.over()
        with pytest.raises(NoGroup, match="its leader is gone"):
            await other.matchmaker.again(first, other.ticket, {leader.id})
        with pytest.raises(NoGroup, match="nobody else is left"):
            await leader.matchmaker.again(first, leader.ticket, {other.id, third.id})
        with pytest.raises(NoGroup, match="nobody came"):
            await leader.matchmaker.again(first, leader.ticket, {other.id})
        leader.company.blame([other.id])
        with pytest.raises(NoGroup, match=r"not led again: .* it is left out for now"):
            await other.matchmaker.again(first, other.ticket, set())
        leader.matchmaker._leading.redirect("p", third.id)
        with pytest.raises(NoGroup, match="leads no more"):
            await third.matchmaker.again(first, third.ticket, set())

    virtual(scenario)


# ---------------------------------------------------------------- what that is worth


async def four(nodes):
    """Peers that have made rounds together. Each reduces one part; a round takes 2 s."""
    found = await peers(nodes, 4, make_run(target_batch_size=320), size=LARGE)
    await until(lambda: all(len(peer.replica.met) == 3 for peer in found), SECONDS)
    return found


def ranked(peer, found) -> list[str]:
    """Who leads onto its state: the first, or the next one if that does not come."""
    return sorted((each.id for each in found), key=lambda one: rank(peer.head.digest, one))


def rounds_of(peer):
    return {line["round"]: line for line in peer.rounds()}


def assert_no_sample_is_lost(found):
    """In the lineage of the first each contribution is once, with its samples."""
    lines = {line["digest"]: line for peer in found for line in peer.rounds()}
    digest, members = found[0].head.digest, []
    while digest in lines:
        members += [tuple(member) for member in lines[digest]["members"]]
        digest = lines[digest]["parent"]
    assert len({(peer, number) for peer, number, _ in members}) == len(members)
    assert sum(samples for *_, samples in members) == found[0].head.header.samples
    check_invariants(*found)


def assert_averaged_without_others(left, number):
    """All of `left` averaged the round, and nobody else did."""
    lines = [rounds_of(peer)[number] for peer in left]
    assert len({line["digest"] for line in lines}) == 1 and {line["how"] for line in lines} == {"averaged"}
    assert {who for who, *_ in lines[0]["members"]} == {peer.id for peer in left}
    assert_no_sample_is_lost(left)


async def one_dies(nodes, monkeypatch, found, point, *, place):
    """The first peer that reaches the failpoint while it has this place among those who lead dies there: it, and the number of its round."""
    died = []

    async def die(at, who):
        peer = next(peer for peer in found if peer.id == who)
        if at == point and not died and who == ranked(peer, found)[place]:
            died.append((peer, peer.head.header.round + 1))
            ending = asyncio.create_task(peer.stop())
            nodes.ends_with_the_test(ending)
            await asyncio.Event().wait()

    monkeypatch.setattr(failpoints, "hook", die)
    await until(lambda: died, SECONDS)
    return died[0]


@pytest.mark.parametrize("point", ["group_closed", "first_part_sent"])
def test_when_a_member_dies_the_others_commit_that_round_without_it(virtual, monkeypatch, caplog, point):
    async def scenario(nodes):
        found = await four(nodes)
        gone, number = await one_dies(nodes, monkeypatch, found, point, place=-1)
        left = [peer for peer in found if peer is not gone]
        await until(lambda: all(peer.head.header.round > number for peer in left), SECONDS)
        assert AGAIN in caplog.text and f"round={number} not averaged" not in caplog.text
        assert_averaged_without_others(left, number)

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


class Mute(Averager):
    """Comes to no reducer."""

    async def _exchange(self, reducer, share, run):
        await asyncio.Event().wait()


@pytest.mark.parametrize("kind", [Mute, Stingy])
def test_when_a_member_sends_nothing_or_nonsense_the_others_commit_that_round_without_it(virtual, caplog, kind):
    async def scenario(nodes):
        found = await four(nodes)
        bad = found[0]
        bad.replica.rounds.averager.__class__ = kind
        left = found[1:]
        await until(lambda: any(AGAIN in record.message for record in caplog.records), SECONDS)
        number = max(peer.head.header.round for peer in left) + 1
        await until(lambda: all(peer.head.header.round > number for peer in left), SECONDS)
        assert_averaged_without_others(left, number)

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


@pytest.mark.parametrize("point", ["group_closed", "mean_complete"])
def test_when_the_leader_dies_the_others_look_who_has_committed(virtual, monkeypatch, caplog, point):
    async def scenario(nodes):
        found = await four(nodes)
        gone, _ = await one_dies(nodes, monkeypatch, found, point, place=0)
        left = [peer for peer in found if peer is not gone]
        at = max(peer.head.header.round for peer in found)
        await until(lambda: all(peer.head.header.round >= at + 2 for peer in left), SECONDS)
        await until(lambda: len({peer.head.digest for peer in left}) == 1, SECONDS)
        assert_no_sample_is_lost([*left, gone])

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)
