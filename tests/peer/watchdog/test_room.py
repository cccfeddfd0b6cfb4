"""What a peer goes on with once memory ran out: first what fits by count, then the options of one list in their order."""

import itertools

import pytest
import torch

from peer.config import PeerConfig
from peer.launch import fitted
from peer.launch.fitted import advised
from peer.launch.joining import Joined
from peer.machine.fitting import ALL, STEP, Fit
from peer.machine.making_room import by_itself, ways_left
from peer.watchdog.room import as_flags, next_way, tell_counted, tell_room, told_batch
from swarm.errors import UserError
from swarm.life import FOLDER
from swarm.memory_advice import A_STEP, WAYS
from swarm.run_config import RunConfig
from tests.peer.machine.test_fitting import a_gpu_in_bf16  # noqa: F401 (a fixture)

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LORA, FULL = RunConfig(method="lora", family="flux"), RunConfig(method="full", family="flux", clip_grad="tensor")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The supervisor's, of a peer that told it at the start what would make room."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    tell_room("cuda", [{"offload": True}], 4)
    return tmp_path


def options(ways):
    return [option for way in ways for option in way]


def test_advice_counts_and_what_a_peer_takes_by_itself_have_one_order():
    order = [way.option for way in WAYS]
    assert [*A_STEP] == list(dict.fromkeys(order)) == [*ALL[:1], STEP[1], *ALL[1:]]
    for run, device, fit in itertools.product((LORA, FULL), (CUDA, CPU), ("none", "auto")):
        found = iter(order)
        assert all(option in found for option in options(ways_left(run, PeerConfig(fit=fit), device)))


@pytest.mark.parametrize(
    ("run", "device", "given", "left"),
    [
        (LORA, CUDA, {}, ["offload", "gradient_checkpointing"]),
        (LORA, CUDA, {"fit": "auto"}, ["offload", "base_precision", "gradient_checkpointing", "base_precision", "weights"]),
        (FULL, CUDA, {}, ["fused_step", "offload", "gradient_checkpointing"]),
        (FULL, CUDA, {"nproc_per_node": 2}, ["offload", "gradient_checkpointing"]),  # whose gradients are added up
        (FULL, CPU, {"gradient_accumulation_steps": 2}, ["gradient_checkpointing"]),  # with which --fused_step does not go
        (FULL, CPU, {"fit": "auto", "fused_step": True, "gradient_checkpointing": True}, ["weights"]),
    ],
)
def test_what_rounds_is_taken_only_by_a_peer_that_is_to_take_whatever_fits(run, device, given, left):
    assert options(ways_left(run, PeerConfig(**given), device)) == left


def test_what_fits_by_count_comes_before_what_was_told_at_the_start(folder):
    tell_counted({"gradient_checkpointing": True, "offload": True})
    assert as_flags(next_way(folder, killed=False)) == ["--gradient_checkpointing", "--offload"]
    assert next_way(folder, killed=True) == {} and told_batch(folder) == 4  # the count is of a GPU, and the batch stays known


def test_a_peer_that_told_nothing_at_its_start_or_that_nobody_supervises_tells_nothing(tmp_path):
    tell_counted({"offload": True}, {FOLDER: str(tmp_path)})
    tell_counted({"offload": True}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "need", "given", "way"),
    [
        ({"gradient_checkpointing": True, "train_batch_size": 2}, 9e9, {}, {"gradient_checkpointing": True}),  # batches are halved besides
        ({"train_batch_size": 2, "gradient_accumulation_steps": 2}, 9e9, {}, {"offload": True}),
        ({"base_precision": "int8"}, 9e9, {}, {"offload": True}),
        ({"base_precision": "int8"}, 9e9, {"fit": "auto"}, {"base_precision": "int8"}),
        ({"gradient_checkpointing": True}, 19e9, {}, {"offload": True}),  # nothing fits, by count, which may be wrong
        ({}, 9e9, {}, {"offload": True}),
    ],
)
def test_an_error_for_want_of_memory_tells_the_supervisor_what_fits(folder, monkeypatch, changes, need, given, way):
    monkeypatch.setattr(fitted, "counted", lambda *_: Fit(changes, need, 14e9, 11e9))
    with pytest.raises(UserError, match="Out of memory"), advised(PeerConfig(**given), Joined(LORA), {}, CUDA):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert next_way(folder, killed=False) == way and by_itself(way, PeerConfig(**given))
