"""No member moves a round further than a few times what the others warrant, and none sends more than the norm that it stated."""

import asyncio
import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine.codec import LEAST_ELEMENTS, PART_ELEMENTS, Wire, rough_square, square_norm
from peer.sync.engine.net.streams import PeerLost
from peer.sync.engine.round.averaging import Averager, RoundFailed
from peer.sync.engine.round.clipping import UNCLIPPED, Clipping, ReceivedMeans, StatedNorms
from peer.sync.engine.round.groups import Group, share_out
from peer.sync.engine.trainer.trainer import Contribution
from swarm.tasks import end_tasks
from tests.peer.sync.replicas import SIZE, Peer, check_invariants, make_run, peers
from tests.peer.sync.swarm_tools import until
from tests.peer.sync.test_averaging import Peer as AveragingPeer
from tests.peer.sync.test_averaging import contributions, outcomes

SECONDS = 600.0


def members(*samples):
    return [Member(f"peer{index}", 1, count) for index, count in enumerate(samples)]


@pytest.mark.parametrize(
    ("samples", "norms", "factors"),
    [
        ((8, 8, 8), (1.0, 1.1, 100.0), [1, 1, 1.5 * 1.1 / 100]),
        ((8, 8), (1.0, 100.0), [1, 0.015]),  # of two the smaller
        ((8, 8, 8, 8), (1.0, 2.0, 50.0, 50.0), [1, 1, 0.06, 0.06]),  # of four the second
        ((10, 100), (1.0, 10.0), [1, 1]),  # ten times the steps, ten times the way
        ((100, 100, 1), (10.0, 10.0, 10.0), [1, 1, 0.015]),
        ((8, 8, 8), (0.0, 1.0, 1.0), [1, 1, 1]),
        ((8, 8), (0.0, 1.0), [1, 1]),
        ((8, 8, 8, 8), (0.0, 0.0, 1.0, 9.0), [1, 1, 1, 1.5 / 9]),  # who brings zeros sets no limit
        ((8, 8), (0.0, 0.0), [1, 1]),
        ((8,), (1e9,), [1]),
        ((8, 8, 8), (1.0, 1.0, 2.0**200), [1, 1, 1.5 * 2.0**-200]),
    ],
)
def test_a_norm_counts_up_to_the_limit_that_the_median_per_sample_sets(samples, norms, factors):
    assert Clipping(1.5).factors(members(*samples), norms) == pytest.approx(factors, rel=1e-12)


def test_mean_gradients_are_compared_as_they_are():
    """A mean over 100 samples is no longer than one over 1."""
    assert Clipping(1.5, per_sample=False).factors(members(1, 100, 100), (1.0, 1.0, 3.0)) == [1, 1, 0.5]


def test_without_norms_or_a_limit_nobody_is_clipped():
    assert Clipping(1.5).factors(members(8, 8), ()) == Clipping(0.0).factors(members(8, 8), (1.0, 1e9)) == [1, 1]


def test_who_sends_more_than_it_stated_is_named_and_rounding_names_nobody():
    stated = StatedNorms(members(8, 8), (5.0, 5.0))
    stated.spend("peer0", 9.0)
    stated.spend("peer0", 16.0 * (1 + 1e-12))
    stated.spend("peer1", 24.0)
    with pytest.raises(PeerLost, match="peer1 sent more than the norm that it stated") as caught:
        stated.spend("peer1", 1.1)
    assert set(caught.value.culprits) == {"peer1"}


@pytest.mark.parametrize(
    ("samples", "norms", "longest"),
    [
        ((8, 8), (3.0, 3.0), 3.0),
        ((10, 30), (1.0, 3.0), 2.5),  # a quarter of the one, three quarters of the other
        ((8, 8, 8), (1.0, 1.0, 1e9), 3.5 / 3),  # the third counts as 1.5
        ((8, 8), (0.0, 0.0), 0.0),
    ],
)
def test_a_mean_is_at_most_as_long_as_the_clipped_contributions_in_a_line(samples, norms, longest):
    assert Clipping(1.5).longest_mean(members(*samples), norms) == pytest.approx(longest, rel=1e-12)


def test_without_norms_a_mean_may_have_any_length():
    assert UNCLIPPED.longest_mean(members(8, 8), (0.0, 0.0)) == Clipping(1.5).longest_mean(members(8, 8), ()) == math.inf
    ReceivedMeans(math.inf).add("peer0", 1e300, 1e300)


def test_a_reducer_is_held_to_its_own_sums_and_to_the_longest_mean():
    received = ReceivedMeans(5.0)
    received.add("peer0", 64.0, 64.0 * (1 + 1e-4))
    received.add("peer0", 36.0, 36.0)
    received.add("peer1", 99.0, 99.0)
    for reducer, told, square, reason in (("peer0", 0.2, 0.2, "longer than the contributions"), ("peer1", 1e300, 0.5, "wrong sum"), ("peer1", 0.0, 0.5, "wrong sum")):
        with pytest.raises(PeerLost, match=f"{reducer} .*{reason}") as caught:
            received.add(reducer, told, square)
        assert set(caught.value.culprits) == {reducer}


