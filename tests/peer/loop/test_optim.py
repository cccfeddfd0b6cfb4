import dataclasses

import pytest
import torch
from diffusers.optimization import get_scheduler

from peer.loop.optim import build_optimizer
from peer.loop.schedule import build_schedule
from peer.methods import full
from peer.models import stable_diffusion
from peer.results.checkpoint import Checkpoints
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.peer.flat import flat
from tests.peer.models.test_stable_diffusion import encode

CPU = torch.device("cpu")


def learn(tiny_model, kind, steps, optimizer_state=None):
    """Train the tiny UNet on three fixed latents at the same noise; returns the losses, the optimizer and the parameters."""
    model = stable_diffusion.load(tiny_model, CPU, RunConfig())
    params = full.build(RunConfig()).attach(model)
    optimizer = build_optimizer(RunConfig(optimizer=kind, learning_rate=2e-3), params, CPU)
    encoded, losses = encode(model), []
    for _ in range(steps):
        loss = model.loss(encoded, torch.Generator().manual_seed(0)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, optimizer, params


def fallen(losses):
    return 1 - losses[-1] / losses[0]


def test_8_bit_adamw_learns_as_well_as_the_other(tiny_model):
    """It moves the weights to the same place: 3 % of the way beside it were measured."""
    start = flat(learn(tiny_model, "adamw", 0)[-1])
    plain, _, params = learn(tiny_model, "adamw", 10)
    small, _, others = learn(tiny_model, "adamw8bit", 10)
    moved, expected = flat(others) - start, flat(params) - start
    assert fallen(plain) > 0.2 and small == pytest.approx(plain, rel=0.02)
    assert (moved - expected).norm() < 0.1 * expected.norm()


def test_auto_is_fused_adamw_on_a_cpu(tiny_model):
    _, optimizer, _ = learn(tiny_model, "auto", 1)
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]


def test_adafactor_learns_with_the_rate_of_the_schedule(tiny_model):
    losses, optimizer, params = learn(tiny_model, "adafactor", 10)
    numbers = sum(tensor.numel() for tensor in tensors(optimizer.state_dict()["state"]))
    assert fallen(losses) > 0.2 and numbers < 0.6 * sum(parameter.numel() for parameter in params.values())
    assert {group["lr"] for group in optimizer.param_groups} == {2e-3} and not optimizer.defaults["relative_step"]


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "adafactor"])
def test_an_optimizers_state_survives_save_and_load_to_the_bit(tiny_model, tmp_path, kind):
    _, optimizer, params = learn(tiny_model, kind, 3)
    Checkpoints(tmp_path, keep=1).save({"optimizer": optimizer.state_dict()}, {})
    _, state = Checkpoints(tmp_path, keep=1).load("latest")
    _, other, others = learn(tiny_model, kind, 1)
    other.load_state_dict(state["optimizer"])
    assert_same(other.state_dict(), optimizer.state_dict())
    if kind == "adamw8bit":
        assert any(tensor.dtype == torch.uint8 for tensor in tensors(other.state_dict()))
    with torch.no_grad():
        for ours, theirs in zip(params.values(), others.values(), strict=True):
            theirs.copy_(ours)
            ours.grad = torch.ones_like(ours)
            theirs.grad = torch.ones_like(ours)
    optimizer.step()
    other.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(params.values(), others.values(), strict=True))


def tensors(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(item)


def assert_same(ours, theirs):
    ours, theirs = list(tensors(ours)), list(tensors(theirs))
    assert len(ours) == len(theirs) > 0
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["linear", "cosine", "constant", "constant_with_warmup"])
def test_the_learning_rate_is_diffusers_schedule_read_in_the_middle_of_the_round(name):
    run = RunConfig(lr_scheduler=name, lr_warmup_samples=300, total_samples=1000, target_batch_size=100, learning_rate=0.5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    reference = "constant_with_warmup" if name == "constant" else name
    factor = get_scheduler(reference, optimizer, num_warmup_steps=300, num_training_steps=1000).lr_lambdas[0]
    rate = build_schedule(run)
    assert [rate(n) for n in range(0, 1000, 100)] == [0.5 * factor(n + 50) for n in range(0, 1000, 100)]
    assert all(rate(n) > 0 for n in range(0, 1000, 100))
    assert rate(950) == 0.5 * factor(975)  # the last round is shorter


@pytest.mark.parametrize(
    ("name", "own", "options"),
    [
        ("cosine_with_restarts", {"lr_num_cycles": 3}, {"num_cycles": 3}),
        ("polynomial", {"lr_power": 2.0}, {"power": 2.0}),
    ],
)
def test_a_schedules_own_options_reach_diffusers(name, own, options):
    run = RunConfig(lr_scheduler=name, total_samples=1000, target_batch_size=100, learning_rate=0.5, **own)
    factor = get_scheduler(
        name, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), num_warmup_steps=0, num_training_steps=1000, **options
    ).lr_lambdas[0]
    rate = build_schedule(run)
    assert [rate(n) for n in range(0, 1000, 100)] == [0.5 * factor(n + 50) for n in range(0, 1000, 100)]
    assert rate(300) != build_schedule(dataclasses.replace(run, lr_num_cycles=1, lr_power=1.0))(300)


def test_a_falling_rate_ends_at_its_least_and_a_warm_up_begins_at_0():
    run = RunConfig(lr_scheduler="cosine", lr_warmup_samples=200, total_samples=1000, target_batch_size=2, learning_rate=0.5)
    plain, least = build_schedule(run), build_schedule(dataclasses.replace(run, lr_min_ratio=0.2))
    for samples in range(0, 1001, 2):
        expected = plain(samples) if samples < 199 else 0.1 + 0.8 * plain(samples)
        assert least(samples) == pytest.approx(expected, rel=1e-9)
    assert least(0) < 0.01 and least(200) == pytest.approx(0.5, rel=1e-3) and least(1000) == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("name", ["cosine", "constant"])
def test_a_peer_with_new_moments_rises_as_the_run_did(name):
    run = RunConfig(lr_scheduler=name, lr_warmup_samples=400, total_samples=4000, target_batch_size=100, learning_rate=0.5)
    rate = build_schedule(run)
    for begun in (0, 200, 1000):
        late = [rate(begun + n, begun) for n in range(0, 400, 100)]
        assert late == [min(0.5 * (n + 50) / 400, rate(begun + n)) for n in range(0, 400, 100)]
        assert rate(begun + 400, begun) == rate(begun + 400)
    never_risen = build_schedule(dataclasses.replace(run, lr_warmup_samples=0))
    assert never_risen(1000, 1000) == never_risen(1000)


def test_without_an_end_only_a_constant_rate_makes_sense():
    assert build_schedule(RunConfig(learning_rate=0.5))(10**9) == 0.5
    with pytest.raises(UserError, match=r"must know where the run ends\. Give --max_train_steps or --total_samples"):
        build_schedule(RunConfig(lr_scheduler="cosine"))
