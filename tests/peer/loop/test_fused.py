"""Fused backward and step: the bits of a step of all tensors, with the gradient of one; and what becomes of a step that breaks off."""

import copy

import pytest
import torch

from peer.config import PeerConfig
from peer.loop.clipping import Clip
from peer.loop.fused import FusedStep, check_fused
from peer.loop.optim import build_optimizer
from peer.loop.rounding import RoundingOptimizer, keep_in_bf16
from swarm.errors import UserError
from swarm.run.optimizer import OPTIMIZERS
from swarm.run_config import RunConfig
from tests.peer.loop.test_optimizers import CPU, INPUTS, TRUTH, net, run_with
from tests.peer.methods.test_methods import attached, losses, run_of, unread

SAMPLES = len(INPUTS)
CLIPS = {"tensor": Clip(1e-2, by_tensor=True), "none": Clip()}
BY_TENSOR = [name for name, facts in OPTIMIZERS.items() if facts.by_tensor]


class Learner:
    """One net with its optimizer. The last step of three does not depend on the bias."""

    def __init__(self, name, clip, fused):
        run = run_with(name, train_text_encoder=True, text_encoder_lr=1e-3)
        (self.params, self.loss), self.clip = net(), clip
        self.optimizer = build_optimizer(run, self.params, CPU)
        self.fused = FusedStep(self.params, self.optimizer, clip) if fused else None

    def step(self, without_bias=False):
        loss = self.loss() * SAMPLES
        if without_bias:
            first, _, second = self.params.values()
            loss = (INPUTS @ first.T @ second.T - INPUTS @ TRUTH).square().mean() * SAMPLES
        if self.fused:
            stepped = self.fused.backward(loss, SAMPLES)
            assert (stepped.tensors, stepped.broken) == (3, False)
        else:
            loss.backward()
            for parameter in self.params.values():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients = [parameter.grad for parameter in self.params.values()]
            self.clip.average_(gradients, SAMPLES, self.clip.norms(gradients) / SAMPLES)
            self.optimizer.step()
            self.optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in self.params.values())


