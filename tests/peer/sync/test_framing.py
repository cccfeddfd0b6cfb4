"""Ways to make an honest reducer sign two means of one share, to keep a real proof out, or to hold up those who compare. None may work."""

import asyncio
import dataclasses
from types import SimpleNamespace

import msgpack
import pytest
import torch

from peer.contracts import Member
from peer.sync.engine.codec import PART_ELEMENTS, Wire
from peer.sync.engine.net.messages import Announcement, Shares, SignedShare
from peer.sync.engine.net.streams import MAX_MESSAGE_BYTES, PeerLost
from peer.sync.engine.round.averaging import Averager
from peer.sync.engine.round.equivocation import Equivocation, _Kept
from peer.sync.engine.round.groups import Group, Standing, Ticket, group_of
from peer.sync.engine.round.share_seals import ShareSeals
from peer.sync.engine.round.telling import Telling
from peer.sync.engine.state import MOST_MEMBERS, Head
from swarm.proofs import MOST_PROOFS, Proof, Proofs
from tests.peer.sync.replicas import Peer, make_run
from tests.peer.sync.swarm_tools import until

SECONDS = 600.0


# ---------------------------------------------------------------- two signatures of one reducer


async def averaged_twice(nodes, run, draws) -> list[Proof]:
    """A reducer averages, is started again with nothing left of its work, and averages in the group that its leader says once more: same members,
    same numbers, same attempt, other bytes of the leader. What that leader can accuse it of. draws: of the reducer, for each average."""
    (leader, its), (reducer, others) = await nodes.streams(2)
    wire, said = Wire("fp16", 2 * PART_ELEMENTS), []
    peers = sorted([leader.peer_id, reducer.peer_id])
    for draw, value in zip(draws, (1.0, -1.0), strict=True):
        averagers = [Averager(node.peer_id, streams, wire, seals=ShareSeals(run.digest, node)) for node, streams in ((leader, its), (reducer, others))]
        tickets = [Ticket("p", Member(peer, 1, 8), True, draw=draw if peer == reducer.peer_id else "") for peer in peers]
        group, vectors = Group.of(tickets, "the same"), [torch.full((wire.size,), value), torch.ones(wire.size)]
        for averager in averagers:
            await averager.start()
        mean, _ = await asyncio.gather(*(a.average(group, wire.encode(vector)) for a, vector in zip(averagers, vectors, strict=True)))
        said.append((group.id, mean.shares[reducer.peer_id]))
    (first, one), (second, other) = said
    assert one.digest != other.digest
    return [
        Proof(accused=reducer.peer_id, key=one.key, group=group, digests=(one.digest, other.digest), signatures=(one.signature, other.signature))
        for group in (first, second)
    ]


@pytest.mark.parametrize(("draws", "is_framed"), [(("one", "two"), False), (("one", "one"), True)])
def test_a_reducer_that_lost_all_its_work_signs_no_second_mean_under_one_name(virtual, key, draws, is_framed):
    """It draws anew. With the draw of before it would be framed."""

    async def scenario(nodes):
        run = make_run(members_of=key.public)
        accusations = await averaged_twice(nodes, run, draws)
        signed = (await nodes.node()).has_signed
        assert any(Proofs(run, signed).hear([proof]) for proof in accusations) is is_framed

    virtual(scenario)


def announced(ticket, draws) -> Announcement:
    return Announcement(members=(("Qa", 1, 8, 0.0), ("Qb", 1, 8, 0.0)), reducers=("Qa", "Qb"), draws=draws, attempt="x")


@pytest.mark.parametrize(
    ("draws", "fault"),
    [(("", "old"), "another draw of ours"), (("new", ""), "another draw of ours"), ((), "another draw of ours"), (("new",), "1 draws for 2 reducers")],
)
def test_a_group_with_another_draw_of_ours_is_none_of_ours_and_its_leader_is_to_blame(draws, fault):
    ticket, standing = Ticket("p", Member("Qb", 1, 8), True, draw="new"), Standing(Head("p", 0), True, 0.0)
    assert group_of(announced(ticket, ("x", "new")), ticket, "Qa", standing, 100).draw_of("Qb") == "new"
    with pytest.raises(PeerLost, match=fault) as caught:
        group_of(announced(ticket, draws), ticket, "Qa", standing, 100)
    assert caught.value.culprits == ("Qa",)
    only_sends = dataclasses.replace(ticket, member=Member("Qb", 1, 8), reduces=False)
    said = announced(only_sends, ("x",)).model_copy(update={"reducers": ("Qa",)})
    assert group_of(said, only_sends, "Qa", standing, 100).draws == ("x",), "who only sends has drawn nothing that counts"


