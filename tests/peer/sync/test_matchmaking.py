"""Who averages with whom. Real nodes; PATIENCE is cut where a test would only wait."""

import asyncio
import contextlib
import logging
import math
from dataclasses import replace

import pytest

from peer.contracts import Member
from peer.sync.engine import failpoints
from peer.sync.engine.net.messages import MAX_WAIT_SECONDS, Answer, BadMessage, Onward, read
from peer.sync.engine.net.streams import Broken, Channel, PeerLost, Refused, Streams
from peer.sync.engine.round import arrivals, calls, following, leading
from peer.sync.engine.round.calls import CALL
from peer.sync.engine.round.company import Company
from peer.sync.engine.round.groups import NO_RECEIPTS, Group, NoGroup, Seen, Standing, group_of, rank
from peer.sync.engine.round.leading import JOIN
from peer.sync.engine.round.matchmaking import Matchmaker
from peer.sync.engine.state import Head, better
from tests.peer.sync.swarm_tools import ANYTHING, ticket, until


class Peer:
    """A node with a matchmaker; `called` counts who wants it to average, `answered` names whose answer's head it heard.

    met: whom it has averaged with; no list: everybody.
    """

    def __init__(self, node, *, digest="p", has_samples=True, reduces=True, included=None, met=(), receipts=NO_RECEIPTS, **options):
        self.node, self.id, self.called, self.answered = node, node.peer_id, 0, []
        self.digest, self.has_samples, self.included = digest, has_samples, included or {}
        self.ready_seconds, self.samples, self.busy, self.fetches, self.trusted = 0.0, 0, False, False, frozenset()
        self.has_roles, self.highest_number = False, 20_000
        self.streams = Streams(node)
        self.met = set(met)
        self.company = Company(self.met, me=self.id, trusted=lambda: self.trusted)
        said = {"leads": reduces, "company": self.company, "receipts": receipts, **options}
        self.matchmaker = Matchmaker(self.id, self.streams, self.standing, self.heard, 100, **said)
        self.reduces, self.brings = reduces, {}

    def standing(self, peer) -> Standing:
        return Standing(Head(self.digest, self.samples), self.has_samples, self.ready_seconds, self.included, self.busy, self.trusted, self.has_roles, self.highest_number)

    def heard(self, peer: str, head: Head, ready: bool) -> bool:
        self.called += ready
        self.answered += [] if ready else [peer]
        return self.fetches and better(head, Head(self.digest, self.samples))

    def form(self, others, **options):
        expected = {other.id: other.reduces for other in others if other is not self}
        mine = replace(ticket(self.id, reduces=self.reduces), without=tuple(self.company.all_left_out()), **self.brings)
        return self.matchmaker.form(mine, expected, **options)


async def peers(nodes, count, **options) -> list[Peer]:
    """The best ranked first."""
    found = [Peer(await nodes.node(), **options) for _ in range(count)]
    for peer in found:
        await peer.matchmaker.start()
    return sorted(found, key=lambda peer: rank("p", peer.id))