HARDEST = {
    "fp32": (lambda n: torch.randn(n, generator=torch.Generator().manual_seed(1)), 1.0, 0.999),
    # A little more than half of the smallest number that fp16 has: rounded up to it.
    "fp16": (lambda n: torch.full((n,), 2.0**-24), 0.0, 1.99),
    # One large value among small ones that are rounded up to its scale.
    "int8": (lambda n: (torch.arange(n) % 128 == 0) * 126.495 + 0.505, 1.0, 1.002),
    "int4": (lambda n: (torch.arange(n) % 64 == 0) * 6.495 + 0.505, 1.0, 1.25),
}
"""Values; how much of them a second member brings as well; how much longer the mean of the two is once it is encoded, at least."""


@pytest.mark.parametrize("codec", HARDEST)
def test_no_codec_takes_an_honest_mean_for_too_long(codec):
    """Not even of contributions in one direction, of values that are hardest for it."""
    values_of, share, ratio = HARDEST[codec]
    part, values, found = Wire(codec, LEAST_ELEMENTS).parts[0], values_of(LEAST_ELEMENTS), members(5001, 4999)
    encoded = part.encode(values * 0.5001 + values * share * 0.4999)
    square, norm = square_norm(part.decode(encoded)), float(values.norm())
    longest = Clipping(20.0).longest_mean(found, (norm, norm * share))
    assert math.sqrt(square) / longest >= ratio
    ReceivedMeans(longest).add("peer0", square, rough_square(part.decode(encoded)))


def group_with_norms(found, samples, norms):
    of = tuple(Member(peer.id, 1, count) for peer, count in zip(found, samples, strict=True))
    return Group("p", of, tuple(peer.id for peer in found), "x", tuple(norms))


class ClippingAverager(Averager):
    def __init__(self, peer_id, streams, wire):
        super().__init__(peer_id, streams, wire, Clipping(1.5))


async def clipping_peers(nodes, count, wire, last=ClippingAverager):
    found = [AveragingPeer(await nodes.node(), wire, ClippingAverager if index < count - 1 else last) for index in range(count)]
    for peer in found:
        await peer.averager.start()
    return sorted(found, key=lambda peer: peer.id)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_all_get_the_bytes_of_the_mean_of_clipped_contributions(virtual, seed, codec):
    async def scenario(nodes):
        wire, samples = Wire(codec, 5 * PART_ELEMENTS + 100, 50), [2, 3, 4]
        found, encoded = await clipping_peers(nodes, 3, wire), contributions(wire, 3, seed)
        encoded[1] = wire.encode(wire.decode(encoded[1]) * -30)
        norms = [wire.norm(vector) for vector in encoded]
        limit = 1.5 * statistics.median(norm / count for norm, count in zip(norms, samples, strict=True))
        expected = torch.zeros(wire.size)
        for vector, norm, count in zip(encoded, norms, samples, strict=True):
            expected += wire.decode(vector) * (count / sum(samples) * min(1.0, limit * count / norm))
        group = group_with_norms(found, samples, norms)
        means = await asyncio.gather(*(p.averager.average(group, mine) for p, mine in zip(found, encoded, strict=True)))
        assert all(torch.equal(mean.encoded, wire.encode(expected)) for mean in means)
        assert wire.square_norm(means[0].encoded) < sum(norms[index] ** 2 for index in (0, 2))

    virtual(scenario)


def test_a_member_that_states_less_than_it_sends_fails_the_round_and_is_named(virtual, seed):
    async def scenario(nodes):
        wire = Wire("fp16", 9 * PART_ELEMENTS)
        found, encoded = await clipping_peers(nodes, 3, wire), contributions(wire, 3, seed)
        norms = [wire.norm(vector) for vector in encoded]
        liar = found[2]
        group = group_with_norms(found, [8, 8, 8], [*norms[:2], norms[2] / 4])
        results = await outcomes(found, group, encoded)
        assert all(isinstance(result, RoundFailed) for result in results), results
        assert any(result.culprits == {liar.id} for result in results[:2])
        assert all(result.culprits <= {liar.id} for result in results[:2])

    virtual(scenario)


class LongMeans(ClippingAverager):
    """A reducer that gives everybody a mean of `times` the right length, and tells its sum of squares rightly."""

    times = 3.0

    async def _serve(self, channel):
        honest = channel.send

        async def send(header, payload, *, seconds):
            longer = torch.frombuffer(bytearray(payload), dtype=torch.float16) * self.times
            told = {"square": square_norm(longer.float())}
            await honest(told, memoryview(longer.numpy().view("uint8")), seconds=seconds)

        channel.send = send
        await super()._serve(channel)


