"""The peer's parts on four XLA devices, in this process. XLA compiles for most of the time that they take."""

import dataclasses
import logging
from contextlib import ExitStack

import numpy
import pytest
import torch
from PIL import Image

from peer.config import PeerConfig
from peer.contracts import PixelBatch
from peer.launch.joining import Joined
from peer.launch.launch import Launch
from peer.machine.device import Rank, RankGroup, choose_device, choose_precision
from peer.machine.placing import placing
from peer.results.checkpoint import Checkpoints
from peer.results.result import read_result
from peer.sync.engine.vectors import Flat, Schema, flatten
from peer.wiring import assemble
from swarm.run_config import RunConfig
from tests import tiny

pytestmark = pytest.mark.timeout(3600)
CPU, BF16 = torch.device("cpu"), torch.bfloat16
RUN = RunConfig(
    sync="none",
    resolution=16,
    target_batch_size=4,
    total_samples=24,
    learning_rate=1e-3,
    lr_scheduler="cosine",
    lr_warmup_samples=8,
    seed=7,
)
DRAWN = {"validation_prompts": ("a toy",), "validation_steps": 6, "num_validation_images": 2, "validation_inference_steps": 2}
KINDS = {  # what the model is trained as, and what the peer says
    "flux, averaged and drawn": ("flux", {"max_sequence_length": 32}, {"use_ema": True} | DRAWN),
    "lora, from caches": ("sd", {"method": "lora", "rank": 2, "snr_gamma": 5.0}, {"cache_latents": True, "cache_text": True}),
    "a new word": ("sd", {"method": "textual_inversion", "placeholder_token": "<x>", "initializer_token": "toy"}, {}),
}
FAMILY, ITS = "flux", {"max_sequence_length": 32}  # the one that compiles fastest


@pytest.fixture(scope="module")
def xla():
    return choose_device("xla", Rank())


@pytest.fixture
def start(tiny_family, pictures, tmp_path):
    """`start(device, family)`: a trainer and its losses; run's and peer's options in dicts."""
    with ExitStack() as closing:

        def build(device, family="sd", run=None, peer=None, stop_after=None, name="out"):
            options = {"train_data_dir": str(pictures), "output_dir": str(tmp_path / name), "train_batch_size": 4} | (peer or {})
            whole = dataclasses.replace(RUN, model=str(tiny_family(family)), family=tiny.FAMILIES[family], **(run or {}))
            stopping = lambda: stop_after is not None and trainer.step >= stop_after  # noqa: E731
            parts = {"group": RankGroup(Rank(), device), "device": device, "stopping": stopping, "closing": closing}
            trainer, results = assemble(Launch(joined=Joined(whole), peer=PeerConfig(**options), **parts))
            losses = []
            told = trainer.progress.stepped

            def stepped(**values):
                losses.append(values["loss"])
                told(**values)

            trainer.progress.stepped = stepped
            return trainer, results, losses

        yield build


def pixels(path):
    return torch.from_numpy(numpy.array(Image.open(path))).float()


def on_host(params):
    return torch.cat([parameter.detach().cpu().flatten() for parameter in params.values()])


def compiled():
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0


def sharding(tensor):
    import torch_xla

    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def test_the_rows_of_a_batch_are_spread_over_four_devices_and_a_short_one_is_filled(xla):
    place = placing(xla, 6)
    assert place.rows == 8, "six rows do not divide by four"
    batch = place.pixels(PixelBatch(torch.rand(3, 3, 8, 8), ["a", "b", "c"]))
    assert batch.pixels.shape == (8, 3, 8, 8) and batch.weights.tolist() == [1.0] * 3 + [0.0] * 5
    assert "devices=[4,1,1,1]" in sharding(batch.pixels)


def test_a_peer_says_what_it_computes_on(xla):
    from peer.machine.device import describe, describe_hardware

    assert describe_hardware(xla) == "4 x CPU by XLA"
    precision = choose_precision("auto", xla, 1)
    assert precision.dtype is None and "device=xla devices=4 (CPU)" in describe(Rank(), precision, 1, {}, {})