def assert_equal(one, other):
    """Of state dicts, in whatever order their keys came."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict | list):
        keys = one.keys() if isinstance(one, dict) else range(len(one))
        assert type(one) is type(other) and len(one) == len(other)
        for key in keys:
            assert_equal(one[key], other[key])
    else:
        assert one == other


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", BY_TENSOR)
def test_a_fused_step_has_the_bits_of_a_whole_one_and_each_goes_on_with_the_others_state(name, clip):
    whole, fused = (Learner(name, CLIPS[clip], fused) for fused in (False, True))
    groups = [list(group["params"]) for group in fused.optimizer.param_groups]
    for number in range(4):
        for learner in (whole, fused):
            learner.step(without_bias=number == 2)
        assert all(torch.equal(ours, its) for ours, its in zip(whole.params.values(), fused.params.values(), strict=True))
        assert_equal(whole.optimizer.state_dict(), fused.optimizer.state_dict())
        states = [copy.deepcopy(learner.optimizer.state_dict()) for learner in (whole, fused)]
        whole.optimizer.load_state_dict(states[1])
        fused.optimizer.load_state_dict(states[0])
    assert all(one is other for ours, its in zip(groups, fused.optimizer.param_groups, strict=True) for one, other in zip(ours, its["params"], strict=True))


def test_clipping_by_tensor_cuts_each_to_the_norm_and_leaves_shorter_ones():
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4])]
    clip = Clip(1.0, by_tensor=True)
    clip.average_(gradients, 2, clip.norms(gradients) / 2)
    torch.testing.assert_close(gradients, [torch.tensor([0.6, 0.8]), torch.tensor([0.15, 0.2])])


def test_the_gradient_of_one_tensor_is_there_at_a_time():
    learner, seen = Learner("adamw", CLIPS["none"], fused=False), []
    tensors = [*learner.params.values()]
    for parameter in tensors:  # before those of the fused step, which let go of the gradient
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(sum(p.grad.nbytes for p in tensors if p.grad is not None)))
    learner.step()
    assert max(seen) == sum(parameter.nbytes for parameter in tensors)
    seen.clear()
    learner.fused = FusedStep(learner.params, learner.optimizer, learner.clip)
    learner.step()
    assert sorted(seen) == sorted(parameter.nbytes for parameter in tensors)


def test_bf16_weights_are_stepped_with_chances_of_their_own():
    params, _ = net()
    keep_in_bf16(params)
    inner = build_optimizer(run_with("adafactor"), params, CPU)
    optimizer = RoundingOptimizer(inner, "seed")
    fused, begun = FusedStep(params, optimizer, CLIPS["tensor"]), {name: parameter.detach().clone() for name, parameter in params.items()}
    for _ in range(2):
        assert fused.backward(sum((p.float() * 1e-3).sum() for p in params.values()), 1).tensors == len(params)
    assert all(parameter.dtype is torch.bfloat16 and parameter.grad is None for parameter in params.values())
    assert optimizer.state_dict()["steps"] == 2 * len(params)  # no two tensors are rounded by the same numbers
    assert all(not torch.equal(parameter, begun[name]) for name, parameter in params.items())


@pytest.mark.parametrize("at", [0, 1, 2])
def test_from_a_gradient_that_is_not_finite_on_nothing_is_stepped(at):
    learner = Learner("adamw", CLIPS["tensor"], fused=True)
    learner.step()
    before, order = [parameter.detach().clone() for parameter in learner.params.values()], []
    for name, parameter in learner.params.items():
        parameter.register_hook(lambda gradient, name=name: (order.append(name), gradient * float("inf") if len(order) == at + 1 else gradient)[1])
    stepped = learner.fused.backward(learner.loss(), SAMPLES)
    assert (stepped.tensors, stepped.broken) == (at, True)
    for (name, parameter), old in zip(learner.params.items(), before, strict=True):
        assert torch.equal(parameter, old) == (order.index(name) >= at) and parameter.isfinite().all() and parameter.grad is None


def test_parameters_that_no_loss_depends_on_are_passed_over():
    learner = Learner("adamw", CLIPS["none"], fused=True)
    learner.step()
    bias = learner.params["unet.bias"]
    before, (first, _, second) = bias.detach().clone(), learner.params.values()
    loss = (INPUTS @ first.T @ second.T).square().sum()
    assert learner.fused.backward(loss, SAMPLES, unread=[bias]).tensors == 2 and torch.equal(bias, before)


def test_unread_parameters_are_passed_over_also_where_they_get_a_gradient_of_zeros():
    """As the last text query of SD 3's and Qwen-Image's joint attention does: it is in the graph, and sliced off."""
    learner = Learner("adamw", CLIPS["none"], fused=True)
    learner.step()
    bias = learner.params["unet.bias"]
    before = bias.detach().clone()
    loss = learner.loss() * SAMPLES
    zeros = torch.autograd.grad((bias * 0).sum(), bias)[0]
    bias.register_hook(lambda gradient: zeros)
    stepped = learner.fused.backward(loss, SAMPLES, unread=[bias])
    assert (stepped.tensors, stepped.broken) == (2, False)
    assert torch.equal(bias, before) and bias.grad is None, "neither stepped nor decayed"


REFUSED = [
    ({"clip_grad": "global"}, {}, 1, r"clips the gradient of all tensors together \(--clip_grad global, --max_grad_norm 1\).*--clip_grad tensor"),
    ({"clip_grad": "none", "sync": "gradients"}, {}, 1, "--sync gradients adds up all gradients of a round"),
    ({"clip_grad": "none", "optimizer": "prodigy"}, {}, 1, "Prodigy steps all tensors at once.*another --optimizer"),
    ({"clip_grad": "none", "optimizer": "adamw_schedulefree"}, {}, 1, "schedule-free AdamW steps all tensors at once"),
    ({}, {}, 2, "the gradients of 2 ranks are added up.*start one rank"),
]


@pytest.mark.parametrize(("run", "peer", "world", "said"), REFUSED)
def test_what_wants_all_gradients_at_once_is_refused_with_the_reason(run, peer, world, said):
    run = RunConfig(**{"clip_grad": "tensor"} | run)
    with pytest.raises(UserError, match=said) as caught:
        check_fused(PeerConfig(fused_step=True, **peer), run, CPU, world)
    assert "\n" not in str(caught.value) and caught.value.fix
    check_fused(PeerConfig(**peer), run, CPU, world)


def test_what_no_clipping_would_help_is_said_before_the_clipping():
    for run, world, said in (({"sync": "gradients"}, 1, "--sync gradients"), ({"optimizer": "prodigy"}, 1, "Prodigy"), ({}, 2, "2 ranks")):
        with pytest.raises(UserError, match=said):
            check_fused(PeerConfig(fused_step=True), RunConfig(**run), CPU, world)


def test_the_scaled_gradients_of_fp16_and_xla_are_refused():
    run, peer = RunConfig(clip_grad="tensor"), PeerConfig(fused_step=True, mixed_precision="fp16")
    with pytest.raises(UserError, match=r"the scaled gradients of fp16 are looked at all together.*--mixed_precision no"):
        check_fused(peer, run, torch.device("cuda", 0), 1)
    with pytest.raises(UserError, match="it was not tried on XLA"):
        check_fused(PeerConfig(fused_step=True, mixed_precision="no"), run, torch.device("xla", 0), 1)


def test_without_any_clipping_and_alone_a_fused_step_is_for_everybody():
    for run in ({"clip_grad": "tensor"}, {"clip_grad": "none"}, {"max_grad_norm": 0.0}, {"clip_grad": "tensor", "sync": "none"}):
        check_fused(PeerConfig(fused_step=True), RunConfig(**run), CPU, 1)


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        ({"gradient_accumulation_steps": 2}, "keeps no gradient, and gradient_accumulation_steps is 2.*--target_batch_size"),
        ({"compile": True}, "not tried with --compile"),
        ({"ipex": True}, "not tried with --ipex"),
    ],
)
def test_accumulation_and_what_was_not_tried_is_refused_where_flags_are_read(peer, said):
    with pytest.raises(UserError, match=said):
        PeerConfig(fused_step=True, **peer)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", ["sd", "sd3", "flux", "z_image"])
def test_two_fused_steps_of_a_family_have_the_bits_of_two_whole_ones(shallow_family, family, method):
    """One family of each shape: a UNet, joint blocks of which some parts are read by no loss, two kinds of blocks, one stream."""
    model, _, params = attached(run := run_of(method, shallow_family(family), clip_grad="tensor", max_grad_norm=0.01, learning_rate=1e-2))
    begun, passed_over = {name: one.detach().clone() for name, one in params.items()}, unread(model)
    clip, found = Clip(run.max_grad_norm, by_tensor=True), []
    for fused in (False, True):
        for name, one in params.items():
            one.data.copy_(begun[name])
        optimizer = build_optimizer(run, params, CPU)
        step = FusedStep(params, optimizer, clip) if fused else None
        for _ in range(2):
            loss = losses(model).sum()
            if step:
                assert not step.backward(loss, 2, [one for one in params.values() if id(one) in passed_over]).broken
                continue
            loss.backward()
            gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in params.values()]
            clip.average_(gradients, 2, clip.norms(gradients) / 2)
            for one, gradient in zip(params.values(), gradients, strict=True):
                one.grad = None if id(one) in passed_over else gradient
            optimizer.step()
            optimizer.zero_grad()
        found.append(({name: one.detach().clone() for name, one in params.items()}, copy.deepcopy(optimizer.state_dict())))
    assert_equal(*(weights for weights, _ in found))
    assert_equal(*(state for _, state in found))
    assert not any(torch.equal(found[0][0][name], one) for name, one in begun.items() if id(params[name]) not in passed_over)