def test_each_average_has_a_draw_of_its_own_also_in_an_open_run(virtual):
    async def scenario(nodes):
        run, draws = make_run(), []
        pair = [Peer(nodes, await nodes.node(), run) for _ in range(2)]
        for peer in pair:
            average = peer.replica.rounds.averager.average

            async def note(group, mine, strangers=None, average=average, peer=peer):
                draws.append(group.draw_of(peer.id))
                return await average(group, mine, strangers)

            peer.replica.rounds.averager.average = note
            await peer.start(nodes)
        await until(lambda: len(draws) > 10, SECONDS)
        assert all(draws) and len(set(draws)) == len(draws)

    virtual(scenario)


def test_who_has_averaged_in_a_group_is_not_told_of_it_once_more():
    """It was started again, say: its leader, which still waits in the group, takes it into the next one."""
    ticket = Ticket("p", Member("Qb", 1, 8), True, draw="new")
    group = group_of(announced(ticket, ("x", "new")), ticket, "Qa", Standing(Head("p", 0), True, 0.0), 100)
    assert group.holds(ticket) and not group.holds(dataclasses.replace(ticket, draw="newer"))


# ---------------------------------------------------------------- proofs that are kept out


def test_a_message_has_room_for_all_proofs_and_another_for_what_every_reducer_signed():
    text, signature, key = "f" * 64, "A" * 344, "ssh-rsa " + "A" * 372
    one = Proof(accused="Q" * 46, key=key, group=text, digests=(text, "e" * 64), signatures=(signature, signature))
    shares = tuple(SignedShare(reducer="Q" * 46, digest=text, signature=signature) for _ in range(MOST_MEMBERS))
    for said in (Shares(proofs=(one,) * MOST_PROOFS), Shares(group=text, shares=shares)):
        assert len(msgpack.packb(said.wire())) < MAX_MESSAGE_BYTES


# ---------------------------------------------------------------- whom the others ask


def parted(opens):
    """Of a member, which made the state "ours" of "p" in a group with one that made another one of it; `opens` is run for each stream to that one."""

    class Streams:
        async def open(self, peer, name):
            return await opens(peer)

    other = SimpleNamespace(peer_id="other", digest="theirs", parents=("p",))
    swaps = Equivocation(Streams(), Proofs(make_run()), lambda: [other], clock=lambda: 1.0)
    swaps._telling._swapped = 1.0
    swaps._kept.append(_Kept("g", "p", "ours", frozenset({"me", "other"}), {}))
    return swaps


@pytest.mark.parametrize(("broken", "asked"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_a_peer_whose_stream_broke_is_asked_again_and_three_times_at_most(virtual, broken, asked):
    opened = []

    class Answers:
        async def send(self, said, *, seconds):
            assert said.group == "g" and not said.proofs

        async def receive(self, kind, *, seconds):
            return Shares(), b""

        def close(self):
            pass

    async def opens(peer):
        opened.append(peer)
        if len(opened) <= broken:
            raise PeerLost("its stream broke")
        return Answers()

    async def scenario(nodes):
        swaps = parted(opens)
        for _ in range(6):
            await swaps.look()

    virtual(scenario)
    assert opened == ["other"] * asked


def test_one_that_says_nothing_holds_up_nobody_who_is_told_of_a_proof(virtual):
    async def scenario(nodes):
        other_is_told = asyncio.Event()

        async def swap(peer):
            if peer == "silent":
                return await other_is_told.wait()
            other_is_told.set()

        telling = Telling(lambda: [SimpleNamespace(peer_id=peer) for peer in ("silent", "other")], swap)
        telling.all()
        await asyncio.wait_for(telling.look(), SECONDS)
        assert other_is_told.is_set()

    virtual(scenario)
