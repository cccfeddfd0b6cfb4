"""`averaging = "centered"`: what one of a few members says that is far from the others moves a round by little, and costs nobody else anything."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.contracts import Member
from peer.sync.engine.codec import PART_ELEMENTS, Wire
from peer.sync.engine.round.averaging import Averager
from peer.sync.engine.round.centering import centre, products
from peer.sync.engine.round.clipping import Clipping
from peer.sync.engine.round.groups import Group
from swarm.weights import even_shares
from tests.peer.sync.replicas import SIZE, check_invariants, make_run, peers
from tests.peer.sync.swarm_tools import until
from tests.peer.sync.test_averaging import Peer as AveragingPeer
from tests.peer.sync.test_averaging import contributions
from tests.peer.sync.test_clipping import Poisoner

SECONDS = 600.0


def centered(vectors: torch.Tensor, samples: list[int]) -> torch.Tensor:
    return centre(even_shares(samples), products(vectors)).float() @ vectors


@pytest.mark.parametrize(
    ("samples", "shares"),
    [
        ([8, 8], None),
        ([8], None),
        ([8, 8, 8], [1 / 3, 1 / 3, 1 / 3]),
        ([1, 10, 100], [1 / 3, 1 / 3, 1 / 3]),  # of three, none can have more than another
        ([8, 8, 8, 8, 40], [1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 3]),
        ([1, 5, 100, 3], [1 / 12, 1 / 3, 1 / 3, 1 / 4]),  # two are cut
        ([1, 2, 3, 4], [1 / 9, 2 / 9, 3 / 9, 3 / 9]),
    ],
)
def test_a_members_share_is_that_of_its_samples_and_at_most_a_third(samples, shares):
    assert even_shares(samples) == (shares and pytest.approx(shares))


@given(st.lists(st.integers(1, 10**6), min_size=3, max_size=40))
def test_no_share_is_above_a_third_and_who_brought_more_never_counts_less(samples):
    shares = even_shares(samples)
    assert sum(shares) == pytest.approx(1) and max(shares) <= 1 / 3 + 1e-9
    assert [share for _, share in sorted(zip(samples, shares, strict=True))] == sorted(shares)


def test_of_equal_vectors_the_centre_is_that_vector_and_of_zeros_zero(seed):
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(centered(vector.repeat(5, 1), [8] * 5), vector)
    assert not centered(torch.zeros(4, 1000), [8] * 4).any()
    assert centered(torch.full((3, 9), 3e38), [8] * 3).isfinite().all()
    assert not centered(torch.stack([torch.zeros(9), torch.zeros(9), torch.full((9,), 1e30)]), [8] * 3).any()


def test_among_the_honest_the_centre_is_all_but_the_mean(seed):
    """Contributions have one part in common, and one of their own that is as long."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(1000, generator=generator) + torch.randn(5, 1000, generator=generator)
    mean = vectors.mean(0)
    assert float((centered(vectors, [8] * 5) - mean).norm() / mean.norm()) < 0.03


@pytest.mark.parametrize("times", [-1.0, -20.0, 1e6])
def test_one_liar_of_five_moves_it_by_less_than_the_honest_differ_from_each_other(seed, times):
    generator = torch.Generator().manual_seed(seed)
    honest = torch.randn(1000, generator=generator) + 0.5 * torch.randn(4, 1000, generator=generator)
    with_liar = centered(torch.cat([honest, times * honest.mean(0, keepdim=True)]), [8] * 5)
    moved, apart = float((with_liar - honest.mean(0)).norm()), float((honest - honest.mean(0)).norm(dim=1).mean())
    assert moved < apart
    mean = torch.cat([honest, times * honest.mean(0, keepdim=True)]).mean(0)
    assert abs(times) == 1 or float((mean - honest.mean(0)).norm()) > 5 * apart, "else a mean would do"


@pytest.mark.parametrize(("samples", "least"), [([1000, 1000, 1, 1], 0.7), ([1000, 1000, 10, 10, 10], 0.7), ([100, 100, 100, 30], 0.6)])
def test_who_brings_few_samples_sets_no_limit_for_the_others(samples, least, seed):
    """A contribution grows with its samples. The mean goes as far as those of most samples."""
    noise = torch.randn(len(samples), 1000, generator=torch.Generator().manual_seed(seed))
    vectors = torch.tensor(samples)[:, None] * (torch.ones(1000) + 0.3 * noise)
    far = (torch.tensor(samples, dtype=torch.float) ** 2).sum() / sum(samples)
    assert least < float(centered(vectors, samples).mean()) / float(far) < 1.1


