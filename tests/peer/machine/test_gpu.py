"""What only a GPU can show: `./scripts/test -m gpu`. Each run is of the tiny model, in this process."""

import dataclasses
import statistics
from contextlib import ExitStack

import pytest
import torch

from peer.config import PeerConfig
from peer.launch.joining import Joined
from peer.launch.launch import Launch
from peer.machine.device import Rank, RankGroup, choose_device, choose_precision
from peer.wiring import assemble
from swarm.run_config import RunConfig
from tests.peer.machine.test_swap import deep_family  # noqa: F401

pytestmark = pytest.mark.gpu
RUN = RunConfig(sync="none", resolution=16, total_samples=24, learning_rate=1e-3, seed=7, optimizer="adamw")


@pytest.fixture
def train(tiny_model, pictures, tmp_path):
    """`train("name", run's options, **peer's options)`: the finished trainer, and its losses."""
    with ExitStack() as closing:

        def run(name, given=None, **options):
            device = choose_device(options.pop("device", "auto"), Rank())
            own = {"train_data_dir": str(pictures), "output_dir": str(tmp_path / name), "train_batch_size": 4, "mixed_precision": "no"}
            launch = Launch(
                joined=Joined(dataclasses.replace(RUN, **({"model": str(tiny_model)} | (given or {})))),
                peer=PeerConfig(**own | options),
                group=RankGroup(Rank(), device),
                device=device,
                stopping=lambda: False,
                closing=closing,
            )
            trainer, _ = assemble(launch)
            losses, told = [], trainer.progress.stepped
            trainer.progress.stepped = lambda **values: (losses.append(values["loss"]), told(**values))
            trainer.run()
            return trainer, losses

        yield run


def test_the_gpu_is_chosen_and_its_number_format_with_the_reason():
    device = choose_device("auto", Rank())
    assert device == torch.device("cuda", 0)
    precision = choose_precision("auto", device, 10**9)
    expected = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    assert precision.dtype == expected and torch.cuda.get_device_name(device) in precision.reason


def test_float32_trains_about_as_on_the_cpu(train):
    """Noise is drawn on the device, so the losses are other ones of the same distribution."""
    (_, gpu), (_, cpu) = train("gpu"), train("cpu", device="cpu")
    assert statistics.fmean(gpu) == pytest.approx(statistics.fmean(cpu), rel=0.3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_almost_as_float32_does(train, precision):
    (_, full), (trainer, half) = train("full"), train("half", mixed_precision=precision)
    counted = [(one, two) for one, two in zip(full, half, strict=True) if two is not None]  # fp16's first steps may only find the scale
    assert counted and all(two == pytest.approx(one, rel=0.1) for one, two in counted)
    assert {parameter.dtype for parameter in trainer.params.values()} == {torch.float32}


@pytest.mark.parametrize("options", [{"channels_last": True}, {"gradient_checkpointing": True}], ids=str)
def test_what_changes_memory_changes_no_loss(train, options):
    (_, plain), (_, other) = train("plain"), train("other", **options)
    assert other == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"base_precision": "int8"}, {"offload": True}], ids=str)
def test_swapped_blocks_change_no_loss(train, deep_family, options):  # noqa: F811
    run = {"model": str(deep_family("flux")), "method": "lora", "rank": 2}
    (_, plain), (_, swapped) = train("plain", run, **options), train("swapped", run, blocks_to_swap=5, **options)
    assert swapped == pytest.approx(plain, rel=1e-3)


def test_8_bit_adam_trains(train):
    trainer, losses = train("8bit", {"optimizer": "adamw8bit"})
    assert all(loss == loss for loss in losses) and all(parameter.isfinite().all() for parameter in trainer.params.values())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_compiled_denoiser_is_used_only_with_the_right_gradients(train, caplog, precision):
    caplog.set_level("INFO", "peer.machine.trial_of_speed")
    (_, plain), (_, compiled) = train("plain", mixed_precision=precision), train("compiled", mixed_precision=precision, compile=True)
    assert "torch.compile is used" in caplog.text, caplog.text
    assert compiled == pytest.approx(plain, rel=0.05)
