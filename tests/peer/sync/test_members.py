"""What a run for members is among peers: each shows its membership, and who has none is neither counted nor answered."""

import contextlib
import dataclasses

import pytest

from peer.sync.engine.net.messages import Answer, Call
from peer.sync.engine.net.streams import PeerLost, Refused, Streams
from peer.sync.engine.round.calls import CALL
from peer.sync.engine.state import Head
from peer.sync.engine.transfer.donors import HEAD
from peer.sync.engine.transfer.kind import KIND, Kind, ask_kinds, serve_kind
from swarm.bans import Bans, sign_word
from swarm.errors import ExitCode, UserError
from swarm.members import LIFE_SECONDS, Members, sign_membership
from tests.peer.sync.replicas import Peer, check_invariants, make_run
from tests.peer.sync.swarm_tools import until


async def member(nodes, key, run, wall=None, **options) -> Peer:
    node = await nodes.node()
    wall = wall or nodes.wall
    own = sign_membership(key, run, node.peer_id, wall)
    peer = Peer(nodes, node, run, members=Members(run, Bans(run, key.public, rng=nodes.rng), own, wall), **options)
    await peer.start(nodes)
    return peer


async def refused(streams, peer: str, why: str, name: str = CALL) -> None:
    channel = await streams.open(peer, name)
    with contextlib.closing(channel), pytest.raises(Refused, match=why):
        await channel.receive(Answer, seconds=60)


def test_members_average_and_one_that_is_none_neither_counts_nor_is_answered(virtual, key):
    async def scenario(nodes):
        run = dataclasses.replace(make_run(), members_of=key.public)
        one, two = await member(nodes, key, run), await member(nodes, key, run)
        stranger = Peer(nodes, await nodes.node(), run)
        await stranger.start(nodes)
        await until(lambda: one.head.header.round > 5)
        assert {record.peer_id for record in one.replica.neighbours.others()} == {two.id}
        assert {each.peer for each in one.head.header.members} == {one.id, two.id} and one.id in (await one.node.records(run.run_id))
        assert stranger.id in (await one.node.records(run.run_id)), "its record is there, and passed over"
        for name in (CALL, HEAD, KIND):
            await refused(stranger.replica._streams, one.id, "this run is for members", name)
        check_invariants(one, two)

    virtual(scenario)


def test_a_program_that_knows_of_no_memberships_hears_what_is_missing(virtual, key):
    """It says at once what it wants, as it does in a run for everybody."""

    async def scenario(nodes):
        run = dataclasses.replace(make_run(), members_of=key.public)
        one, old = await member(nodes, key, run), Streams(await nodes.node())
        with contextlib.closing(await old.open(one.id, CALL)) as channel:
            await channel.send(Call(head=Head.of(one.head)), seconds=5)
            with pytest.raises(Refused, match="join it through its dataset server"):
                await channel.receive(Answer, seconds=60)

    virtual(scenario)


def test_a_peer_that_is_not_let_in_gets_no_memory(virtual, key):
    async def scenario(nodes):
        run = dataclasses.replace(make_run(), members_of=key.public)
        one, stranger = await member(nodes, key, run), Streams(await nodes.node())
        channel = await stranger.open(one.id, CALL)
        with contextlib.closing(channel), pytest.raises(Refused, match="this run is for members"):
            await channel.send({"until": 1, "signature": "x" * 1000}, seconds=5)
            await channel.receive(Answer, seconds=60)

    virtual(scenario)


def test_another_peers_membership_opens_nothing(virtual, key):
    async def scenario(nodes):
        run = dataclasses.replace(make_run(), members_of=key.public)
        one, node = await member(nodes, key, run), await nodes.node()
        thief = Streams(node, members=Members(run, own=one.replica.members.own))
        await refused(thief, one.id, "this run is for members")
        ours = Streams(node, members=Members(run, own=sign_membership(key, run, node.peer_id, nodes.wall)))
        with contextlib.closing(await ours.open(one.id, CALL)) as channel:
            await channel.send(Call(head=Head.of(one.head)), seconds=5)
            await channel.receive(Answer, seconds=60)

    virtual(scenario)


def test_a_banned_member_is_told_so_before_it_shows_anything(virtual, key):
    async def scenario(nodes):
        run = dataclasses.replace(make_run(), members_of=key.public)
        one, node = await member(nodes, key, run), await nodes.node()
        one.replica.members.bans.hear([sign_word(key, run, node.peer_id, banned=True, reason="it lies")])
        banned = Streams(node, members=Members(run, own=sign_membership(key, run, node.peer_id, nodes.wall)))
        await refused(banned, one.id, "banned by the host: it lies")

    virtual(scenario)


def test_who_serves_a_run_for_members_waits_for_no_silent_stream_for_ever(virtual, key):
    async def scenario(nodes):
        run = dataclasses.replace(make_run(), members_of=key.public)
        node, other = await nodes.node(), await nodes.node()
        members = Members(run, own=sign_membership(key, run, node.peer_id, nodes.wall))
        await serve_kind(Streams(node, members=members), Kind("schema", (1, 2)))
        began = nodes.clock()
        with contextlib.closing(await Streams(other).open(node.peer_id, KIND)) as channel, pytest.raises(PeerLost):
            await channel.receive(Answer, seconds=60)
        assert nodes.clock() - began < 20
        friend = Members(run, own=sign_membership(key, run, other.peer_id, nodes.wall))
        assert await ask_kinds(Streams(other, members=friend), [node.peer_id]) == [Kind("schema", (1, 2))]

    virtual(scenario)


def test_a_membership_that_is_renewed_goes_on_and_one_that_is_not_ends_its_peer_with_the_way_out(virtual, key):
    async def scenario(nodes):
        run = dataclasses.replace(make_run(), members_of=key.public)
        ahead = [0.0]

        def wall():
            return nodes.wall() + ahead[0]

        one, two, three = [await member(nodes, key, run, wall) for _ in range(3)]
        await until(lambda: len(one.head.header.members) == 3)
        ahead[0] = LIFE_SECONDS - 30
        for peer in (one, two):
            peer.replica.members.own = sign_membership(key, run, peer.id, wall)
        await until(lambda: one.replica.members._until[two.id] == two.replica.members.own.until)
        await until(lambda: three.tasks[0].done(), 120)
        error = three.tasks[0].exception()
        assert isinstance(error, UserError) and error.code == ExitCode.NETWORK and "membership of the run has ended" in error.message
        number = one.head.header.round
        await until(lambda: one.head.header.round > number + 3)
        assert {each.peer for each in one.head.header.members} == {one.id, two.id}
        check_invariants(one, two)

    virtual(scenario)
