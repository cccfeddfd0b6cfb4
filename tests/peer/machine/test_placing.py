"""Batches on their way to a device, and what XLA needs of them; what needs XLA itself is in tests/xla."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from peer.config import PeerConfig
from peer.contracts import PixelBatch
from peer.loop.optim import build_optimizer
from peer.machine.device import Rank, choose_device, choose_precision, xla_is_meant
from peer.machine.placing import placing, written
from peer.machine.profiling import Profiler, profile_folder
from peer.machine.xla import check_options, filled
from peer.samples.encoding import Encoder
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.clock import Clock

CPU, XLA = torch.device("cpu"), torch.device("xla")
without_xla = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is here")


@without_xla
def test_xla_without_its_library_names_the_extra():
    with pytest.raises(UserError, match=r"--device xla needs PyTorch/XLA.*does not load here") as raised:
        choose_device("xla", Rank())
    assert "[xla]" in raised.value.fix


@without_xla
def test_a_machine_without_the_library_is_no_xla_machine_whatever_its_variables_say(tmp_path):
    (tmp_path / "accel0").touch()
    assert not xla_is_meant({"PJRT_DEVICE": "TPU"}, tmp_path)


def test_a_tpu_or_the_variable_means_xla_where_the_library_is(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert not xla_is_meant({}, tmp_path) and xla_is_meant({"PJRT_DEVICE": "CPU"}, tmp_path)
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "0").touch()
    assert xla_is_meant({}, tmp_path)


def test_what_xla_has_no_program_for_is_refused():
    with pytest.raises(UserError, match="fp16 is not what XLA's devices compute in"):
        choose_precision("fp16", XLA, 1)
    with pytest.raises(UserError, match="8-bit AdamW does not run on XLA"):
        build_optimizer(RunConfig(optimizer="adamw8bit"), {"x": torch.nn.Parameter(torch.zeros(1))}, XLA)


@pytest.mark.parametrize("option", [{"weights": "bf16"}, {"compile": True}, {"channels_last": True}, {"ipex": True}])
def test_options_that_xla_has_nothing_to_do_with_are_refused(option):
    check_options(PeerConfig(device="xla"))
    with pytest.raises(UserError, match="this peer computes by XLA"):
        check_options(PeerConfig(device="xla", **option))


def test_a_cpu_has_nowhere_to_move_batches_to():
    with pytest.raises(UserError, match="device_prefetch_size moves batches to a GPU"):
        PeerConfig(device="cpu", device_prefetch_size=1)
    with pytest.raises(UserError, match="loader_prefetch_size is -1"):
        PeerConfig(loader_prefetch_size=-1)


def test_on_xla_random_numbers_are_those_of_a_cpu():
    assert choose_precision("bf16", XLA, 1).rng_device == CPU == choose_precision("no", CPU, 1).rng_device


def batch(size, **options):
    pixels = torch.arange(size * 12.0).view(size, 3, 2, 2)
    return PixelBatch(pixels, [f"caption {i}" for i in range(size)], torch.arange(size * 6).view(size, 6), **options)


def test_a_short_batch_is_filled_with_its_first_row_which_weighs_nothing_then():
    found = filled(batch(2, weights=torch.tensor([1.0, 0.5])), 4)
    assert found.captions == ["caption 0", "caption 1", "caption 0", "caption 0"] and not found.masks
    masks = [torch.zeros(1, 2, 2), torch.ones(1, 2, 2)]
    assert [mask.max().item() for mask in filled(batch(2, masks=masks), 4).masks] == [0, 1, 0, 0]
    assert found.weights.tolist() == [1.0, 0.5, 0.0, 0.0]
    own = batch(2)
    assert torch.equal(found.pixels, own.pixels[[0, 1, 0, 0]]) and torch.equal(found.geometry, own.geometry[[0, 1, 0, 0]])


def test_a_whole_batch_stays_and_says_its_weights_like_a_filled_one():
    found = filled(batch(3), 3)
    assert torch.equal(found.pixels, batch(3).pixels) and found.weights.tolist() == [1.0] * 3


@pytest.mark.parametrize("known", [{}, {0: 7.0}, {1: 7.0}, {0: 7.0, 1: 8.0}])
def test_a_batch_from_a_cache_is_filled_whether_its_first_row_was_found_or_not(known):
    """Each place is either in `latents` or the next of `pixels`, and the added ones say what the first does."""
    pixels = torch.tensor([[float(place)] for place in range(2) if place not in known]) if len(known) < 2 else None
    latents = {place: torch.tensor([value]) for place, value in known.items()}
    found = filled(PixelBatch(pixels, ["a", "b"], latents=latents, names=["x", "y"]), 4)
    fresh = iter(found.pixels if found.pixels is not None else ())
    rows = [float(found.latents[place] if place in found.latents else next(fresh)) for place in range(4)]
    assert rows == [*(known.get(place, float(place)) for place in range(2)), rows[0], rows[0]]
    assert next(fresh, None) is None and list(found.names) == ["x", "y", "x", "x"]


class Told:
    """A model of one number for each picture and caption, and what it was asked."""

    def __init__(self):
        self.asked = []

    def encode_pixels(self, pixels):
        self.asked.append(len(pixels))
        return torch.cat([pixels, torch.zeros_like(pixels)], dim=1)

    def encode_text(self, captions):
        self.asked.append(list(captions))
        return {"states": torch.tensor([[float(caption[-1])] for caption in captions])}


def test_a_lazy_device_is_asked_the_same_of_every_batch():
    """Captions that are known, or come twice, would each be another program."""
    model = Told()
    encode = Encoder(model, lazy=CPU)
    for captions in (["a 1", "a 1"], ["a 1", "a 2"], ["a 1", "a 2"]):
        found = encode(PixelBatch(torch.ones(2, 3, 2, 2), captions), torch.Generator())
        assert found.text["states"].tolist() == [[float(caption[-1])] for caption in captions]
    assert [asked for asked in model.asked if isinstance(asked, list)] == [["a 1", "a 1"], ["a 1", "a 2"], ["a 1", "a 2"]]


def test_a_cpu_places_nothing_and_waits_for_nothing():
    place, own = placing(CPU, 4), batch(3)
    assert place.pixels(own) is own and place.lazy is None and place.latents(encode := object()) is encode
    place.boundary()


def test_weights_of_a_cpu_are_written_as_they_are():
    class Model:
        def __init__(self):
            self.parts = {"unet": torch.nn.Linear(2, 2)}

    model = Model()
    weight = model.parts["unet"].weight
    with written(model, {"weight": weight}) as params:
        assert params["weight"] is weight is model.parts["unet"].weight


def test_a_profile_begins_with_the_third_step_and_ends_with_the_step_in_which_its_time_is_over(tmp_path):
    clock = Clock()
    profiler = Profiler(300, tmp_path / "profile", CPU, clock)
    profiler.stepped()
    assert profiler._recording is None
    profiler.stepped()
    torch.zeros(4).add_(1)
    clock.now = 0.2
    profiler.stepped()
    assert not list((tmp_path / "profile").iterdir())
    clock.now = 0.4
    profiler.stepped()
    (trace,) = (tmp_path / "profile").iterdir()
    assert "aten::add_" in trace.read_text()
    profiler.stepped()
    profiler.close()
    assert len(list((tmp_path / "profile").iterdir())) == 1


def test_on_xlas_devices_its_own_profiler_records(tmp_path, monkeypatch):
    said = []
    profiler = SimpleNamespace(start_trace=lambda folder: said.append(folder), stop_trace=lambda: said.append("stopped"))
    for name in ("torch_xla", "torch_xla.debug", "torch_xla.debug.profiler"):
        monkeypatch.setitem(sys.modules, name, profiler)
    recorded = Profiler(10**6, tmp_path / "profile", XLA)
    for _ in range(3):
        recorded.stepped()
    recorded.close()
    assert said == [str(tmp_path / "profile"), "stopped"]


def test_a_run_that_ends_while_it_is_profiled_leaves_the_profile_and_one_that_is_too_short_says_so(tmp_path, caplog):
    profiler = Profiler(10**6, tmp_path / "profile", CPU)
    for _ in range(2):
        profiler.stepped()
    profiler.close()
    assert len(list((tmp_path / "profile").iterdir())) == 1
    short = Profiler(10**6, tmp_path / "short", CPU)
    short.stepped()
    short.close()
    assert "nothing was profiled: there were only 1 local steps" in caplog.text
    Profiler(0, tmp_path / "none", CPU).stepped()
    assert not (tmp_path / "none").exists()


def test_the_variable_says_where_profiles_go_and_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    assert profile_folder(tmp_path, {}) == tmp_path / "profile"
    assert profile_folder(tmp_path, {"PROFILE_DIR": "/elsewhere"}).as_posix() == "/elsewhere"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made"):
        Profiler(1, tmp_path / "file" / "profile", CPU)