async def mute(peer: Peer) -> None:
    """From now on `peer` takes calls and says nothing, until the test ends."""

    async def say_nothing(channel):
        await asyncio.Event().wait()

    await peer.streams.serve(CALL, say_nothing)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Who comes is in the group, however busy the machine."""
    monkeypatch.setattr(arrivals, "UNKNOWN_SECONDS", 100.0)


def test_a_group_closes_when_all_came_and_is_the_same_at_every_member(virtual):
    async def scenario(nodes):
        trio = await peers(nodes, 3)
        formed = await asyncio.gather(*(peer.form(trio) for peer in trio))
        assert len({group.id for group in formed}) == 1
        assert [m.peer for m in formed[0].members] == sorted(p.id for p in trio) == list(formed[0].reducers)
        assert formed[0].samples == 24
        for peer in trio:
            peer.matchmaker.over()
        again = await asyncio.gather(*(peer.form(trio) for peer in trio))
        assert again[0].id != formed[0].id and again[0].members == formed[0].members

    virtual(scenario)


def test_whoever_is_sent_on_finds_the_leader(virtual):
    async def scenario(nodes):
        best, middle, last = await peers(nodes, 3)
        # The last one knows only of the middle one, which goes to the best one.
        formed = await asyncio.gather(best.form([middle, last]), middle.form([best, last]), last.form([middle]))
        assert len({group.id for group in formed}) == 1 and len(formed[0].members) == 3

    virtual(scenario)


def test_a_peer_that_answers_a_call_and_does_not_come_is_named_silent(virtual):
    async def scenario(nodes):
        best, other, absent = await peers(nodes, 3)
        best.matchmaker._leading._arrivals.came(absent.id, 0.0)  # it was punctual: 1 s is granted to it, and all it needs to the other
        formed, theirs = await asyncio.gather(best.form([other, absent]), other.form([best, absent]))
        assert formed.id == theirs.id and {m.peer for m in formed.members} == {best.id, other.id}
        assert absent.id in formed.silent and absent.called

    virtual(scenario)


def test_nobody_waits_for_a_peer_that_is_dead_or_has_nothing_to_offer(virtual):
    async def scenario(nodes):
        best, idle, dead = await peers(nodes, 3)
        idle.has_samples = False
        await dead.node.close()
        with pytest.raises(NoGroup) as caught:
            await best.form([idle, dead])
        assert caught.value.silent == {dead.id}
        alone = await best.form([idle])
        assert [m.peer for m in alone.members] == [best.id]

    virtual(scenario)


def test_when_the_leader_dies_its_followers_form_a_group_of_their_own(virtual):
    async def scenario(nodes):
        leader, second, third = await peers(nodes, 3)
        waiting = [asyncio.create_task(peer.form([leader, second, third])) for peer in (second, third)]
        await until(lambda: leader.matchmaker._leading._gathering and len(leader.matchmaker._leading._gathering.waiting) == 2)
        await leader.node.close()
        one, two = await asyncio.gather(*waiting)
        assert one.id == two.id and {m.peer for m in one.members} == {second.id, third.id}

    virtual(scenario)


def test_a_follower_whose_stream_breaks_comes_again(virtual, monkeypatch, caplog):
    """It used to lead, and to wait for those who had gone to its leader, which waited for it."""
    broken = []

    async def break_once(point, peer):
        if point == "joined" and not broken:
            broken.append(peer)
            raise Broken("the stream broke")

    monkeypatch.setattr(failpoints, "hook", break_once)

    async def scenario(nodes):
        trio = await peers(nodes, 3)
        formed = await asyncio.gather(*(peer.form(trio) for peer in trio))
        assert len({group.id for group in formed}) == 1 and len(formed[0].members) == 3
        assert broken[0] != trio[0].id and "again: the stream broke" in caplog.text

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


def test_a_follower_that_goes_away_is_not_in_the_group(virtual):
    async def scenario(nodes):
        leader, stays, goes = await peers(nodes, 3)
        going = asyncio.create_task(goes.form([leader]))
        await until(lambda: leader.matchmaker._leading._gathering and goes.id in leader.matchmaker._leading._gathering.waiting)
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        await until(lambda: goes.id not in leader.matchmaker._leading._gathering.waiting)
        group, _ = await asyncio.gather(leader.form([stays]), stays.form([leader]))
        assert {m.peer for m in group.members} == {leader.id, stays.id}

    virtual(scenario)


def test_followers_are_told_at_once_when_their_leader_has_moved_on(virtual):
    async def scenario(nodes):
        leader, follower = await peers(nodes, 2)
        waiting = asyncio.create_task(follower.form([leader]))
        await until(lambda: leader.matchmaker._leading._gathering and leader.matchmaker._leading._gathering.waiting)
        leader.digest = "q"
        leader.matchmaker.moved()
        with pytest.raises(NoGroup) as caught:
            await waiting
        assert not caught.value.silent  # it answered

    virtual(scenario)


REFUSED = {
    # First: whoever sends what no honest peer sends is left out from then on, and refused for that.
    "a contribution that is in the state": ({"number": 3}, "is in the state already"),
    "a number that no state may hold": ({"number": 20_001}, "no state may hold its contribution's number 20001"),
    "another parent": ({"parent": "q"}, "averages onto q"),
    "no samples": ({"samples": 0}, "0 samples, 1 to 100 are allowed"),
    "too many samples": ({"samples": 101}, "101 samples"),
    "samples that are no number": ({"samples": "many"}, "samples: Input should be a valid integer"),
    "a negative number": ({"number": -1}, "number: Input should be greater than or equal to 0"),
    "a norm that is no number": ({"norm": math.nan}, "norm: Input should be a finite number"),
    "a norm beyond any": ({"norm": 1e300}, "norm: Input should be less than or equal to"),
    "number 0": ({"number": 0}, "contribution number 0"),
    "no parent": ({"parent": None}, "parent: Input should be a valid string"),
}


def test_a_ticket_out_of_bounds_is_refused_with_the_reason(virtual, caplog):
    async def scenario(nodes):
        leader, joiner = await peers(nodes, 2)
        leader.included = {joiner.id: 3}
        for what, (change, reason) in REFUSED.items():
            channel = await joiner.streams.open(leader.id, JOIN)
            await channel.send({"parent": "p", "number": 4, "samples": 5, "norm": 0.5, "reduces": True, **change}, seconds=60)
            with pytest.raises(PeerLost, match=reason):
                await channel.receive(ANYTHING, seconds=60)
            channel.close()
            assert not leader.matchmaker._leading._gathering, what
        assert leader.company.offences(joiner.id) == 1, "while it is left out, it is not for longer"

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    for what, (_, reason) in REFUSED.items():
        assert any(line.startswith("refused ") and reason in line for line in said), what


def test_a_peer_that_cannot_be_dialled_never_leads(virtual):
    async def scenario(nodes):
        server = Peer(await nodes.node())
        client = Peer(await nodes.node(client_mode=True), reduces=False)
        for peer in (server, client):
            await peer.matchmaker.start()
        formed = await asyncio.gather(client.form([server]), server.form([client]))
        assert formed[0].id == formed[1].id and formed[0].reducers == (server.id,)
        channel = await server.streams.open(client.id, JOIN)  # the connection that the client opened serves both ways
        await channel.send({"parent": "p", "number": 1, "samples": 5, "norm": 0.5, "reduces": True}, seconds=60)
        with pytest.raises(PeerLost, match="leads nobody"):
            await channel.receive(ANYTHING, seconds=60)
        channel.close()

    virtual(scenario)


def announcement(us, leader):
    members = sorted([[us, 1, 8, 0.0], [leader, 1, 8, 0.0]])
    return {"members": members, "reducers": sorted([us, leader]), "attempt": "x"}


FORGED = {
    "without us": lambda a, us, leader: {**a, "members": [[leader, 1, 8, 0.0]], "reducers": [leader]},
    "without itself": lambda a, us, leader: {**a, "reducers": [us]},
    "with another weight for us": lambda a, us, leader: {**a, "members": sorted([[us, 1, 9, 0.0], [leader, 1, 8, 0.0]])},
    "with another norm of ours": lambda a, us, leader: {**a, "members": sorted([[us, 1, 8, 0.5], [leader, 1, 8, 0.0]])},
    "with a weight above the cap": lambda a, us, leader: {**a, "members": sorted([[us, 1, 8, 0.0], [leader, 1, 10**9, 0.0]])},
    "with a member twice": lambda a, us, leader: {**a, "members": sorted([*a["members"], [leader, 2, 8, 0.0]])},
    "with a reducer twice": lambda a, us, leader: {**a, "reducers": sorted([us, leader, leader])},
    "out of order": lambda a, us, leader: {**a, "members": a["members"][::-1]},
    "with a number that is in the state": lambda a, us, leader: {**a, "members": sorted([[us, 1, 8, 0.0], [leader, 1, 8, 0.0], ["zz", 3, 8, 0.0]])},
    "with a number that no state may hold": lambda a, us, leader: {**a, "members": sorted([*a["members"], ["zz", 20_001, 8, 0.0]])},
    "of garbage": lambda a, us, leader: {"members": 7, "reducers": None},
    "with members that are none": lambda a, us, leader: {**a, "members": [[us]]},
    "on to one that ranks behind it": lambda a, us, leader: {"leader": us},
    "on to nobody": lambda a, us, leader: {"leader": 5},
}


FAULTS = {
    "without us": "a group without us or itself",
    "without itself": "a group without us or itself",
    "with another weight for us": "a group without us or itself",
    "with another norm of ours": "another norm of our contribution",
    "with a weight above the cap": "a member with 1000000000 samples",
    "with a member twice": "a group out of order",
    "with a reducer twice": "a group out of order",
    "out of order": "a group out of order",
    "with a number that is in the state": "a contribution that is in the state already",
    "with a number that no state may hold": "a contribution whose number no state may hold",
}


def test_a_forged_announcement_is_refused(virtual, caplog):
    async def scenario(nodes):
        leader, victim = sorted([Peer(await nodes.node()), Peer(await nodes.node())], key=lambda peer: rank("p", peer.id))
        victim.included = {"zz": 3}

        async def lie(channel):
            await channel.receive(ANYTHING, seconds=60)
            await channel.send(forge(announcement(victim.id, leader.id), victim.id, leader.id), seconds=60)
            await channel.hung_up(60)

        await leader.streams.serve(CALL, leader.matchmaker._calls._answer)
        await leader.streams.serve(JOIN, lie)
        for what, forge in FORGED.items():  # noqa: B007 (lie uses it)
            with pytest.raises(NoGroup) as caught:
                group = await victim.form([leader])
                pytest.fail(f"{what}: {group}")
            assert caught.value.culprits == {leader.id}, what
            assert f"{leader.id[-6:]} announced {FAULTS.get(what, '')}" in caplog.text or what not in FAULTS, what
            caplog.clear()

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


def test_who_was_sent_on_is_in_no_group_of_ours_although_it_has_not_heard_so_yet(virtual):
    async def scenario(nodes):
        (peer,) = await peers(nodes, 1)
        answer = asyncio.get_running_loop().create_future()
        book = peer.matchmaker._leading._gathering_onto("p")
        peer.matchmaker._leading._replace(book, "QmJoiner", (ticket("QmJoiner"), answer))
        peer.matchmaker._leading.redirect("p", "QmLeader")
        assert answer.result() == Onward(leader="QmLeader") and not book.waiting

    virtual(scenario)


@pytest.mark.parametrize("claim", [float("nan"), float("inf"), -1e300, 1e300, "soon", None])
def test_no_claim_about_time_makes_a_leader_wait_long(claim):
    answer = {"coming": True, "ready_seconds": claim, "head": vars(Head("p", 0)), "busy": False, "behind": False, "reason": ""}
    with contextlib.suppress(BadMessage):
        assert 0 <= read(Answer, answer).ready_seconds <= MAX_WAIT_SECONDS


def test_garbage_in_answer_to_a_call_is_no_answer(virtual):
    async def scenario(nodes):
        (caller,) = await peers(nodes, 1)
        liar = Peer(await nodes.node())

        async def lie(channel: Channel) -> None:
            await channel.receive(ANYTHING, seconds=60)
            await channel.send(
                {"coming": True, "reason": "", "ready_seconds": float("nan"), "busy": False, "behind": False, "head": vars(Head("p", 0))},
                seconds=60,
            )

        await liar.streams.serve(CALL, lie)
        assert await caller.matchmaker._calls._call(liar.id, "p") is None

    virtual(scenario)


def test_nobody_waits_for_a_peer_whose_step_takes_longer_than_the_round_is_worth(virtual, caplog):
    async def scenario(nodes):
        best, other, slow = await peers(nodes, 3)
        slow.ready_seconds = 50.0
        formed, theirs = await asyncio.gather(best.form([other, slow], patience=5.0), other.form([best, slow], patience=5.0))
        assert formed.id == theirs.id and {m.peer for m in formed.members} == {best.id, other.id}
        assert not formed.silent and slow.called  # it is told, and comes into the next one
        assert f"not waiting for {slow.id[-6:]} (ready in 50 s)" in caplog.text

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


def test_whoever_finds_the_others_averaging_waits_for_how_that_ends(virtual, caplog):
    async def scenario(nodes):
        busy, late = await peers(nodes, 2)
        busy.busy = True
        waiting = asyncio.create_task(late.form([busy]))
        await until(lambda: busy.matchmaker._leading._gathering and late.id in busy.matchmaker._leading._gathering.waiting)
        busy.busy = False  # its round failed: it tries again, with the one that came meanwhile
        ours, theirs = await asyncio.gather(busy.form([late]), waiting)
        assert ours.id == theirs.id and len(ours.members) == 2
        assert f"not waiting for {busy.id[-6:]} (it is averaging)" in caplog.text

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


@pytest.mark.parametrize(("average_seconds", "culprits"), [(60.0, 1), (3600.0, 0)])
def test_who_averages_for_longer_than_any_average_takes_is_waited_for_no_longer_and_left_out(virtual, average_seconds, culprits):
    """One that said so held all others for 300 s on each state onto which it ranked first."""

    async def scenario(nodes):
        busy, late = await peers(nodes, 2, average_seconds=average_seconds)
        busy.busy = True
        began = nodes.clock()
        with pytest.raises(NoGroup) as caught:
            await late.form([busy])
        assert len(caught.value.culprits) == culprits and nodes.clock() - began == pytest.approx(90 if culprits else 300, abs=15)

    virtual(scenario)


def test_who_hears_of_a_better_state_in_answer_to_a_call_forms_no_group_on_the_old_one(virtual):
    async def scenario(nodes):
        caller, ahead = await peers(nodes, 2)
        caller.fetches, ahead.digest, ahead.samples = True, "q", 7
        with pytest.raises(NoGroup, match=f"{ahead.id[-6:]} has a better state, q"):
            await caller.form([ahead])

    virtual(scenario)


def test_who_is_a_state_behind_is_given_time_to_follow(virtual):
    async def scenario(nodes):
        leader, behind = await peers(nodes, 2)
        leader.samples, behind.digest = 7, "older"
        forming = asyncio.create_task(leader.form([behind], behind_seconds=30.0))
        await until(lambda: leader.matchmaker._leading._gathering is not None)
        behind.digest, behind.samples = "p", 7
        ours, theirs = await asyncio.gather(forming, behind.form([leader]))
        assert ours.id == theirs.id and len(ours.members) == 2

    virtual(scenario)


def test_a_leader_that_is_stopped_costs_its_followers_a_few_beats(virtual, monkeypatch, caplog):
    monkeypatch.setattr(leading, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(following, "BEAT_SECONDS", 0.2)

    async def scenario(nodes):
        leader, follower = sorted([Peer(await nodes.node()), Peer(await nodes.node())], key=lambda peer: rank("p", peer.id))

        async def stopped(channel: Channel) -> None:
            await channel.receive(ANYTHING, seconds=60)
            monkeypatch.setattr(following, "ANSWER_SECONDS", 1.0)  # from now on: an answer to the call may take its time
            for _ in range(3):
                await channel.send({"wait": True}, seconds=60)
                await asyncio.sleep(0.2)
            await asyncio.Event().wait()

        await leader.streams.serve(CALL, leader.matchmaker._calls._answer)
        await leader.streams.serve(JOIN, stopped)
        with pytest.raises(NoGroup) as caught:
            await follower.form([leader])
        assert caught.value.silent == {leader.id} and not caught.value.culprits  # it may be stopped, or dead
        assert f"not led by {leader.id[-6:]}: {leader.id[-6:]} does not answer" in caplog.text

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


def test_a_leader_that_floods_its_follower_with_signs_of_life_is_left_out(virtual, caplog):
    """Each cost 69 us, and as long as more were there nothing else had its turn: 1.7 Mbit/s of them kept a follower from all it does."""

    async def scenario(nodes):
        leader, follower = sorted([Peer(await nodes.node()), Peer(await nodes.node())], key=lambda peer: rank("p", peer.id))

        async def flood(channel: Channel) -> None:
            await channel.receive(ANYTHING, seconds=60)
            for _ in range(1000):
                await channel.send({"wait": True}, seconds=60)

        await leader.streams.serve(CALL, leader.matchmaker._calls._answer)
        await leader.streams.serve(JOIN, flood)
        with pytest.raises(NoGroup) as caught:
            await follower.form([leader])
        assert caught.value.culprits == {leader.id} and "says more often that it lives than every 3 s" in caplog.text

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


def test_a_leader_whose_trainer_stands_still_tells_its_followers(virtual, monkeypatch):
    monkeypatch.setattr(leading, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(following, "BEAT_SECONDS", 0.2)

    async def scenario(nodes):
        leader, follower = await peers(nodes, 2)
        waiting = asyncio.create_task(follower.form([leader]))
        await until(lambda: leader.matchmaker._leading._gathering and leader.matchmaker._leading._gathering.waiting)
        leader.has_samples = False
        with pytest.raises(NoGroup) as caught:
            await waiting
        assert not caught.value.silent and not leader.matchmaker._leading._gathering.waiting

    virtual(scenario)


def test_a_group_with_one_whom_we_leave_out_is_refused(virtual, caplog):
    async def scenario(nodes):
        leader, victim = sorted([Peer(await nodes.node()), Peer(await nodes.node())], key=lambda peer: rank("p", peer.id))
        victim.company.blame(["zz"])

        async def lie(channel):
            await channel.receive(ANYTHING, seconds=60)
            said = announcement(victim.id, leader.id)
            await channel.send({**said, "members": sorted([*said["members"], ["zz", 1, 8, 0.0]])}, seconds=60)
            await channel.hung_up(60)

        await leader.streams.serve(CALL, leader.matchmaker._calls._answer)
        await leader.streams.serve(JOIN, lie)
        with pytest.raises(NoGroup):
            await victim.form([leader])
        assert "announced a group with zz, which we leave out" in caplog.text

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


def test_a_leader_that_lives_and_never_leads_is_given_up(virtual, monkeypatch, caplog):
    monkeypatch.setattr(leading, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(following, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(following, "JOIN_SECONDS", 0.5)

    async def scenario(nodes):
        leader, follower = await peers(nodes, 2)
        with pytest.raises(NoGroup) as caught:
            await follower.form([leader], patience=0.1)
        assert caught.value.silent == caught.value.culprits == {leader.id} and caught.value.at_once
        assert "lives, but has not led within 1 s" in caplog.text

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


def test_whose_work_is_in_the_state_leads_before_whose_is_not(virtual):
    """A key that ranks first for a state is found in no time; a place in the state costs a round."""

    async def scenario(nodes):
        trio = await peers(nodes, 3)
        for peer in trio:
            peer.included = {trio[2].id: 0}
        formed = await asyncio.gather(*(peer.form(trio) for peer in trio))
        assert len({group.id for group in formed}) == 1 and {group.leader for group in formed} == {trio[2].id}

    virtual(scenario)


def trust(those, named):
    for peer in those:
        peer.trusted = frozenset(other.id for other in named)


@pytest.mark.parametrize("count", [1, 2])
def test_one_whom_the_host_trusts_leads_and_where_there_are_fewer_than_three_all_reduce(virtual, count):
    async def scenario(nodes):
        found = await peers(nodes, 4)
        trust(found, found[4 - count :])
        for peer in found:
            peer.included = {found[0].id: 0}
        formed = await asyncio.gather(*(peer.form(found) for peer in found))
        assert len({group.id for group in formed}) == 1 and {group.leader for group in formed} == {found[4 - count].id}
        assert set(formed[0].reducers) == {peer.id for peer in found}

    virtual(scenario)


def test_of_three_whom_the_host_trusts_one_leads_and_nobody_else_reduces(virtual):
    async def scenario(nodes):
        found = await peers(nodes, 5)
        trust(found, found[2:])
        formed = await asyncio.gather(*(peer.form(found) for peer in found))
        assert len({group.id for group in formed}) == 1 and {group.leader for group in formed} == {found[2].id}
        assert set(formed[0].reducers) == {peer.id for peer in found[2:]} and len(formed[0].members) == 5

    virtual(scenario)


def test_a_helper_is_not_needed_where_three_reduce_whom_the_host_trusts_and_hears_so(virtual):
    async def scenario(nodes):
        *found, helper = await peers(nodes, 4)
        trust([*found, helper], found)
        expected = {peer.id: True for peer in found}
        assists = helper.matchmaker.form(replace(ticket(helper.id), member=Member(helper.id, 0, 0)), expected)
        *formed, refused = await asyncio.gather(*(peer.form([*found, helper]) for peer in found), assists, return_exceptions=True)
        assert len({group.id for group in formed}) == 1 and helper.id not in formed[0].peers
        assert isinstance(refused, NoGroup) and not refused.culprits

    virtual(scenario)


@pytest.mark.parametrize(
    ("reducers", "trusted", "taken"),
    [
        ("abcd", "bcd", False),
        ("abcd", "cd", True),
        ("bcd", "bcd", True),
        ("abcd", "abc", True),  # it leads, is trusted, and may know of one more than we
    ],
)
def test_in_a_group_led_by_one_whom_the_host_does_not_trust_nobody_else_reduces_than_those_that_it_trusts(reducers, trusted, taken):
    """The leader may not have heard yet: nobody is blamed."""
    said = Group("p", tuple(Member(peer, 1, 8) for peer in "abcd"), tuple(reducers), "x", (0.0,) * 4).announcement()
    standing = Standing(Head("p", 0), has_samples=True, ready_seconds=0.0, trusted=frozenset(trusted))
    if taken:
        assert group_of(said, ticket("b", reduces=True), reducers[0], standing, 100).reducers == tuple(reducers)
        return
    with pytest.raises(Refused, match="lets others reduce than those that the host trusts") as caught:
        group_of(said, ticket("b"), reducers[0], standing, 100)
    assert not caught.value.culprits


def test_who_hears_while_it_leads_that_the_host_trusts_three_of_those_who_came_leads_nobody(virtual):
    async def scenario(nodes):
        leader, *others, slow = found = await peers(nodes, 5)
        slow.ready_seconds = 1.0
        attempts = [asyncio.create_task(peer.form(found)) for peer in (leader, *others)]
        await asyncio.sleep(0.8)
        trust([leader], others)
        attempts.append(asyncio.create_task(slow.form(found)))
        results = await asyncio.gather(*attempts, return_exceptions=True)
        assert "one of them leads" in str(results[0]) and not results[0].culprits
        assert len({group.id for group in results[1:]}) == 1 and leader.id not in results[1].peers, results

    virtual(scenario)


def test_one_that_is_sent_on_to_one_that_ranks_behind_blames_nobody_where_the_host_may_trust_some(virtual):
    """One of the two may have heard more of that than the other."""

    async def scenario(nodes):
        first, second, third = await peers(nodes, 3)
        following = third.matchmaker._following
        with pytest.raises(PeerLost) as caught:
            following._onward(first.id, second.id, ticket(third.id))
        assert not isinstance(caught.value, Refused) and set(caught.value.culprits) == {first.id}
        third.has_roles = True
        with pytest.raises(Refused, match="does not rank before it"):
            following._onward(first.id, second.id, ticket(third.id))
        third.trusted = frozenset([second.id])
        assert following._onward(first.id, second.id, ticket(third.id)) == second.id

    virtual(scenario)


def test_a_member_that_leaves_out_one_whom_the_host_trusts_loses_its_own_place(virtual):
    """Else two that the host trusts were left, and it would reduce."""

    async def scenario(nodes):
        for named in range(1, 4):
            *trusted, liar = found = await peers(nodes, 4)
            trust(found, trusted)
            liar.company.blame([trusted[named % 3].id])
            formed = await asyncio.gather(*(peer.form(found) for peer in found), return_exceptions=True)
            groups = [outcome for outcome in formed if isinstance(outcome, Group)]
            assert groups and all(set(group.reducers) == {peer.id for peer in trusted} for group in groups), formed

    virtual(scenario)


def test_a_stranger_reduces_from_its_second_round_on(virtual):
    async def scenario(nodes):
        leader, friend, newcomer = trio = await peers(nodes, 3)
        leader.met.add(friend.id)
        leader.matchmaker._company.answered(newcomer.id)
        first = await asyncio.gather(*(peer.form(trio) for peer in trio))
        assert len({group.id for group in first}) == 1 and newcomer.id not in first[0].reducers and len(first[0].members) == 3
        leader.company.averaged(first[0].peers)
        for peer in trio:
            peer.matchmaker.over()
        again = await asyncio.gather(*(peer.form(trio) for peer in trio))
        assert newcomer.id in again[0].reducers

    virtual(scenario)


def test_a_peer_that_is_left_out_is_neither_expected_to_come_nor_let_in_nor_followed(virtual, caplog):
    async def scenario(nodes):
        best, other, bad = await peers(nodes, 3)
        for peer in (best, other):
            peer.company.blame([bad.id])
        with pytest.raises(PeerLost, match="it is left out for now"):
            await bad.matchmaker._following._join(best.id, ticket(bad.id), 60)
        assert (await bad.matchmaker._calls._call(best.id, "p")).reason == "you are left out for now" and not best.called
        group, _ = await asyncio.gather(best.form([other]), other.form([best]))
        assert {member.peer for member in group.members} == {best.id, other.id}
        best.matchmaker.over()
        best.matchmaker._leading.redirect("p", bad.id)
        with pytest.raises(NoGroup):
            await other.form([best])
        assert f"points to {bad.id[-6:]}, which is left out" in caplog.text

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


def test_a_group_holds_no_two_of_whom_one_leaves_the_other_out(virtual):
    """The leader saw nothing: one word stands against another."""

    async def scenario(nodes):
        leader, one, other = await peers(nodes, 3)
        one.company.blame([other.id])
        results = await asyncio.gather(leader.form([one, other]), one.form([leader]), other.form([leader]), return_exceptions=True)
        assert len({result.id for result in results if not isinstance(result, NoGroup)}) == 1
        assert len(results[0].members) == 2 and sum(isinstance(result, NoGroup) for result in results) == 1

    virtual(scenario)


def test_a_stranger_that_came_and_was_sent_away_for_a_members_word_is_not_to_blame(virtual):
    """Else a member would keep newcomers out of 1, 4, 16, 64 rounds by naming them."""

    async def scenario(nodes):
        leader, member, newcomer = await peers(nodes, 3)
        leader.met.add(member.id)
        leader.company.answered(newcomer.id)
        member.company.blame([newcomer.id])
        led, theirs, away = await asyncio.gather(leader.form([member, newcomer]), member.form([leader]), newcomer.form([leader]), return_exceptions=True)
        assert led.id == theirs.id and len(led.members) == 2 and isinstance(away, NoGroup)
        assert led.silent == {newcomer.id}, "its samples wait elsewhere, and hold nobody up"
        assert not led.culprits and not led.slow and not theirs.late

    virtual(scenario)


def test_a_stranger_that_promises_and_does_not_come_is_named_and_its_leaders_word_is_passed_on(virtual, monkeypatch):
    monkeypatch.setattr(leading, "STRANGER_COME_SECONDS", 0.3)
    monkeypatch.setattr(calls, "STRANGER_ANSWER_SECONDS", 60.0)  # however busy the machine

    async def scenario(nodes):
        leader, follower, absent = await peers(nodes, 3)
        leader.met.add(follower.id)
        leader.company.answered(absent.id)  # a new one would not be waited for at all
        leader.matchmaker._leading._arrivals.came(absent.id, 100.0)  # what it is granted otherwise
        led, theirs = await asyncio.gather(leader.form([follower, absent], patience=0.1), follower.form([leader, absent], patience=100.0))
        assert led.id == theirs.id and len(led.members) == 2
        assert led.culprits == led.slow == {absent.id} == set(theirs.late) and theirs.leader == leader.id

    virtual(scenario)


def test_nobody_waits_for_a_stranger_that_says_nothing(virtual):
    async def scenario(nodes):
        caller, friend = await peers(nodes, 2)
        silent = Peer(await nodes.node())
        await mute(silent)
        caller.met.add(friend.id)
        expected = {friend.id: True, silent.id: True}
        answers = await caller.matchmaker._calls.all_answers(caller.matchmaker._calls.call_all(expected, "p"), expected, seen := Seen())
        assert set(answers) == {friend.id} and not seen.culprits  # a new one: not even a second
        caller.company.answered(silent.id)
        answers = await caller.matchmaker._calls.all_answers(caller.matchmaker._calls.call_all(expected, "p"), expected, seen)
        assert set(answers) == {friend.id} and seen.culprits == seen.slow == {silent.id}
        assert not caller.company.has_answered(silent.id)

    virtual(scenario)


@pytest.mark.parametrize("dialled", [False, True])
def test_who_follows_does_not_wait_for_answers_that_its_leader_can_do_without(virtual, monkeypatch, dialled):
    """A dial through a firewall that drops it takes 10 s to fail: too late for a leader that waits 2 s for a newcomer."""
    monkeypatch.setattr(calls, "ANSWER_SECONDS", 1000.0)

    async def scenario(nodes):
        ranked = sorted([Peer(await nodes.node()) for _ in range(3)], key=lambda peer: rank("p", peer.id))
        silent, leader, follower = ranked if dialled else (ranked[2], *ranked[:2])  # one that would lead, or one that nobody can dial
        await mute(silent)
        await leader.matchmaker.start()
        await follower.matchmaker.start()
        silent.reduces = dialled
        led, theirs = await asyncio.wait_for(asyncio.gather(leader.form([follower]), follower.form([leader, silent])), 60)
        assert led.id == theirs.id and {m.peer for m in led.members} == {leader.id, follower.id}

    virtual(scenario)


def test_who_cannot_be_dialled_waits_a_second_for_others_that_cannot_either(virtual, monkeypatch):
    monkeypatch.setattr(calls, "ANSWER_SECONDS", 1000.0)

    async def scenario(nodes):
        (helper,) = await peers(nodes, 1)
        helper.has_samples = False  # it does not lead: so all are asked
        client, other = [Peer(await nodes.node(), reduces=False) for _ in range(2)]
        await mute(other)
        with pytest.raises(NoGroup) as caught:
            await asyncio.wait_for(client.form([helper, other]), 60)
        assert caught.value.silent == {other.id} and not caught.value.culprits

    virtual(scenario)


def test_a_stranger_before_our_leader_that_never_answered_is_not_waited_for(virtual, monkeypatch):
    monkeypatch.setattr(calls, "ANSWER_SECONDS", 1000.0)
    monkeypatch.setattr(calls, "_OTHERS_SECONDS", 1000.0)

    async def scenario(nodes):
        stranger, leader, follower = sorted([Peer(await nodes.node()) for _ in range(3)], key=lambda peer: rank("p", peer.id))
        await mute(stranger)
        await leader.matchmaker.start()
        await follower.matchmaker.start()
        follower.met.add(leader.id)
        led, theirs = await asyncio.wait_for(asyncio.gather(leader.form([follower]), follower.form([stranger, leader])), 60)
        assert led.id == theirs.id

    virtual(scenario)


def test_a_stranger_that_lives_and_never_leads_is_only_slow(virtual, monkeypatch):
    """It may be an honest newcomer whose own dials take long."""
    monkeypatch.setattr(leading, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(following, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(following, "STRANGER_JOIN_SECONDS", 0.5)
    monkeypatch.setattr(calls, "STRANGER_ANSWER_SECONDS", 60.0)

    async def scenario(nodes):
        leader, follower = await peers(nodes, 2)
        follower.met.add("QmSomebodyElse")
        with pytest.raises(NoGroup) as caught:
            await follower.form([leader], patience=0.1)
        assert caught.value.silent == caught.value.culprits == caught.value.slow == {leader.id}

    virtual(scenario)


def test_who_was_sent_on_to_one_that_is_gone_comes_back_and_names_that_one(virtual, caplog):
    async def scenario(nodes):
        best, middle, last = await peers(nodes, 3)
        middle.matchmaker._leading.redirect("p", best.id)
        await best.node.close()
        forming = asyncio.create_task(last.form([middle]))
        await until(lambda: f"not led by {best.id[-6:]}" in caplog.text)
        middle.matchmaker._leading._gathering.leader = None  # it has noticed
        led, theirs = await asyncio.gather(middle.form([last]), forming)
        assert led.id == theirs.id and theirs.leader == middle.id
        assert theirs.silent == {best.id} and not theirs.culprits

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


def test_a_stranger_that_sends_us_on_to_one_that_is_gone_is_slow(virtual, monkeypatch):
    monkeypatch.setattr(calls, "STRANGER_ANSWER_SECONDS", 60.0)

    async def scenario(nodes):
        best, middle, last = await peers(nodes, 3)
        last.met.add("QmSomebodyElse")
        middle.matchmaker._leading.redirect("p", best.id)
        await best.node.close()
        with pytest.raises(NoGroup) as caught:
            await last.form([middle])
        assert caught.value.silent == {best.id}
        assert caught.value.culprits == {best.id, middle.id} and caught.value.slow == {middle.id}

    virtual(scenario)


def test_who_is_sent_to_and_fro_gives_up(virtual, monkeypatch, caplog):
    monkeypatch.setattr(following, "_NOTICED_SECONDS", 0.01)

    async def scenario(nodes):
        best, middle, last = await peers(nodes, 3)
        middle.matchmaker._leading.redirect("p", best.id)  # and never notices that it is gone
        await best.node.close()
        with pytest.raises(NoGroup) as caught:
            await last.form([middle])
        assert caught.value.silent == {best.id, middle.id} and not caught.value.culprits
        assert "sent on too often" in caplog.text

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


def test_a_follower_learns_who_is_absent_as_its_leader_does(virtual, caplog):
    async def scenario(nodes):
        leader, follower, dead = await peers(nodes, 3)
        await dead.node.close()
        forming = asyncio.create_task(follower.form([leader, dead]))
        await until(lambda: "no answer to a call" in caplog.text)
        led, theirs = await asyncio.gather(leader.form([follower]), forming)
        assert led.id == theirs.id and theirs.silent == {dead.id}

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


def test_a_group_that_is_there_waits_for_no_call(virtual, monkeypatch):
    async def scenario(nodes):
        leader, follower, other = await peers(nodes, 3)
        ended, ask = asyncio.Event(), follower.matchmaker._calls._ask

        async def ends_slowly(peer, parent):
            if peer != other.id:
                return await ask(peer, parent)
            try:
                await asyncio.Event().wait()
            finally:
                await ended.wait()

        monkeypatch.setattr(follower.matchmaker._calls, "_ask", ends_slowly)
        led, theirs = await asyncio.wait_for(asyncio.gather(leader.form([follower]), follower.form([leader, other])), 60)
        assert led.id == theirs.id and sum(not call.done() for call in follower.matchmaker._calls._open) == 1
        ended.set()
        await until(lambda: all(call.done() for call in follower.matchmaker._calls._open))

    virtual(scenario)


def test_what_an_answer_says_of_its_state_is_heard_once(virtual):
    """Heard again, it would seem as new as what its record says since."""

    async def scenario(nodes):
        trio = await peers(nodes, 3)
        await asyncio.gather(*(peer.form(trio) for peer in trio))
        for peer in trio:
            assert peer.answered and len(peer.answered) == len(set(peer.answered))

    virtual(scenario)


def test_a_group_takes_no_more_members_than_a_state_can_name(virtual, monkeypatch):
    monkeypatch.setattr(leading, "MOST_MEMBERS", 2)

    async def scenario(nodes):
        best, second, third = await peers(nodes, 3)
        request = {"parent": "p", "number": 1, "samples": 8, "norm": 0.5, "reduces": True}
        with contextlib.closing(await second.streams.open(best.id, JOIN)) as waiting:
            await waiting.send(request, seconds=60)
            assert (await waiting.receive(ANYTHING, seconds=60))[0] == {"wait": True}
            with contextlib.closing(await third.streams.open(best.id, JOIN)) as refused:
                await refused.send(request, seconds=60)
                with pytest.raises(PeerLost, match="the group is full"):
                    await refused.receive(ANYTHING, seconds=60)

    virtual(scenario)


async def call(caller: Peer, peer: Peer) -> Answer:
    return await caller.matchmaker._calls._call(peer.id, caller.digest)


def test_who_has_just_called_is_not_called_back(virtual):
    async def scenario(nodes):
        one, other = await peers(nodes, 2)
        assert (await call(one, other)).coming
        led, followed = await asyncio.gather(one.form([other]), other.form([one]))
        assert led.id == followed.id and len(led.members) == 2
        assert (one.called, other.called) == (1, 2), "by the join, and by both calls of the first"

    virtual(scenario)


@pytest.mark.parametrize("why", ["onto another state", "long ago", "longer than we wait", "a stranger", "before a failure"])
def test_who_has_called_is_called_back_when_it_may_not_wait(virtual, why):
    async def scenario(nodes):
        caller, called = await peers(nodes, 2)
        called.ready_seconds = {"longer than we wait": 60.0, "long ago": 100.0}.get(why, 0.0)
        await call(caller, called)
        if why == "onto another state":
            caller.digest = called.digest = "q"
        if why == "long ago":
            await asyncio.sleep(calls._CALL_LASTS_SECONDS + calls._WAITED_SECONDS + 0.1)
        if why == "a stranger":
            called.met.add("somebody")
        if why == "before a failure":
            called.matchmaker._calls.call_all([], called.digest)
        answers = called.matchmaker._calls.call_all([caller.id], called.digest, 120.0 if why == "long ago" else 10.0)
        assert (await answers[caller.id]).coming and caller.called == 1

    virtual(scenario)


def asked_by(peer: Peer, monkeypatch) -> list[str]:
    """Whom `peer` calls from now on, in order."""
    asked, ask = [], peer.matchmaker._calls._ask

    async def noted(called, parent):
        asked.append(called)
        return await ask(called, parent)

    monkeypatch.setattr(peer.matchmaker._calls, "_ask", noted)
    return asked


def test_who_was_called_calls_the_best_ranked_alone_while_that_one_leads(virtual, monkeypatch):
    async def scenario(nodes):
        best, *others = found = await peers(nodes, 5)
        told = {peer.id for peer in found}
        asked = {peer.id: asked_by(peer, monkeypatch) for peer in found}
        led, *followed = await asyncio.gather(best.form(found, told=told), *(peer.form(found, told=told) for peer in others))
        assert {group.id for group in followed} == {led.id} and len(led.members) == 5
        assert sorted(asked[best.id]) == sorted(peer.id for peer in others), "who leads calls all"
        assert all(asked[peer.id] == [best.id] for peer in others)

    virtual(scenario)


@pytest.mark.parametrize("why", ["declines", "is silent", "is gone", "was not told"])
def test_who_was_called_calls_all_others_where_the_best_ranked_does_not_lead(virtual, monkeypatch, why):
    async def scenario(nodes):
        best, second, third = trio = await peers(nodes, 3)
        told = {peer.id for peer in trio}
        best.has_samples = why not in ("declines", "was not told")
        if why == "is silent":
            await mute(best)
        elif why == "is gone":
            await best.node.close()
        elif why == "was not told":
            told.remove(best.id)
        asked, began = asked_by(third, monkeypatch), asyncio.get_running_loop().time()
        attempts = [peer.form(trio, told=told) for peer in (second, third)]
        led, followed = await asyncio.gather(*attempts)
        waited = asyncio.get_running_loop().time() - began
        assert led.id == followed.id and {m.peer for m in led.members} == {second.id, third.id}
        assert asked == [best.id, second.id] and waited < (calls.ANSWER_SECONDS + calls.FIRST_SECONDS + 1 if why == "is silent" else 1.0)

    virtual(scenario)