def test_one_that_does_nearly_all_of_the_work_is_cut_to_what_the_others_bring():
    """So it is not for peers of very unlike speed (decision 0022): nobody can tell it from one that claims so."""
    samples = [1000, 10, 10, 10]
    assert float(centered(torch.tensor(samples)[:, None] * torch.ones(1000), samples).mean()) < 50


def test_who_claims_all_samples_counts_for_a_third():
    honest = torch.ones(4, 10)
    assert float(centered(torch.cat([honest, -20 * honest[:1]]), [8, 8, 8, 8, 10**6]).min()) > 0.5


class CenteringAverager(Averager):
    def __init__(self, peer_id, streams, wire):
        super().__init__(peer_id, streams, wire, Clipping(20.0, centered=True))


@pytest.mark.parametrize(("codec", "count"), [("fp32", 5), ("fp16", 3), ("int4", 4), ("fp16", 2)])
def test_all_get_the_same_bytes_and_those_of_each_parts_centre(virtual, seed, codec, count):
    async def scenario(nodes):
        wire, samples = Wire(codec, 3 * PART_ELEMENTS + 100, 50), [2, 3, 4, 5, 6][:count]
        found = sorted([AveragingPeer(await nodes.node(), wire, CenteringAverager) for _ in samples], key=lambda peer: peer.id)
        for peer in found:
            await peer.averager.start()
        encoded = contributions(wire, count, seed)
        vectors = torch.stack([wire.decode(vector) for vector in encoded])
        if count == 2:  # of two nobody is far from the other
            expected = (vectors * torch.tensor(samples)[:, None] / sum(samples)).sum(0)
        else:
            expected = torch.cat([centered(part.of(vectors.T).T.contiguous(), samples) for part in wire.parts])
        of = tuple(Member(peer.id, 1, brought) for peer, brought in zip(found, samples, strict=True))
        group = Group("p", of, tuple(peer.id for peer in found), "x", tuple(wire.norm(vector) for vector in encoded))
        means = await asyncio.gather(*(peer.averager.average(group, mine) for peer, mine in zip(found, encoded, strict=True)))
        assert all(torch.equal(mean.encoded, means[0].encoded) and mean.square_norm == means[0].square_norm for mean in means)
        again = wire.decode(wire.encode(expected))
        assert float((wire.decode(means[0].encoded) - again).norm() / again.norm()) < 1e-2

    virtual(scenario)


def test_the_longest_centre_is_within_what_the_stated_norms_allow(seed):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(5, 1000, generator=generator) * torch.tensor([1.0, 1.0, 2.0, 3.0, 30.0])[:, None]
    norms = vectors.norm(dim=1).tolist()
    clipping = Clipping(20.0, centered=True)
    longest = clipping.longest_mean([Member(f"peer{number}", 1, 8) for number in range(5)], norms)
    assert float(centered(vectors, [8] * 5).norm()) <= longest == pytest.approx(float(vectors.norm()))


def test_a_poisoner_in_a_swarm_of_four_moves_the_state_no_more_than_the_honest_do(virtual):
    """Also without a clip: its vectors are a million times as long, and the others' are ones of one sign."""

    async def scenario(nodes):
        run = make_run(wire="fp32", clip_members=0.0, averaging="centered")
        honest = await peers(nodes, 3, run)
        poisoner = await Poisoner(nodes, await nodes.node(), run).start(nodes)

        def poisoned():
            return [state for state in honest[0].lands if len(state.header.members) == 4 and any(m.peer == poisoner.id for m in state.header.members)]

        await until(lambda: len(poisoned()) >= 5, SECONDS)
        for state in poisoned():
            before = next(other for other in honest[0].lands if other.digest == state.header.parents[0])
            moved = float((state.vectors(SIZE)[0] - before.vectors(SIZE)[0]).norm())
            assert moved < 10 * SIZE**0.5, "each honest one contributes about the root of SIZE"
        check_invariants(*honest)

    virtual(scenario)
