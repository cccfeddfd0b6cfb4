"""Exact all-reduce: the same bytes at every member, or nothing."""

import asyncio
import contextlib
import copy
import random
import traceback
from types import SimpleNamespace

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine.codec import LEAST_ELEMENTS, PART_ELEMENTS, WIRES, Wire, square_norm
from peer.sync.engine.net.streams import PeerLost, Streams
from peer.sync.engine.round import averaging, reduction
from peer.sync.engine.round.averaging import REDUCE, Averager, RoundFailed
from peer.sync.engine.round.groups import Group, share_out
from peer.sync.engine.round.reduction import Reduction, Run, Strangers
from tests.peer.sync.swarm_tools import ANYTHING, until


class Peer:
    def __init__(self, node, wire, kind=Averager):
        self.node, self.id = node, node.peer_id
        self.streams = Streams(node)
        self.averager = kind(self.id, self.streams, wire)


def bound(monkeypatch, **values):
    """Other bounds than ours, in both rooms that keep them."""
    for name, value in values.items():
        for room in (averaging, reduction):
            monkeypatch.setattr(room, name, value)


async def peers(nodes, count, wire, last=Averager) -> list[Peer]:
    """`count` peers, sorted by id; one of them averages by the class `last`."""
    found = [Peer(await nodes.node(), wire, Averager if index < count - 1 else last) for index in range(count)]
    for peer in found:
        await peer.averager.start()
    return sorted(found, key=lambda peer: peer.id)


def group_of(members: list[Peer], weights, reducers=None, attempt="x") -> Group:
    reducers = members if reducers is None else reducers
    return Group(
        "p",
        tuple(Member(peer.id, 1, weight) for peer, weight in zip(members, weights, strict=True)),
        tuple(peer.id for peer in reducers),
        attempt,
    )


def reference(wire: Wire, encoded, weights) -> torch.Tensor:
    """What any member could compute by itself from all contributions, in the order of the members."""
    mean = torch.zeros(wire.size)
    for vector, weight in zip(encoded, weights, strict=True):
        mean += wire.decode(vector) * (weight / sum(weights))
    return wire.encode(mean)