@pytest.mark.parametrize("times", [1.5, 3.0])
def test_a_reducer_whose_mean_is_longer_than_the_contributions_fails_the_round_and_is_named(virtual, seed, times):
    """Up to twice as long passes: no codec makes a mean longer than that, and the peers cannot tell whose rounding it is."""

    async def scenario(nodes):
        wire = Wire("fp16", 9 * PART_ELEMENTS)
        found = await clipping_peers(nodes, 3, wire, last=LongMeans)
        (liar,) = (peer for peer in found if isinstance(peer.averager, LongMeans))
        liar.averager.times = times
        same = contributions(wire, 1, seed)[0]
        # All of one direction, and all of it in the liar's share: a mean as long as can be.
        for peer, share in share_out("p", [peer.id for peer in found], wire.parts).items():
            for index in share if peer != liar.id else ():
                wire.parts[index].bytes_of(same).zero_()
        group = group_with_norms(found, [8, 8, 8], [wire.norm(same)] * 3)
        results = await outcomes(found, group, [same] * 3)
        honest = [result for peer, result in zip(found, results, strict=True) if peer is not liar]
        if times < 2:
            assert not any(isinstance(result, RoundFailed) for result in honest), results
            return
        assert all(isinstance(result, RoundFailed) for result in honest), results
        assert any(result.culprits == {liar.id} and "longer than the contributions" in str(result) for result in honest), results
        assert all(result.culprits <= {liar.id} for result in honest), results

    virtual(scenario)


class Poisoner(Peer):
    """Follows the protocol in everything, and contributes a million times what the others do."""

    def freeze(self):
        if self.frozen is None and self.open:
            self.number += 1
            wire = Wire(self.run.wire, self.size)
            self.frozen = (self.number, self.open, wire.encode(1e6 * torch.randn(self.size, generator=self.generator)))
            self.open, self.may_train = 0, False
            self.offer()
        else:
            super().freeze()


@pytest.mark.parametrize("clip", [0.0, 1.5])
def test_one_of_three_that_contributes_a_million_times_as_much_moves_the_state_by_little(virtual, clip):
    async def scenario(nodes):
        run = make_run(clip_members=clip, wire="fp32")
        honest = await peers(nodes, 2, run)
        poisoner = await Poisoner(nodes, await nodes.node(), run).start(nodes)

        def poisoned():
            return [state for state in honest[0].lands if any(member.peer == poisoner.id for member in state.header.members)]

        await until(lambda: len(poisoned()) >= 5, SECONDS)
        farthest = max(float(state.vectors(SIZE)[0].norm()) for state in honest[0].lands)
        honest_norm = math.sqrt(SIZE)
        rounds = honest[0].head.header.round
        assert (farthest < 3 * rounds * honest_norm) == bool(clip), "without the clip nothing holds it, else this shows nothing"
        check_invariants(*honest)

    virtual(scenario)


def test_our_own_norm_is_worked_out_once_also_where_an_attempt_is_overtaken(virtual):
    async def scenario(nodes):
        one, two = await peers(nodes, 2, make_run())
        await until(lambda: min(len(one.rounds()), len(two.rounds())) >= 2, SECONDS)
        wire, asked = Wire("fp32", 4), []
        outer = SimpleNamespace(wire=SimpleNamespace(norm=lambda data: asked.append(data) or wire.norm(data)))
        rounds = one.replica.rounds
        rounds._outer = outer
        offer = Contribution(Member(one.id, 1, 8), wire.encode(torch.full((4,), 1.5)), "p")
        overtaken = asyncio.ensure_future(rounds._norm(offer))
        await asyncio.sleep(0)
        await end_tasks(overtaken)
        assert await rounds._norm(offer) == await rounds._norm(offer) == 3.0 and len(asked) == 1
        with pytest.raises(RoundFailed, match="our own contribution has non-finite values"):
            await rounds._norm(Contribution(Member(one.id, 2, 8), torch.full((16,), 255, dtype=torch.uint8), "p"))
        rounds._outer = one.replica.rounds.averager  # whoever assists brings nothing, and needs no wire
        assert await rounds._norm(Contribution(Member(one.id, 0, 0), None, "p")) == 0.0

    virtual(scenario)


def test_a_norm_of_values_whose_squares_float32_cannot_hold():
    wire = Wire("fp32", 1000)
    assert wire.norm(wire.encode(torch.full((1000,), 1e30))) == pytest.approx(1e30 * math.sqrt(1000), rel=1e-6)
    assert wire.norm(wire.encode(torch.full((1000,), 1e-30))) == 0.0


def test_groups_that_differ_by_a_norm_are_two():
    of, names = tuple(members(8, 8)), ("peer0", "peer1")
    assert Group("p", of, names, "x", (1.0, 2.0)).id != Group("p", of, names, "x", (1.0, 2.5)).id


def test_averagers_without_a_run_clip_nobody():
    assert Averager("me", None, Wire("fp16", 8))._clipping.times == 0