def test_flags_that_make_no_devices_are_warned_of(xla, monkeypatch, caplog):
    from peer.machine import xla as room

    monkeypatch.setattr(room, "num_devices", lambda: 1)
    room.open_devices(Rank(), {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"})
    assert "CPU_NUM_DEVICES=4 makes four" in caplog.text


def test_parameters_on_a_device_are_read_and_moved_as_those_of_a_cpu(xla):
    rng = torch.Generator().manual_seed(0)
    host = {name: torch.nn.Parameter(torch.randn(size, generator=rng)) for name, size in (("a", (40, 50)), ("b", (7,)), ("c", (30, 40)))}
    there = {name: torch.nn.Parameter(parameter.detach().to(xla)) for name, parameter in host.items()}
    size = Schema.of(host).size
    assert Schema.of(there) == Schema.of(host)
    assert torch.equal(flatten(there, torch.empty(size)), flatten(host, torch.empty(size)))
    before, after = torch.randn(size, generator=rng), torch.randn(size, generator=rng)
    for params in (host, there):
        flat = Flat(params)
        with flat.in_order():
            for start in range(0, size, 300):
                flat.move(start, before[start : start + 300], after[start : start + 300])
        flat.write(100, torch.full((2000,), 0.5))
    assert torch.equal(flatten(there, torch.empty(size)), flatten(host, torch.empty(size)))
    assert torch.equal(Flat(there).minus(1990, before[:50]), Flat(host).minus(1990, before[:50]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_four_devices_has_the_losses_of_a_cpu_and_its_result_is_read_by_anybody(start, xla, tmp_path, kind):
    family, run, peer = KINDS[kind]
    here, _, expected = start(CPU, family, run, peer, name="cpu")
    there, results, losses = start(xla, family, run, peer, name="xla")
    here.run()
    there.run()
    assert len(losses) == 6 and losses == pytest.approx(expected, rel=1e-4)
    assert there.trained == here.trained == 24
    drawn, expected = (sorted((tmp_path / name / "validation").glob("*.png")) for name in ("xla", "cpu"))
    assert [path.name for path in drawn] == [path.name for path in expected] and len(drawn) == bool("validation_prompts" in peer)
    for ours, theirs in zip(map(pixels, drawn), map(pixels, expected), strict=True):
        assert (ours - theirs).abs().mean() < 2, "of 255"
    torch.testing.assert_close(on_host(there.params), on_host(here.params), rtol=1e-2, atol=1e-4)
    results.export(tmp_path / "result")
    assert read_result(tmp_path / "result").samples == 24
    assert all(parameter.device.type == "xla" for parameter in there.params.values()), "still trained where it was"


def test_a_run_stopped_on_the_devices_goes_on_there_or_on_a_cpu_and_nothing_is_compiled_after_the_second_step(start, xla, tmp_path):
    """Of 22 samples the last step has two: it is filled up, and no program of its own. Rates change with every step."""
    run = ITS | {"total_samples": 0}
    peer = {"max_train_samples": 11, "num_train_epochs": 2}
    counts = []
    whole, _, losses = start(xla, FAMILY, run, peer, name="whole")
    whole.stepped = lambda: counts.append(compiled())
    whole.run()
    assert [round(loss, 6) > 0 for loss in losses] == [True] * 6 and whole.trained == 22
    assert counts[-1] == counts[1], f"programs compiled by step: {counts}"

    part, _, first = start(xla, FAMILY, run, peer, stop_after=3, name="part")
    part.run()
    assert first == losses[:3]
    _, state = Checkpoints(tmp_path / "part", keep=2).load("latest")
    tensors = [*state["params"].values(), *(value for each in state["optimizer"]["state"].values() for value in each.values())]
    assert all(tensor.device == CPU for tensor in tensors)
    for device, name in ((CPU, "cpu"), (xla, "part")):
        again, _, rest = start(
            device, FAMILY, run, peer | {"resume_from_checkpoint": str(tmp_path / "part" / "checkpoint-000001")}, name=name
        )
        again.run()
        assert again.trained == 22 and rest[:2] == pytest.approx(losses[3:5], rel=1e-4)


def test_a_step_whose_loss_is_not_finite_changes_nothing(start, xla, caplog):
    trainer, _, losses = start(xla, FAMILY, ITS | {"total_samples": 8}, name="bad")
    before = on_host(trainer.params)
    encode = trainer.encode
    trainer.encode = lambda batch, rng: dataclasses.replace(found := encode(batch, rng), latents=found.latents * float("nan"))
    with caplog.at_level(logging.WARNING), pytest.raises(Exception, match="10 steps in a row failed"):
        trainer.run()
    assert set(losses) == {None} and torch.equal(on_host(trainer.params), before) and trainer.trained == 0


def test_a_lora_on_bf16_weights_learns_as_on_a_cpu_and_only_its_denoiser_is_on_the_devices(start, xla, monkeypatch):
    """Four pictures, and the same noise in each step. With both caches on the parts take turns, also for the pictures that are drawn."""
    monkeypatch.setattr("peer.loop.train.seed_of", lambda *_: 3)
    monkeypatch.setattr("peer.samples.feed.WINDOW_SAMPLES", 8)
    run = ITS | {"method": "lora", "rank": 4, "learning_rate": 3e-2, "lr_scheduler": "constant", "lr_warmup_samples": 0, "total_samples": 40}
    peer = {"mixed_precision": "bf16", "cache_latents": True, "cache_text": True, "max_train_samples": 4, "num_train_epochs": 10}
    found = {}
    for device, drawn in ((CPU, {}), (xla, DRAWN | {"validation_steps": 4})):
        trainer, _, losses = start(device, FAMILY, run, peer | drawn, name=device.type)
        found[device.type] = told = Told(trainer, losses)
        trainer.run()
        assert told.losses[-1] < 0.9 * told.losses[0] and len(told.losses) == 10
    here, there = found["cpu"], found["xla"]
    assert (there.gradient - here.gradient).norm() < 0.02 * here.gradient.norm(), "bf16 has 8 bits"
    assert there.losses == pytest.approx(here.losses, rel=0.02)
    denoiser, *others = there.places
    assert denoiser == {("xla", BF16), ("xla", torch.float32)} and set().union(*others) == {("cpu", BF16), ("cpu", torch.float32)}
    once_more = there.compiled[4]
    assert once_more <= 1 and sum(there.compiled[2:]) == once_more, f"after the first drawing one step compiles again, not each: {there.compiled}"


class Told:
    """What is seen of a trainer: its first gradient, where the weights of each part are after a step, and how many programs a step compiled."""

    def __init__(self, trainer, losses):
        self.losses, self.compiled, self.gradient = losses, [], None
        learn, use, parts = trainer._learn, trainer._use_gradients, trainer.model.parts

        def learning(work):
            before = compiled()
            loss = learn(work)
            self.compiled.append(compiled() - before)
            self.places = [{(tensor.device.type, tensor.dtype) for tensor in part.parameters()} for part in parts.values()]
            return loss

        def using(samples, norms):
            if self.gradient is None:
                self.gradient = torch.cat([parameter.grad.detach().cpu().flatten() for parameter in trainer.params.values()])
            return use(samples, norms)

        trainer._learn, trainer._use_gradients = learning, using
