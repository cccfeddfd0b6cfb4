"""The cheapest options that fit are found, by what each takes and costs."""

from dataclasses import fields

import pytest
import torch

from peer.config import PeerConfig
from peer.machine import fitting
from peer.machine.device import Precision
from peer.machine.fitting import Fit, fit
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig

CUDA, LORA = torch.device("cuda"), RunConfig(method="lora", family="flux")
FULL = RunConfig(method="full", family="flux", clip_grad="tensor")


class Sums:
    """GB of a denoiser of 20 that is frozen and has 10 blocks of 2, of text encoders of 8, and of a step of 6 a picture."""

    blocks = 10

    def __init__(self, whole=False):
        self.whole, self.asked = whole, 0

    def lying(self, peer):
        denoiser = {"auto": 20, "int8": 10, "nf4": 5}[peer.base_precision]
        denoiser *= 1 - max(0, (peer.blocks_to_swap or 0) - 2) / 10
        trained = {"fp32": 20, "bf16": 10}[peer.weights] if self.whole else 0
        return 1e9 * (trained + (max(denoiser, 8) if peer.offload else denoiser + 8))

    def of(self, peer):
        self.asked += 1
        step = peer.train_batch_size * (2 if peer.gradient_checkpointing else 6) + (0 if peer.fused_step or not self.whole else 10)
        return self.lying(peer) + 1e9 * step


@pytest.fixture(autouse=True)
def a_gpu_in_bf16(monkeypatch):
    """Where none is, its number format is what it would have."""
    monkeypatch.setattr("peer.loop.fused.precision_of", lambda *_: Precision(CUDA, torch.bfloat16, False, ""))


def fitted(there, run=LORA, ways=fitting.ALL, sums=None, device=CUDA, **options):
    return fit(run, PeerConfig(**options), device, sums or Sums(run is FULL), there * 1e9, ways)


@pytest.mark.parametrize(
    ("there", "options", "changes"),
    [
        (40, {}, {}),
        (30, {}, {"offload": True}),  # 26 of 34
        (24, {}, {"base_precision": "int8"}),  # exactly 24
        (18, {}, {"base_precision": "int8", "offload": True}),
        (13, {}, {"base_precision": "int8", "gradient_checkpointing": True, "offload": True}),
        (10, {}, {"base_precision": "nf4", "gradient_checkpointing": True, "offload": True}),
        (20, {"base_precision": "nf4"}, {}),  # what was given stays
        (60, {"train_batch_size": 8}, {"train_batch_size": 4, "gradient_accumulation_steps": 2}),
    ],
)
def test_the_cheapest_options_that_fit(there, options, changes):
    found = fitted(there, **options)
    assert found.fits and dict(found.changes) == changes


def test_as_few_blocks_are_swapped_as_fit_and_only_these_where_only_these_are_asked_for():
    found = fitted(31, ways=("blocks_to_swap",))
    assert found.fits and found.changes == {"blocks_to_swap": 4}  # 2 of the 4 are on the GPU: 34 - 4 are left
    assert not fitted(10, ways=("blocks_to_swap",)).fits
    assert fitted(40, ways=("blocks_to_swap",)).changes == {}
    assert fitted(31, ways=("blocks_to_swap",), compile=True).changes == {}  # with which swapping was not tried


def test_a_whole_denoiser_that_is_trained_steps_fused_before_its_weights_are_rounded():
    sums = Sums(True)
    assert fitted(sums.of(PeerConfig(fused_step=True)) / 1e9, FULL).changes == {"fused_step": True}
    assert "weights" in fitted(sums.of(PeerConfig(fused_step=True, weights="bf16", gradient_checkpointing=True, offload=True)) / 1e9, FULL).changes
    glob = RunConfig(method="full", family="flux")  # clips all gradients together
    assert "fused_step" not in fitted(50, glob, sums=Sums(True)).changes


def test_what_cannot_fit_costs_a_few_counts_and_says_which_card_would_do():
    sums = Sums()
    found = fitted(5, sums=sums)
    assert not found.fits and sums.asked <= 5 and found.need < 11e9
    with pytest.raises(UserError, match=r"needs 10.0 GB with .*--offload.*5.0 GB are free here") as short:
        found.check()
    assert "Use a GPU of 11 GB or more" in short.value.fix and short.value.code == ExitCode.MEMORY
    with pytest.raises(UserError, match="No single GPU has that much memory"):
        Fit({}, 500e9, 500e9, 1e9).check()


def test_only_this_machines_own_choices_are_changed_and_said_with_their_numbers():
    own, runs = ({field.name for field in fields(kind)} for kind in (PeerConfig, RunConfig))
    assert {*fitting.NAMES} <= own - runs
    found = fitted(30)
    assert str(found) == "26.0 of 30.0 GB are needed with --offload, 34.0 without" and found.check() is None
    assert found.advice().startswith("Add --offload: counted, 26.0 GB are then needed of 30.0")
    assert str(fitted(40)) == "34.0 of 40.0 GB are needed" and "it fits" in fitted(40).advice()


def test_on_a_cpu_nothing_moves_to_another_memory():
    found = fitted(13, device=torch.device("cpu"))
    assert not {"offload", "blocks_to_swap"} & found.changes.keys()