def contributions(wire: Wire, count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [wire.encode(torch.randn(wire.size, generator=generator)) for _ in range(count)]


def constants(wire: Wire, count: int) -> list[torch.Tensor]:
    return [wire.encode(torch.full((wire.size,), float(number))) for number in range(count)]


@pytest.mark.parametrize(
    ("wire", "weights"),
    [
        (Wire("fp16", 1), [1, 1]),
        (Wire("fp32", 100_003), [1, 99]),
        (Wire("fp16", 2 * PART_ELEMENTS + 7), [5, 1, 3]),
        (Wire("fp16", 3 * 11 * PART_ELEMENTS + 1), [1, 2, 2]),  # more parts than the window
        (Wire("int8", 3 * PART_ELEMENTS + 100, 1000), [1, 2, 3]),
        (Wire("int4", 3 * PART_ELEMENTS + 100, 1000), [1, 2, 3]),
        (Wire("int4", 300_001), [1, 2, 3, 4, 5]),  # fewer parts than reducers
    ],
)
def test_all_members_get_the_bytes_of_the_reference_and_one_square_norm(virtual, seed, wire, weights):
    async def scenario(nodes):
        members = await peers(nodes, len(weights), wire)
        encoded = contributions(wire, len(weights), seed)
        group = group_of(members, weights)
        means = await asyncio.gather(*(p.averager.average(group, mine) for p, mine in zip(members, encoded, strict=True)))
        expected = reference(wire, encoded, weights)
        assert all(torch.equal(mean.encoded, expected) for mean in means)
        assert len({mean.square_norm for mean in means}) == 1
        assert means[0].square_norm == pytest.approx(square_norm(wire.decode(expected)))
        assert not any(peer.averager._reductions for peer in members)

    virtual(scenario)


def test_the_traffic_of_a_round_is_what_went_over_the_link(virtual, seed):
    async def scenario(nodes):
        wire = Wire("fp16", 4 * PART_ELEMENTS)
        members = await peers(nodes, 2, wire)
        group, encoded = group_of(members, [1, 1]), contributions(wire, 2, seed)
        means = await asyncio.gather(*(p.averager.average(group, mine) for p, mine in zip(members, encoded, strict=True)))
        for mean in means:
            # Half of the contribution and half of the mean, each way, and some 40 bytes with each part.
            most = wire.num_bytes + 50 * len(wire.parts)
            await until(lambda traffic=mean.traffic: traffic.up >= wire.num_bytes)
            assert wire.num_bytes <= mean.traffic.up <= most and mean.traffic.seconds > 0
            assert wire.num_bytes <= mean.traffic.down <= most

    virtual(scenario)


def test_a_member_that_cannot_be_dialled_gets_the_same_bytes(virtual, seed):
    async def scenario(nodes):
        wire = Wire("fp16", 300_001)
        servers = [Peer(await nodes.node(), wire) for _ in range(2)]
        client = Peer(await nodes.node(client_mode=True), wire)
        members = sorted([*servers, client], key=lambda peer: peer.id)
        for peer in members:
            await peer.averager.start()
        encoded = contributions(wire, 3, seed)
        group = group_of(members, [1, 2, 3], sorted(servers, key=lambda peer: peer.id))
        means = await asyncio.gather(*(p.averager.average(group, mine) for p, mine in zip(members, encoded, strict=True)))
        assert all(torch.equal(mean.encoded, reference(wire, encoded, [1, 2, 3])) for mean in means)

    virtual(scenario)


def test_a_reducer_that_is_no_member_averages_without_a_vector_of_its_own(virtual, seed):
    async def scenario(nodes):
        wire = Wire("int8", 5 * PART_ELEMENTS, 100)
        found = await peers(nodes, 4, wire)
        helper, members = found[1], [found[0], *found[2:]]
        group, encoded = group_of(members, [1, 2, 3], found[:3]), contributions(wire, 3, seed)
        jobs = [peer.averager.average(group, mine) for peer, mine in zip(members, encoded, strict=True)]
        means = await asyncio.gather(helper.averager.average(group, None), *jobs)
        assert all(torch.equal(mean.encoded, reference(wire, encoded, [1, 2, 3])) for mean in means)
        assert len({mean.square_norm for mean in means}) == 1

    virtual(scenario)


@pytest.mark.parametrize("name", sorted(WIRES))
def test_the_mean_of_one_member_is_its_own_bytes_whoever_reduces(virtual, seed, name):
    """With one that assists; whoever goes on alone after such a round failed makes the same state."""

    async def scenario(nodes):
        wire = Wire(name, 3 * PART_ELEMENTS + 100, 1000)
        member, assistant = await peers(nodes, 2, wire)
        (encoded,) = contributions(wire, 1, seed)
        group = group_of([member], [3], [member, assistant])
        means = await asyncio.gather(member.averager.average(group, encoded), assistant.averager.average(group, None))
        assert all(torch.equal(mean.encoded, encoded) for mean in means)
        assert {mean.square_norm for mean in means} == {wire.square_norm(encoded)}

    virtual(scenario)


@pytest.mark.parametrize("reducers", [1, 2, 3, 7])
@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (0, 5), (10 * PART_ELEMENTS + 5, 100_003)])
def test_every_part_has_one_reducer_and_shares_are_consecutive_and_nearly_equal(name, sizes, reducers):
    parts, peers = Wire(name, *sizes).parts, [f"peer {number}" for number in range(reducers)]
    shares = share_out("a state", peers, parts)
    assert list(shares) == peers and shares == share_out("a state", peers, parts)
    assert [index for share in sorted(shares.values()) for index in share] == list(range(len(parts)))
    assert all(share == list(range(share[0], share[-1] + 1)) for share in shares.values() if share)
    loads = [sum(parts[index].num_bytes for index in share) for share in shares.values()]
    assert max(loads) - min(loads) <= 2 * max((part.num_bytes for part in parts), default=0)


@pytest.mark.parametrize("name", WIRES)
def test_each_reducer_of_a_small_model_has_some_and_of_a_learned_word_in_turn(name):
    peers = [f"peer {number}" for number in range(8)]
    small, word = Wire(name, 8 * LEAST_ELEMENTS, 7).parts, Wire(name, 0, 768).parts
    assert all(share_out("a state", peers, small).values())
    assert {peer for number in range(100) for peer, share in share_out(f"state {number}", peers, word).items() if share} == set(peers)


