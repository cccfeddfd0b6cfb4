"""The simulation's replicas against what they must equal; what they learn is the benchmark."""

from argparse import Namespace

import pytest
import torch
from torch import nn

from benchmarks import simulated_swarm

ARGS = Namespace(
    peers=2,
    batch=4,
    rate=0.01,
    beta2=0.999,
    warmup=0,
    horizon=0, falls="linear", late=0, late_rate="rises", ema=0.0,
    sync="parameters",
    outer_rate=1.0,
    outer_momentum=0.0,
    round=32,
    averaging="mean",
    clip=20.0,
    liar=1.0,
    mislabelled=False,
)


class Toy:
    """A school of one line: every lesson is of the same pictures, so that replicas learn the same."""

    def pupil(self):
        torch.manual_seed(0)
        return nn.Linear(3, 1)

    def lessons(self, batch, rng):
        while True:
            yield torch.ones(batch, 3), rng

    def teach(self, pupil, optimizer, lesson):
        with torch.enable_grad():
            pupil(lesson[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def after(rounds: int, **changes) -> simulated_swarm.Swarm:
    swarm = simulated_swarm.Swarm(Toy(), Namespace(**{**vars(ARGS), **changes}), seed=1)
    for _ in range(rounds):
        swarm.round()
    return swarm


def test_replicas_that_see_the_same_learn_what_one_learns_in_as_many_steps():
    two, one = after(3), after(3, peers=1, sync="none", round=16)
    assert two.samples == 96 and one.samples == 48
    assert two.vectors[0].tolist() == pytest.approx(one.vectors[0].tolist(), abs=1e-6)


def test_a_liar_among_five_stops_a_mean_and_hardly_a_centre():
    right = after(3, peers=5, round=80).vectors[0]
    began = simulated_swarm.vector(Toy().pupil())
    of_mean, of_centre = (after(3, peers=5, round=80, liar=-20.0, averaging=name).vectors[0] for name in ("mean", "centered"))
    assert float((of_centre - right).norm() / (right - began).norm()) < 0.1
    assert torch.dot(of_mean - began, right - began) < 0, "it goes the opposite way"


def test_momentum_carries_what_a_round_learned_into_the_next():
    plain, without, pushed = after(2), after(2, sync="diloco"), after(2, sync="diloco", outer_momentum=0.5)
    assert plain.vectors[0].tolist() == pytest.approx(without.vectors[0].tolist(), abs=1e-6)
    start = simulated_swarm.vector(Toy().pupil())
    assert (pushed.vectors[0] - start).norm() > (plain.vectors[0] - start).norm() * 1.2


def test_a_late_peer_has_new_moments_and_a_rate_that_rises_unless_told_otherwise():
    def rates(**changes):
        swarm = after(2, warmup=64, late=64, **changes)
        steps, seen = [next(iter(one.state.values()))["step"].item() for one in swarm._optimizers], []
        for _ in range(3):
            swarm.round()
            seen.append([one.param_groups[0]["lr"] / ARGS.rate for one in swarm._optimizers])
        now = [next(iter(one.state.values()))["step"].item() for one in swarm._optimizers]
        assert steps == [8, 8] and now == [12, 20]
        return seen

    assert rates() == [[0.25, 1], [0.75, 1], [1, 1]]
    assert rates(late_rate="full") == [[1, 1]] * 3


@pytest.mark.parametrize(
    ("changes", "shares"),
    [({}, [1, 1]), ({"warmup": 64}, [0.25, 0.75, 1, 1]), ({"horizon": 128}, [0.875, 0.625, 0.375, 0.125, 0, 0])],
)
def test_the_rate_rises_and_falls_along_lines_and_stays_at_nothing(changes, shares):
    swarm, seen = after(0, **changes), []
    for _ in shares:
        swarm.round()
        seen.append(swarm._optimizers[1].param_groups[0]["lr"] / ARGS.rate)
    assert seen == pytest.approx(shares)
