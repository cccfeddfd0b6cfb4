"""The contract of every strategy, and what each one must equal."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from peer.config import PeerConfig
from peer.contracts import Member, SyncContext
from peer.loop.schedule import build_schedule
from peer.rooms import load_part
from peer.sync.engine.codec import Wire
from peer.sync.engine.outer import RoundInfo
from peer.sync.engine.state import State, next_state
from peer.sync.engine.trainer.local_work import Anchor, LocalWork
from peer.sync.gradients import Gradients, bias_correction, clip_coefficient
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.peer.sync.swarm_tools import state_of
from tests.sources import parts

STRATEGIES = [name for name in parts("sync") if name != "none"]
SIZE = 1003
RUN = RunConfig(model="x", learning_rate=1e-2, target_batch_size=12, max_grad_norm=1.0)


def vectors(count: int, seed: int = 0) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.rand(SIZE, generator=rng) + 0.01 for _ in range(count)]


def info(number: int = 3, norm: float = 20.0) -> RoundInfo:
    return RoundInfo(number, 100 * number, norm)


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_outer_step_by_slices_has_the_same_bits_and_leaves_what_it_was_given(name):
    strategy = load_part("sync", name).strategy(RUN)
    before = vectors(1 + strategy.slots)
    copies, mean = [vector.clone() for vector in before], torch.randn(SIZE)
    whole = strategy.outer_step(before, mean, info())
    bounds = [0, 1, 17, 400, 401, SIZE]
    for start, end in itertools.pairwise(bounds):
        part = strategy.outer_step([vector[start:end] for vector in before], mean[start:end], info())
        assert len(part) == len(before)
        for sliced, vector in zip(part, whole, strict=True):
            assert sliced.dtype == torch.float32 and torch.equal(sliced, vector[start:end])
    assert all(torch.equal(vector, copy) for vector, copy in zip(before, copies, strict=True))
    assert not torch.equal(whole[0], before[0])


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_outer_step_does_the_same_with_any_number_of_threads(name):
    strategy = load_part("sync", name).strategy(RUN)
    large = [torch.rand(100_000) for _ in range(2 + strategy.slots)]
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(strategy.outer_step(large[1:], large[0], info()))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_parameters_add_the_mean():
    anchor, mean = vectors(2)
    assert torch.equal(load_part("sync", "parameters").strategy(RUN).outer_step([anchor], mean, info())[0], anchor + mean)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_diloco_is_torchs_nesterov_on_the_anchor(momentum):
    strategy = load_part("sync", "diloco").strategy(RunConfig(model="x", outer_learning_rate=0.7, outer_momentum=momentum))
    rng = torch.Generator().manual_seed(1)
    anchor = nn.Parameter(torch.randn(SIZE, generator=rng))
    reference = torch.optim.SGD([anchor], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    ours = [anchor.detach().clone(), torch.zeros(SIZE)]
    for number in range(1, 6):
        mean = torch.randn(SIZE, generator=rng)
        ours = strategy.outer_step(ours, mean, info(number))
        anchor.grad = -mean
        reference.step()
    torch.testing.assert_close(ours[0], anchor.detach(), rtol=1e-6, atol=1e-6)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def losses(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
    return 30 * (model(data) - data[:, :3].sin()).square().mean(1)


class Replica:
    """One peer of a swarm in one process: a model, its local work, and the state that all hold."""

    def __init__(self, strategy, wire: str = "fp32"):
        self.model = net()
        self.params = dict(self.model.named_parameters())
        self.size = sum(p.numel() for p in self.params.values())
        self.wire, self.strategy = Wire(wire, self.size), strategy
        start = state_of(self.position(), slots=strategy.slots)
        self.work = LocalWork(self.params, Anchor(start.digest, start.header, start.buffer), strategy, self.wire)
        self.state = start

    def position(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for _, p in sorted(self.params.items())])

    def backward(self, data: torch.Tensor) -> None:
        losses(self.model, data).sum().backward()
        self.work.accumulate()
        self.work.open_samples += len(data)

    def rebase(self, state: State, number: int) -> list[int]:
        self.state = state
        return self.work.rebase(Anchor(state.digest, state.header, state.buffer), number)


def commit(replicas: list[Replica], number: int) -> State:
    """The round that averages what `replicas` froze, in the order of their ids, as reducers do."""
    members = [Member(f"peer{index}", number, replica.work.frozen.samples) for index, replica in enumerate(replicas)]
    total, parent = sum(member.samples for member in members), replicas[0].state
    mean = torch.zeros(replicas[0].size)
    for member, replica in zip(members, replicas, strict=True):
        mean += replica.wire.decode(replica.work.frozen.encoded.bytes()) * (member.samples / total)
    about = RoundInfo(number, parent.header.samples, float(mean.double().norm()))
    return next_state(parent, [replicas[0].strategy.outer_step(parent.vectors(mean.numel()), mean, about)], members)


@pytest.mark.parametrize("shares", [(7, 5), (1, 8, 3)])
def test_gradients_of_several_peers_equal_adamw_on_one_machine_with_the_whole_batch(shares):
    options = {"adam_weight_decay": 0.1, "max_grad_norm": 25.0, "lr_scheduler": "linear", "lr_warmup_samples": 60, "total_samples": 1000}
    run = RunConfig(model="x", learning_rate=1e-2, target_batch_size=sum(shares), **options)
    strategy = load_part("sync", "gradients").strategy(run)
    replicas, alone = [Replica(strategy) for _ in shares], net()
    reference = torch.optim.AdamW(alone.parameters(), betas=(run.adam_beta1, run.adam_beta2), eps=run.adam_epsilon, weight_decay=0.1)
    rng, norms = torch.Generator().manual_seed(1), []
    for number in range(1, 21):
        batch = torch.randn(sum(shares), 6, generator=rng)
        for replica, data in zip(replicas, batch.split(shares), strict=True):
            for step in data.split(2):  # a few local steps to each contribution
                replica.backward(step)
            replica.work.freeze(number)
        reference.param_groups[0]["lr"] = build_schedule(run)(replicas[0].state.header.samples)
        losses(alone, batch).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 25.0)))
        reference.step()
        reference.zero_grad()
        state = commit(replicas, number)
        for replica in replicas:
            assert replica.rebase(state, number) == []
            assert torch.equal(replica.position(), state.vectors(replica.size)[0])
    assert min(norms) < 25.0 < max(norms)  # some rounds were clipped and some were not
    expected = dict(alone.named_parameters())
    for name, parameter in replicas[0].params.items():
        torch.testing.assert_close(parameter.detach(), expected[name].detach(), rtol=2e-5, atol=2e-6)


def test_a_cosine_that_differs_in_its_last_bit_gives_the_same_state():
    rate = build_schedule(RunConfig(model="x", learning_rate=3e-4, lr_scheduler="cosine", total_samples=10_000))(3_333)
    vectors, mean = [torch.randn(99) for _ in range(2)] + [torch.rand(99)], torch.randn(99)
    steps = [
        Gradients(RUN, lambda samples, r=r: r).outer_step(vectors, mean, RoundInfo(3, 3_333, 1.0)) for r in (rate, math.nextafter(rate, 1))
    ]
    assert all(torch.equal(one, other) for one, other in zip(*steps, strict=True))


def test_what_a_round_of_gradients_lost_to_the_codec_is_in_the_next_contribution():
    replica = Replica(load_part("sync", "gradients").strategy(RUN), "fp16")
    truth = sent = torch.zeros(replica.size)
    rng = torch.Generator().manual_seed(1)
    for number, samples in enumerate((4, 8, 2), start=1):
        data = torch.randn(samples, 6, generator=rng)
        losses(replica.model, data).sum().backward()
        truth = truth + torch.cat([p.grad.flatten() for _, p in sorted(replica.params.items())])
        replica.work.accumulate()
        replica.work.open_samples += samples
        sent = sent + replica.wire.decode(replica.work.freeze(number).encoded.bytes()) * samples
        assert replica.rebase(commit([replica], number), 1 << 20) == []
    stays = torch.cat([replica.work._sums[name].flatten() for name in sorted(replica.params)])
    assert float(stays.abs().max()) > 0
    torch.testing.assert_close(sent + stays, truth, rtol=1e-6, atol=1e-5)
    assert float((sent - truth).norm()) < 1e-3 * float(truth.norm())


def test_gradients_from_another_anchor_are_dropped_with_their_samples():
    strategy = load_part("sync", "gradients").strategy(RUN)
    replica, other = Replica(strategy), Replica(strategy)
    for peer in (replica, other):
        peer.backward(torch.randn(4, 6))
    other.work.freeze(1)
    state = commit([other], 1)
    assert replica.rebase(state, 0) == [0] and replica.work.waiting_samples == 0
    assert torch.equal(replica.position(), state.vectors(replica.size)[0])
    data = torch.randn(2, 6)
    replica.backward(data)
    other.rebase(state, 1)
    other.backward(data)
    assert torch.equal(replica.work.freeze(2).encoded.bytes(), other.work.freeze(2).encoded.bytes())


@given(beta=st.floats(0, 0.99999), step=st.integers(1, 100_000))
def test_the_bias_correction_is_one_minus_a_power(beta, step):
    assert math.isclose(bias_correction(beta, step), 1 - beta**step, rel_tol=1e-9, abs_tol=1e-15)


def test_the_clip_is_torchs():
    for norm in (0.0, 0.5, 1.0, 3.0, 1e8):
        parameter = nn.Parameter(torch.zeros(4))
        parameter.grad = torch.full((4,), norm / 2)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        assert math.isclose(float(parameter.grad[0]), norm / 2 * clip_coefficient(norm, 1.0), rel_tol=1e-6, abs_tol=1e-12)
    assert clip_coefficient(3.0, 0.0) == 1.0


@pytest.mark.parametrize(("name", "reason"), [("gradients", "gradients taken while a round is averaged"), ("none", "averages nothing")])
def test_overlap_is_refused_where_nothing_can_be_moved_along(name, reason, tmp_path):
    run, params = replace(RUN, sync=name), {"weight": nn.Parameter(torch.zeros(4))}
    context = SyncContext(run=run, peer=PeerConfig(overlap=True, output_dir=str(tmp_path)), params=params, output_dir=tmp_path / "out")
    with pytest.raises(UserError, match=reason) as refused:
        load_part("sync", name).build(context)
    assert "--overlap" in refused.value.fix and not (tmp_path / "out").exists()