async def outcomes(members, group, encoded):
    jobs = (peer.averager.average(group, mine) for peer, mine in zip(members, encoded, strict=True))
    return await asyncio.gather(*jobs, return_exceptions=True)


class Bad(Averager):
    """A member that sends what `spoil` makes of each of its parts."""

    spoil = staticmethod(lambda index, data: data)
    lingers = staticmethod(lambda reducer: asyncio.sleep(1))

    async def _exchange(self, reducer, share, run):
        with contextlib.closing(await self._streams.open(reducer, REDUCE)) as channel:
            await channel.send({"group": run.group.id}, seconds=60)
            for count, part in enumerate(self._wire.parts[index] for index in share):
                data = self.spoil(count, part.bytes_of(run.mine))
                if data is None:
                    raise RoundFailed("died")
                await channel.send({}, memoryview(data.contiguous().numpy()), seconds=60)
            await self.lingers(reducer)
        raise RoundFailed("bad anyway")


SPOILED = {
    "NaN in a part": lambda index, data: torch.full_like(data, 255),
    "a part that is too short": lambda index, data: data[:-2],
    "a part that is too long": lambda index, data: torch.cat([data, data]),
    "a death after one part": lambda index, data: data if index < 1 else None,
    "a death before the first part": lambda index, data: None,
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_bad_sender_fails_the_round_for_all_and_nobody_gets_a_mixed_average(virtual, what):
    async def scenario(nodes):
        wire = Wire("fp16", 4 * 3 * PART_ELEMENTS)
        members = await peers(nodes, 3, wire)
        bad = members[1]
        bad.averager.__class__ = type("Spoiler", (Bad,), {"spoil": staticmethod(SPOILED[what])})
        encoded = constants(wire, 3)
        results = await outcomes(members, group_of(members, [1, 1, 1]), encoded)
        assert all(isinstance(result, RoundFailed) for result in results), results
        # Who saw it names it; who was told has that one's word.
        honest = [result for peer, result in zip(members, results, strict=True) if peer is not bad]
        assert any(result.culprits == {bad.id} for result in honest)
        assert all(result.culprits <= {bad.id} for result in honest)
        assert all(set(result.told.culprits) <= {bad.id} for result in honest if result.told)

    virtual(scenario)


class Liar(Averager):
    """A reducer that sends what `lie` makes of each header and mean; nothing at all after None."""

    lie = staticmethod(lambda header, mean: (header, mean))

    async def _serve(self, channel):
        honest = channel.send

        async def send(header, payload, *, seconds):
            answer = self.lie(header, payload)
            await (honest(*answer, seconds=seconds) if answer else asyncio.Event().wait())

        channel.send = send
        await super()._serve(channel)


def square_of(value):
    return lambda header, mean: ({"square": value}, mean)


LIES = {
    "a sum of squares that is NaN": (square_of(float("nan")), "number (nan)"),
    "an infinite one": (square_of(float("inf")), "number (inf)"),
    "a negative one": (square_of(-1.0), "(-1.0)"),
    "a string": (square_of("1.0"), "no float (1.0)"),
    "a whole number": (square_of(10**15), "no float (1000000000000000)"),
    "another mean's": (lambda header, mean: ({"square": header.square * 1.01}, mean), "told a wrong sum of squares"),
    "no sum of squares": (lambda header, mean: ({}, mean), "without square"),
    "a mean that is too short": (lambda header, mean: (header, mean[:-2]), "bytes instead of"),
    "an empty mean": (lambda header, mean: (header, b""), "sent 0 bytes instead of"),
    "a mean that is too long": (lambda header, mean: (header, bytes(mean) + b"xx"), "are allowed"),
    "a mean that is not finite": (lambda header, mean: (header, b"\xff" * len(mean)), "sent non-finite values"),
}


def test_a_reducer_that_lies_fails_the_round_at_all_whom_it_lied_to(virtual):
    async def scenario(nodes):
        wire = Wire("fp16", 2 * 3 * PART_ELEMENTS)
        members = await peers(nodes, 3, wire, Liar)
        (liar,) = (peer for peer in members if isinstance(peer.averager, Liar))
        for what, (lie, reason) in LIES.items():
            liar.averager.lie = lie
            results = await outcomes(members, group_of(members, [1, 1, 1], attempt=what), constants(wire, 3))
            failed = [result for peer, result in zip(members, results, strict=True) if peer is not liar and type(result) is RoundFailed]
            told = [str(result) for result in failed]
            assert len(told) == 2, (what, results)
            assert any(result.culprits == {liar.id} and result.at_once for result in failed), (what, failed)
            assert all(result.culprits <= {liar.id} for result in failed), (what, failed)
            # Whoever meets the lie first says it; the other may hear of that one's failure before.
            assert any(reason in error and liar.id[-6:] in error for error in told), (what, told)
        assert not any(peer.averager._reductions for peer in members)

    virtual(scenario)


class Staller(Bad):
    """A member that sends one part and then nothing more, with its stream open."""

    async def _exchange(self, reducer, share, run):
        with contextlib.closing(await self._streams.open(reducer, REDUCE)) as channel:
            await channel.send({"group": run.group.id}, seconds=60)
            await channel.send({}, memoryview(self._wire.parts[share[0]].bytes_of(run.mine).numpy()), seconds=60)
            await asyncio.Event().wait()


STALLS = {
    "a sender": Staller,
    "a reducer from its first mean on": type("Silent", (Liar,), {"lie": staticmethod(lambda header, mean: None)}),
}


@pytest.mark.parametrize("who", STALLS)
def test_a_peer_that_stalls_fails_the_round_when_the_time_of_a_part_is_over(virtual, monkeypatch, who):
    bound(monkeypatch, PART_SECONDS=1.0, COME_SECONDS=3.0)

    async def scenario(nodes):
        wire = Wire("fp16", 2 * 3 * PART_ELEMENTS)
        members = await peers(nodes, 2, wire, STALLS[who])
        group, encoded = group_of(members, [1, 1]), constants(wire, 2)
        staller, honest = sorted(members, key=lambda peer: type(peer.averager) is Averager)
        stalled = asyncio.create_task(staller.averager.average(group, encoded[0]))
        nodes.ends_with_the_test(stalled)
        with pytest.raises(RoundFailed, match=staller.id[-6:]) as caught:
            await honest.averager.average(group, encoded[1])
        assert not honest.averager._reductions and caught.value.culprits == {staller.id}

    virtual(scenario)


@pytest.mark.parametrize("who", [*STALLS, "an absent member"])
def test_a_stranger_that_stalls_or_is_absent_has_less_time_than_a_peer_that_we_have_met(virtual, monkeypatch, who):
    bound(monkeypatch, SLOWEST_BYTES_PER_SECOND=1e12, PART_SECONDS=300.0, COME_SECONDS=300.0)

    async def scenario(nodes):
        wire = Wire("fp16", 3 * 3 * PART_ELEMENTS)
        members = await peers(nodes, 3, wire, STALLS.get(who, Averager))
        group, encoded = group_of(members, [1, 1, 1]), constants(wire, 3)
        *honest, stranger = sorted(members, key=lambda peer: type(peer.averager) is not Averager)
        strangers = Strangers(frozenset({stranger.id}), 2.0)
        if who in STALLS:
            nodes.ends_with_the_test(asyncio.create_task(stranger.averager.average(group, encoded[0])))
        jobs = (peer.averager.average(group, mine, strangers) for peer, mine in zip(honest, encoded[1:], strict=True))
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(result.culprits == {stranger.id} or set(result.told.culprits) == {stranger.id} for result in results), results

    virtual(scenario)


class Later(Averager):
    """Gives its means a second after it could."""

    async def _reduction(self, group_id):
        await asyncio.sleep(1.0)
        return await super()._reduction(group_id)


def test_a_strangers_mean_that_comes_a_moment_after_our_own_share_ends_the_wait_for_it(virtual):
    """The other reducer used to sit out the stranger's whole deadline: 16 s of each first round with a helper, on the toy."""

    async def scenario(nodes):
        wire = Wire("fp16", 3 * 3 * PART_ELEMENTS)
        members = await peers(nodes, 3, wire, Later)
        group, encoded = group_of(members, [1, 1, 1]), constants(wire, 3)
        (stranger,) = (peer for peer in members if isinstance(peer.averager, Later))
        others = {peer.id: Strangers(frozenset({stranger.id} - {peer.id}), 20.0) for peer in members}
        clock = asyncio.get_running_loop().time
        began = clock()
        await asyncio.gather(*(peer.averager.average(group, mine, others[peer.id]) for peer, mine in zip(members, encoded, strict=True)))
        assert 1.0 <= clock() - began < 5.0

    virtual(scenario)


def test_a_member_that_gives_up_because_of_another_is_not_taken_for_the_culprit(virtual):
    """Its streams end without a word; on those of its own share it says why."""

    async def scenario(nodes):
        wire = Wire("fp16", 3 * 3 * PART_ELEMENTS)
        members = await peers(nodes, 3, wire, Bad)
        (bad,) = (peer for peer in members if isinstance(peer.averager, Bad))
        one, other = (peer for peer in members if peer is not bad)
        group, encoded = group_of(members, [1, 1, 1]), constants(wire, 3)

        async def to_one_only(reducer, share, run):
            side = copy.copy(bad.averager)
            side.lingers = lambda reducer: asyncio.Event().wait()
            side.spoil = SPOILED["NaN in a part"] if reducer == one.id else Bad.spoil
            await Bad._exchange(side, reducer, share, run)

        bad.averager._exchange = to_one_only
        nodes.ends_with_the_test(asyncio.create_task(bad.averager.average(group, encoded[0])))
        saw, heard = await outcomes([one, other], group, encoded[1:])
        assert saw.culprits == {bad.id} and not saw.slow
        assert not heard.culprits and heard.told.accuser == one.id
        assert heard.told.culprits == (bad.id,) and not heard.told.hearsay

    virtual(scenario)


def test_a_member_that_dials_after_we_gave_up_is_told_why(virtual):
    async def scenario(nodes):
        members = await peers(nodes, 2, Wire("fp16", 2 * PART_ELEMENTS))
        (one, other), group = members, group_of(members, [1, 1])
        one.averager._failed[group.id] = PeerLost("gave up: it was bad", ["bad"])
        with contextlib.closing(await other.streams.open(one.id, REDUCE)) as channel:
            await channel.send({"group": group.id}, seconds=60)
            with pytest.raises(PeerLost, match="gave up: it was bad") as caught:
                await channel.receive(ANYTHING, seconds=60)
            assert caught.value.culprits == ("bad",) and not caught.value.hearsay

    virtual(scenario)


def test_who_asks_again_and_again_for_a_group_that_failed_costs_no_memory(virtual):
    """An error that is raised again keeps the frames of each time: a thousand streams left three thousand behind."""

    async def scenario(nodes):
        (one,) = await peers(nodes, 1, Wire("fp16", 2 * PART_ELEMENTS))
        one.averager._failed["x"] = failure = PeerLost("gave up")
        for _ in range(50):
            with pytest.raises(PeerLost, match="gave up"):
                await one.averager._reduction("x")
        assert len(list(traceback.walk_tb(failure.__traceback__))) < 10

    virtual(scenario)


def test_who_takes_its_means_slowly_has_one_more_round_for_it(virtual):
    """It took one part in just under its time, for hours, and the reducer kept the mean of each round for it."""

    async def scenario(nodes):
        wire = Wire("fp16", 2 * PART_ELEMENTS)
        members = await peers(nodes, 2, wire)
        one, other = members
        one.node.host.link.up_mbit = 2.0  # 2 s for a part of 0.5 MB
        ends, streams = [], []
        for count in range(4):
            group, mine = group_of(members, [1, 1], [one], attempt=str(count)), constants(wire, 2)[0]
            average = asyncio.create_task(one.averager.average(group, mine))
            streams.append(await other.streams.open(one.id, REDUCE))
            await streams[-1].send({"group": group.id}, seconds=60)
            for part in wire.parts:
                await streams[-1].send({}, memoryview(part.bytes_of(mine).numpy()), seconds=60)
            await average
            ends.append(list(one.averager._serving))
        assert [len(groups) for groups in ends] == [1, 2, 2, 2]
        with pytest.raises(PeerLost):
            for _ in range(3):
                await streams[0].receive(ANYTHING, max_payload=10**7, seconds=60)
        for _ in wire.parts:
            await streams[-1].receive(ANYTHING, max_payload=10**7, seconds=60)
        for channel in streams:
            channel.close()
        await until(lambda: not one.averager._serving)

    virtual(scenario)


def test_a_reducer_that_is_cancelled_says_so_at_once(virtual, monkeypatch):
    """It used to say nothing, and the others sat out the deadline of a part."""
    monkeypatch.setattr(averaging, "_KNOWN_SOON_SECONDS", 100.0)

    async def scenario(nodes):
        members = await peers(nodes, 2, Wire("fp16", 2 * PART_ELEMENTS))
        group, (one, other) = group_of(members, [1, 1]), members
        leaving = asyncio.create_task(one.averager.average(group, constants(one.averager._wire, 1)[0]))
        await until(lambda: one.averager._reductions)
        waiting = one.averager._reductions[group.id]
        with contextlib.closing(await other.streams.open(one.id, REDUCE)) as channel:
            await channel.send({"group": group.id}, seconds=60)
            await until(lambda: other.id in waiting._came)
            leaving.cancel()
            with pytest.raises(PeerLost, match="gave up: it left"):
                await channel.receive(ANYTHING, max_payload=10**6, seconds=reduction.PART_SECONDS - 5)
        await asyncio.gather(leaving, return_exceptions=True)
        assert leaving.cancelled() and not one.averager._reductions

    virtual(scenario)


def test_a_reduction_that_waits_in_vain_says_for_whom(monkeypatch):
    bound(monkeypatch, PART_SECONDS=0.01)

    async def scenario():
        wire = Wire("fp16", 2 * PART_ELEMENTS)
        group = Group("p", tuple(Member(name, 1, 1) for name in ("member-early", "member-late1", "member-late2")), ("member-early",), "x")
        run = Run(group, None, torch.empty(wire.num_bytes, dtype=torch.uint8), [0.0] * 2)
        reduction = Reduction(run, wire.parts, [0, 1], wire)
        reduction.add("member-early", 0, wire.parts[0].bytes_of(constants(wire, 1)[0]))
        for index in (0, 1):  # one part that cannot be had fails them all, with the first reason
            with pytest.raises(PeerLost, match="-late1, -late2 sent no part"):
                await reduction.mean(index)

    asyncio.run(scenario())


def test_our_own_contribution_is_checked_like_that_of_others(virtual):
    async def scenario(nodes):
        members = await peers(nodes, 2, Wire("fp32", 10))
        encoded = [torch.full((10,), float("nan")).view(torch.uint8), torch.zeros(10).view(torch.uint8)]
        assert all(isinstance(result, RoundFailed) for result in await outcomes(members, group_of(members, [1, 1]), encoded))

    virtual(scenario)


def test_a_reducer_that_dies_fails_the_round_at_those_who_miss_something(virtual):
    async def scenario(nodes):
        wire = Wire("fp16", 40 * PART_ELEMENTS)
        members = await peers(nodes, 3, wire)
        encoded = constants(wire, 3)
        running = asyncio.create_task(outcomes(members[:2], group_of(members, [1, 1, 1]), encoded[:2]))
        dying = asyncio.create_task(members[2].averager.average(group_of(members, [1, 1, 1]), encoded[2]))
        await until(lambda: members[2].averager._reductions or dying.done())
        await members[2].node.close()
        first, second = await running
        expected = reference(wire, encoded, [1, 1, 1])
        for result in (first, second):
            assert isinstance(result, RoundFailed) or torch.equal(result.encoded, expected)
        await asyncio.gather(dying, return_exceptions=True)

    virtual(scenario)


def test_a_member_that_never_comes_fails_the_round_soon(virtual, monkeypatch):
    bound(monkeypatch, COME_SECONDS=0.5)

    async def scenario(nodes):
        wire = Wire("fp16", 3 * PART_ELEMENTS)
        members = await peers(nodes, 3, wire)
        group = group_of(members, [1, 1, 1])
        results = await outcomes(members[:2], group, constants(wire, 2))
        assert all(isinstance(result, RoundFailed) for result in results)
        assert any(members[2].id[-6:] in str(result) and result.culprits == {members[2].id} for result in results)

    virtual(scenario)


def test_a_member_that_sent_everything_is_in_the_average_even_if_it_takes_nothing_back(virtual, monkeypatch):
    monkeypatch.setattr(averaging, "_KNOWN_SOON_SECONDS", 100.0)

    async def scenario(nodes):
        wire = Wire("fp16", 2 * PART_ELEMENTS)
        members = await peers(nodes, 3, wire)
        leaver, group, encoded = members[0], group_of(members, [1, 1, 1], members[1:]), constants(wire, 3)
        jobs = [asyncio.create_task(peer.averager.average(group, mine)) for peer, mine in zip(members[1:], encoded[1:], strict=True)]

        async def others_are_done(reducer):
            """Gone earlier, with answers unread, p2pd might lose what it sent last."""
            await until(lambda: all(job.done() for job in jobs))

        leaver.averager.__class__ = type("Leaver", (Bad,), {"lingers": staticmethod(others_are_done)})
        with pytest.raises(RoundFailed):
            await leaver.averager.average(group, encoded[0])
        expected = reference(wire, encoded, [1, 1, 1])
        assert all(torch.equal(result.encoded, expected) for result in await asyncio.gather(*jobs))

    virtual(scenario)


def test_strangers_and_second_streams_are_refused(virtual):
    async def scenario(nodes):
        wire = Wire("fp16", 2 * PART_ELEMENTS)
        members = await peers(nodes, 2, wire)
        stranger = Peer(await nodes.node(), wire)
        group = group_of(members, [1, 1])
        reducing = asyncio.create_task(members[0].averager.average(group, constants(wire, 1)[0]))
        await until(lambda: members[0].averager._reductions)
        first = await members[1].streams.open(members[0].id, REDUCE)
        await first.send({"group": group.id}, seconds=60)
        reduction = members[0].averager._reductions[group.id]
        await until(lambda: members[1].id in reduction._came)
        for peer, reason in ((stranger, "not a member"), (members[1], "sending already")):
            channel = await peer.streams.open(members[0].id, REDUCE)
            await channel.send({"group": group.id}, seconds=60)
            with pytest.raises(Exception, match=reason):
                await channel.receive(ANYTHING, seconds=60)
            channel.close()
        reducing.cancel()
        first.close()
        await asyncio.gather(reducing, return_exceptions=True)

    virtual(scenario)


def test_random_deaths_never_leave_two_results(virtual, seed, monkeypatch):
    """Twenty rounds of three, each with one member cancelled at a random moment: whoever finishes has the reference's bytes."""
    # Nobody need finish; the others need not wait long for one that was cancelled before it began.
    monkeypatch.setattr(averaging, "_KNOWN_SOON_SECONDS", 1.0)
    bound(monkeypatch, COME_SECONDS=1.0)

    async def scenario(nodes):
        rng, wire = random.Random(seed), Wire("fp16", 6 * PART_ELEMENTS)
        members = await peers(nodes, 3, wire)
        for attempt in range(20):
            encoded = contributions(wire, 3, seed + attempt)
            group = group_of(members, [1, 2, 3], attempt=str(attempt))
            jobs = [asyncio.create_task(p.averager.average(group, mine)) for p, mine in zip(members, encoded, strict=True)]
            await asyncio.sleep(rng.uniform(0, 0.2))
            rng.choice(jobs).cancel()
            results = await asyncio.gather(*jobs, return_exceptions=True)
            expected = reference(wire, encoded, [1, 2, 3])
            for result in results:
                assert isinstance(result, RoundFailed | asyncio.CancelledError) or torch.equal(result.encoded, expected)

    virtual(scenario)


def test_late_is_who_all_others_wait_for_and_not_those_that_wait():
    """Of eight parts that a reducer takes at once, one slow member holds up all, and each seemed late."""
    made, open_ = SimpleNamespace(done=lambda: True), SimpleNamespace(done=lambda: False)
    reduction = SimpleNamespace(senders={"a", "b", "c"}, _received=[{}, {"a": 1, "b": 1}, {"a": 1}, {}], _means=[made, open_, open_, open_])
    assert Reduction.late(reduction) == {"c"}
    assert Reduction.late(SimpleNamespace(senders={"a"}, _received=[{}], _means=[made])) == set()
