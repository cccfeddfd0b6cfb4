"""Exact all-reduce: the same bytes at every member, or nothing."""

import asyncio
import itertools
import random

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine import averaging
from peer.sync.engine.averaging import PART_ELEMENTS, REDUCE, Averager, RoundFailed, cut, cut_parts
from peer.sync.engine.codec import CODECS
from peer.sync.engine.groups import Group
from peer.sync.engine.streams import Streams
from tests.peer.sync.swarm_tools import until


class Peer:
    def __init__(self, node, codec, size):
        self.node, self.id, self.codec = node, node.peer_id, codec
        self.streams = Streams(node)
        self.averager = Averager(self.id, self.streams, codec, size)


async def peers(nodes, count, wire, size) -> list[Peer]:
    found = [Peer(await nodes.node(), CODECS[wire], size) for _ in range(count)]
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


def reference(codec, encoded, weights, reducers: int, size: int) -> torch.Tensor:
    """What any member could compute by itself from all contributions: slice by slice, in the order of the members."""
    total = sum(weights)
    mean = torch.zeros(0)
    for vector, weight in zip(encoded, weights, strict=True):
        part = codec.decode(vector) * (weight / total)
        mean = part if not mean.numel() else mean + part
    return codec.encode(mean)


@pytest.mark.parametrize(
    ("count", "size", "wire", "weights"),
    [
        (2, 1, "fp16", [1, 1]),
        (2, 100_003, "fp32", [1, 99]),
        (3, 2 * PART_ELEMENTS + 7, "fp16", [5, 1, 3]),
        (3, 3 * 11 * PART_ELEMENTS + 1, "fp16", [1, 2, 2]),  # more parts than the window
        (5, 300_001, "fp16", [1, 2, 3, 4, 5]),
    ],
)
def test_all_members_get_the_bytes_of_the_reference(swarm, seed, count, size, wire, weights):
    async def scenario(nodes):
        generator = torch.Generator().manual_seed(seed)
        members = await peers(nodes, count, wire, size)
        codec = CODECS[wire]
        encoded = [codec.encode(torch.randn(size, generator=generator)) for _ in members]
        group = group_of(members, weights)
        results = await asyncio.gather(*(p.averager.average(group, mine) for p, mine in zip(members, encoded, strict=True)))
        expected = reference(codec, encoded, weights, count, size)
        assert all(torch.equal(result, expected) for result in results)
        assert not any(peer.averager._reductions for peer in members)

    swarm(scenario)


def test_a_member_that_cannot_be_dialled_gets_the_same_bytes(swarm, seed):
    async def scenario(nodes):
        size, codec = 300_001, CODECS["fp16"]
        generator = torch.Generator().manual_seed(seed)
        servers = [Peer(await nodes.node(), codec, size) for _ in range(2)]
        client = Peer(await nodes.node(client_mode=True), codec, size)
        members = sorted([*servers, client], key=lambda peer: peer.id)
        for peer in members:
            await peer.averager.start()
        encoded = [codec.encode(torch.randn(size, generator=generator)) for _ in members]
        group = group_of(members, [1, 2, 3], sorted(servers, key=lambda peer: peer.id))
        results = await asyncio.gather(*(p.averager.average(group, mine) for p, mine in zip(members, encoded, strict=True)))
        assert all(torch.equal(result, reference(codec, encoded, [1, 2, 3], 2, size)) for result in results)

    swarm(scenario)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, 5, 1_000_003])
def test_slices_and_parts_cover_the_vector_once(parts, size):
    slices = cut(size, parts)
    assert slices[0][0] == 0 and slices[-1][1] == size and all(a[1] == b[0] for a, b in itertools.pairwise(slices))
    pieces = cut_parts(size, 2)
    assert sum(end - start for start, end in pieces) == 2 * size


async def outcomes(members, group, encoded):
    jobs = (peer.averager.average(group, mine) for peer, mine in zip(members, encoded, strict=True))
    return await asyncio.gather(*jobs, return_exceptions=True)


