"""The search for the largest micro-batch: what is tried, and what is held to fit."""

import dataclasses
import gc
from contextlib import ExitStack

import pytest
import torch

from peer.config import PeerConfig
from peer.launch.joining import Joined
from peer.launch.launch import Launch
from peer.launch.launcher import Rank
from peer.learner import build_learner
from peer.machine.device import RankGroup
from peer.machine.largest_batch import CardMemory, HostMemory, largest, try_sizes
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.machine.shallow import tiny_model  # noqa: F401

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("limit", "most", "tried"),
    [
        (64, 64, [1, 2, 4, 8, 16, 32, 64]),
        (5, 64, [1, 2, 4, 8, 6, 5]),
        (100, 6, [1, 2, 4, 6]),
        (1, 64, [1, 2]),
        (0, 64, [1]),
        (9, 1, [1]),
    ],
)
def test_sizes_are_doubled_while_they_fit_then_halved_between(limit, most, tried):
    seen = []
    assert largest(lambda count: seen.append(count) or count <= limit, most) == min(limit, most)
    assert seen == tried


def test_a_gpu_must_keep_a_twentieth_of_its_memory_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    free = iter([50, 5, 4])
    memory = CardMemory(torch.device("cuda"), lambda device: (next(free), 100))
    assert [memory.holds(1) for _ in range(3)] == [True, True, False]


def test_a_size_that_would_fill_the_hosts_memory_is_not_tried():
    peak = iter([100 + 60, 100 + 140, 100 + 161])
    memory = HostMemory(available=200, used=lambda: 100, peak=lambda: next(peak))
    assert memory.allows(1) and memory.holds(1)  # 60 of the 160 that may be used
    assert memory.allows(2) and not memory.allows(4)
    assert memory.holds(2) and memory.allows(2) and not memory.allows(3)
    assert not memory.holds(2)


class Roomy:
    def __init__(self):
        self.held = []

    def allows(self, count):
        return True

    def holds(self, count):
        self.held.append(count)
        return True


@pytest.fixture
def learn(tiny_model, tmp_path):  # noqa: F811
    with ExitStack() as closing:

        def build(run=None, **options):
            run = RunConfig(model=str(tiny_model), resolution=16, **{"sync": "none", "method": "lora", **(run or {})})
            peer = PeerConfig(output_dir=str(tmp_path), **{"mixed_precision": "no", **options})
            launch = Launch(
                joined=Joined(run), peer=peer, group=RankGroup(Rank(), CPU), device=CPU, stopping=lambda: False, closing=closing
            )
            return build_learner(launch, "x")[0], run, peer

        yield build


def short_of_memory(learner, most, error):
    loss = learner.model.loss

    def short(batch, rng):
        if len(batch.latents) > most:
            raise error
        return loss(batch, rng)

    learner.model.loss = short


@pytest.mark.parametrize(
    ("run", "options"),
    [
        ({}, {}),
        ({"method": "full", "clip_grad": "tensor"}, {"fused_step": True, "weights": "bf16", "mixed_precision": "bf16"}),
        ({"method": "full", "sync": "gradients", "optimizer": "adamw"}, {"gradient_accumulation_steps": 3}),
        ({"optimizer": "adamw_schedulefree"}, {}),
    ],
)
def test_real_steps_are_made_until_torch_has_no_memory(learn, run, options):
    learner, run, peer = learn(run, **options)
    before = {name: parameter.detach().clone() for name, parameter in learner.params.items()}
    short_of_memory(learner, 3, torch.OutOfMemoryError("CUDA out of memory"))
    told, memory = [], Roomy()
    assert try_sizes(learner, run, peer, memory, 64, told.append) == 3
    assert told == memory.held == [1, 2, 3]
    assert any(not torch.equal(before[name], parameter) for name, parameter in learner.params.items())  # the optimizer has its state
    assert all(parameter.grad is None for parameter in learner.params.values())


def test_the_average_of_the_weights_is_there_beside_the_step_that_is_tried(learn):
    def held(**options):
        learner, run, peer = learn({"method": "full"}, **options)
        found = []

        class Counting(Roomy):
            def holds(self, count):
                gc.collect()
                found.append(sum(thing.numel() for thing in gc.get_objects() if type(thing) is torch.Tensor))
                return True

        try_sizes(learner, run, peer, Counting(), 1, lambda count: None)
        return found[0], sum(parameter.numel() for parameter in learner.params.values())

    plain, trained = held()
    averaging, _ = held(use_ema=True)
    assert averaging - plain >= trained


def test_class_pictures_double_a_micro_batch(learn, tmp_path):
    learner, run, peer = learn()
    short_of_memory(learner, 3, MemoryError())
    tiny.write_pictures(tmp_path / "pictures")
    beside = {"with_prior_preservation": True, "class_data_dir": str(tmp_path / "class"), "class_prompt": "a dog"}
    peer = dataclasses.replace(peer, train_data_dir=str(tmp_path / "pictures"), **beside)
    assert try_sizes(learner, run, peer, Roomy(), 64, lambda count: None) == 1


def test_a_step_that_would_take_over_a_minute_is_not_tried(learn):
    learner, run, peer = learn()
    now = iter(range(0, 1000, 40))  # each step takes 40 s
    assert try_sizes(learner, run, peer, Roomy(), 64, lambda count: None, clock=lambda: next(now)) == 1


def test_an_error_of_another_kind_is_no_want_of_memory(learn):
    learner, run, peer = learn()
    short_of_memory(learner, 0, ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        try_sizes(learner, run, peer, Roomy(), 64, lambda count: None)