class Bad(Averager):
    """A member that sends what `spoil` makes of each of its parts."""

    spoil = staticmethod(lambda index, data: data)

    async def _exchange(self, reducer, group_id, part, into):
        channel = await self._streams.open(reducer, REDUCE)
        await channel.send({"group": group_id}, seconds=5)
        for index, (start, end) in enumerate(cut_parts(part.numel() // self._codec.bytes_per_element, self._codec.bytes_per_element)):
            data = self.spoil(index, part[start:end])
            if data is None:
                channel.close()
                raise RoundFailed("died")
            await channel.send({}, memoryview(data.contiguous().numpy()), seconds=5)
        await asyncio.sleep(1)
        channel.close()
        raise RoundFailed("bad anyway")


SPOILED = {
    "NaN in a part": lambda index, data: torch.full_like(data, 255),
    "a part that is too short": lambda index, data: data[:-2],
    "a part that is too long": lambda index, data: torch.cat([data, data]),
    "a death after one part": lambda index, data: data if index < 1 else None,
    "a death before the first part": lambda index, data: None,
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_bad_sender_fails_the_round_for_all_and_nobody_gets_a_mixed_average(swarm, what):
    async def scenario(nodes):
        size = 4 * 3 * PART_ELEMENTS
        members = await peers(nodes, 3, "fp16", size)
        bad = members[1]
        bad.averager.__class__ = type("Spoiler", (Bad,), {"spoil": staticmethod(SPOILED[what])})
        encoded = [CODECS["fp16"].encode(torch.full((size,), float(number))) for number in range(3)]
        results = await outcomes(members, group_of(members, [1, 1, 1]), encoded)
        assert all(isinstance(result, RoundFailed) for result in results), results

    swarm(scenario)


def test_our_own_contribution_is_checked_like_that_of_others(swarm):
    async def scenario(nodes):
        members = await peers(nodes, 2, "fp32", 10)
        encoded = [torch.full((10,), float("nan")).view(torch.uint8), torch.zeros(10).view(torch.uint8)]
        assert all(isinstance(result, RoundFailed) for result in await outcomes(members, group_of(members, [1, 1]), encoded))

    swarm(scenario)


def test_a_reducer_that_dies_fails_the_round_at_those_who_miss_something(swarm):
    async def scenario(nodes):
        size = 40 * PART_ELEMENTS
        members = await peers(nodes, 3, "fp16", size)
        encoded = [CODECS["fp16"].encode(torch.full((size,), float(number))) for number in range(3)]
        running = asyncio.create_task(outcomes(members[:2], group_of(members, [1, 1, 1]), encoded[:2]))
        dying = asyncio.create_task(members[2].averager.average(group_of(members, [1, 1, 1]), encoded[2]))
        await until(lambda: members[2].averager._reductions or dying.done())
        await members[2].node.close()
        first, second = await running
        expected = reference(CODECS["fp16"], encoded, [1, 1, 1], 3, size)
        for result in (first, second):
            assert isinstance(result, RoundFailed) or torch.equal(result, expected)
        await asyncio.gather(dying, return_exceptions=True)

    swarm(scenario)


def test_a_member_that_never_comes_fails_the_round_soon(swarm, monkeypatch):
    monkeypatch.setattr(averaging, "COME_SECONDS", 0.5)

    async def scenario(nodes):
        members = await peers(nodes, 3, "fp16", 100)
        group = group_of(members, [1, 1, 1])
        results = await outcomes(members[:2], group, [CODECS["fp16"].encode(torch.ones(100))] * 2)
        assert all(isinstance(result, RoundFailed) for result in results)
        assert any(members[2].id[-6:] in str(result) for result in results)

    swarm(scenario)


def test_a_member_that_sent_everything_is_in_the_average_even_if_it_takes_nothing_back(swarm):
    async def scenario(nodes):
        size = 100
        members = await peers(nodes, 3, "fp16", size)
        leaver = members[0]
        leaver.averager.__class__ = type("Leaver", (Bad,), {})
        encoded = [CODECS["fp16"].encode(torch.full((size,), float(number))) for number in range(3)]
        # The others reduce; the leaver sends its parts, and goes without reading an answer.
        results = await outcomes(members, group_of(members, [1, 1, 1], members[1:]), encoded)
        expected = reference(CODECS["fp16"], encoded, [1, 1, 1], 2, size)
        assert isinstance(results[0], RoundFailed)
        assert all(torch.equal(result, expected) for result in results[1:])

    swarm(scenario)


def test_strangers_and_second_streams_are_refused(swarm):
    async def scenario(nodes):
        members = await peers(nodes, 2, "fp16", 100)
        stranger = Peer(await nodes.node(), CODECS["fp16"], 100)
        group = group_of(members, [1, 1])
        reducing = asyncio.create_task(members[0].averager.average(group, CODECS["fp16"].encode(torch.ones(100))))
        await until(lambda: members[0].averager._reductions)
        first = await members[1].streams.open(members[0].id, REDUCE)
        await first.send({"group": group.id}, seconds=5)
        reduction = members[0].averager._reductions[group.id]
        await until(lambda: members[1].id in reduction._came)
        for peer, reason in ((stranger, "not a member"), (members[1], "sending already")):
            channel = await peer.streams.open(members[0].id, REDUCE)
            await channel.send({"group": group.id}, seconds=5)
            with pytest.raises(Exception, match=reason):
                await channel.receive(seconds=5)
            channel.close()
        reducing.cancel()
        first.close()
        await asyncio.gather(reducing, return_exceptions=True)

    swarm(scenario)


def test_random_deaths_never_leave_two_results(swarm, seed):
    """Twenty rounds of three, each with one member cancelled at a random moment: whoever finishes has the reference's bytes."""

    async def scenario(nodes):
        rng, size = random.Random(seed), 6 * PART_ELEMENTS
        members = await peers(nodes, 3, "fp16", size)
        generator = torch.Generator().manual_seed(seed)
        for attempt in range(20):
            encoded = [CODECS["fp16"].encode(torch.randn(size, generator=generator)) for _ in members]
            group = group_of(members, [1, 2, 3], attempt=str(attempt))
            jobs = [asyncio.create_task(p.averager.average(group, mine)) for p, mine in zip(members, encoded, strict=True)]
            await asyncio.sleep(rng.uniform(0, 0.2))
            rng.choice(jobs).cancel()
            results = await asyncio.gather(*jobs, return_exceptions=True)
            expected = reference(CODECS["fp16"], encoded, [1, 2, 3], 3, size)
            for result in results:
                assert isinstance(result, RoundFailed | asyncio.CancelledError) or torch.equal(result, expected)

    swarm(scenario)
