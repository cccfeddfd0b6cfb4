"""Frozen parts take turns: each computes only where it is, and what is trained has the same bits."""

import copy
import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from peer import learner
from peer.config import PeerConfig
from peer.launch.joining import Joined
from peer.launch.launch import Launch
from peer.machine.turns import Turns, _tensors, takes_turns, to_try
from peer.wiring import assemble
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.peer.machine.shallow import shallow_family, tiny_model  # noqa: F401
from tests.peer.models.reading import folders_are_read_once  # noqa: F401
from tests.peer.samples.test_buckets import mixed_pictures  # noqa: F401
from tests.peer.samples.test_masks import half_masked
from tests.peer.test_alone import CPU, RUN, flat, start  # noqa: F401

DRAWING = {"validation_prompts": ("a red square",), "num_validation_images": 1, "validation_steps": 2, "validation_inference_steps": 1}


@pytest.fixture
def moved(monkeypatch):
    """(part, whether it came) in order. On a CPU all is at one place: what waits is NaN here, where it can be."""
    moves, leave, come = [], Turns._leave, Turns._come

    def left(self, name):
        moves.append((name, False))
        leave(self, name)
        for tensor in self._frozen(name):
            if tensor.is_floating_point():
                tensor.data = torch.full_like(tensor.data, torch.nan)

    def came(self, name):
        moves.append((name, True))
        for tensor in self._frozen(name):
            tensor.data = self._waiting[tensor]
        come(self, name)

    monkeypatch.setattr("peer.machine.turns._OWN_MEMORY", ("cpu",))
    monkeypatch.setattr(Turns, "_leave", left)
    monkeypatch.setattr(Turns, "_come", came)
    return moves


def there(trainer):
    """The parts whose weights are all there."""
    parts = trainer.model.parts
    return {
        name
        for name, part in parts.items()
        if not any(p.isnan().any() for p in (*part.parameters(), *part.buffers()) if p.is_floating_point())
    }


def watched(started):
    """Which parts were there in each training step."""
    seen, trainer = [], started.trainer
    backward = trainer._backward

    def stepped(pixels, number):
        losses = backward(pixels, number)
        seen.append(there(trainer))
        return losses

    trainer._backward = stepped
    started.run()
    return seen


LORA = {"method": "lora", "rank": 2}
WORD = {"method": "textual_inversion", "placeholder_token": "<dog>", "initializer_token": "a"}
WAYS = {  # family, or the tiny model; what is changed of the run; parts that stay
    "lora": ("", LORA, {"unet"}),
    "full": ("", {}, {"unet"}),
    "word": ("", WORD, {"unet", "text_encoder"}),
    "text encoder": ("flux", {**LORA, "train_text_encoder": True}, {"transformer", "text_encoder", "text_encoder_2"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_in_a_step_only_the_denoiser_and_what_is_trained_are_there_and_the_bits_are_the_same(start, shallow_family, moved, monkeypatch, way):  # noqa: F811
    family, change, staying = WAYS[way]
    run = dataclasses.replace(RUN, total_samples=16, model=str(shallow_family(family)) if family else "", **change)
    base = {"base_precision": "int8"} if way == "lora" else {}
    plain = start("plain", run=run, **base).run()
    assert not moved
    monkeypatch.setattr("peer.samples.feed.WINDOW_SAMPLES", 8)  # two steps
    turned = start("turned", run=run, offload=True, **base, **DRAWING)
    assert watched(turned) == [staying] * 4
    assert turned.losses == plain.losses and torch.equal(flat(turned.trainer.params), flat(plain.trainer.params))
    came = [name for name, whether in moved if whether]
    model = turned.trainer.model
    texts, denoiser = [name for name in model.facts.text_encoders if name in model.parts], model.facts.denoiser
    drawing = ["vae"] if {*texts} <= staying else [*texts, denoiser, "vae"]
    # A window, and a drawing; the VAE is there for the second window, whose captions are known from the first.
    first = [] if {*texts} <= staying else texts
    assert came == [*first, "vae", denoiser, *drawing, denoiser, *drawing]


def test_a_class_is_drawn_with_two_moves_and_what_never_leaves_again_is_not_held_twice(start, mixed_pictures, tmp_path, moved):  # noqa: F811
    """Of a peer that trains all of the denoiser, on masked pictures in buckets."""
    half_masked(mixed_pictures)
    run, prior = (
        dataclasses.replace(RUN, masked_loss=True, num_buckets=5, total_samples=16),
        {"with_prior_preservation": True, "class_prompt": "a dog"},
    )
    given = prior | {"num_class_images": 4, "train_batch_size": 2, "validation_inference_steps": 1}
    plain = start("plain", run=run, class_data_dir=str(tmp_path / "some dogs"), **given).run()
    assert not moved
    turned = start("turned", run=run, class_data_dir=str(tmp_path / "more dogs"), offload=True, **given)
    assert sorted(name for name, came in moved if came) == ["text_encoder", "unet", "vae"], "four pictures, two at a time"
    turns = turned.trainer.model.parts["vae"]._hf_hook._begin.func.__self__
    model = turned.trainer.model.parts
    assert {*turns._waiting} == {tensor for name in ("text_encoder", "vae") for tensor in _tensors(model[name])}
    turned.run()
    assert turned.losses == plain.losses and torch.equal(flat(turned.trainer.params), flat(plain.trainer.params))


def test_a_move_that_breaks_off_is_made_again(tiny_model, moved, monkeypatch):  # noqa: F811
    model = learner.load_model(RunConfig(model=str(tiny_model)), {}, None)
    model.place(CPU, hold=torch.Tensor.cpu)
    Turns(model, CPU).keep({})
    with torch.no_grad():
        said = model.encode_text(["a dog"])["states"]
        seen = model.encode_pixels(torch.zeros(1, 3, 16, 16))
        frozen = Turns._frozen

        def breaks(self, name):
            yield from itertools.islice(frozen(self, name), 3 if name == "text_encoder" else None)
            if name == "text_encoder":
                raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as short, pytest.raises(torch.OutOfMemoryError):
            short.setattr(Turns, "_frozen", breaks)
            model.encode_text(["a dog"])
        assert torch.equal(model.encode_pixels(torch.zeros(1, 3, 16, 16)), seen), "it left before the other one came half-way"
        assert torch.equal(model.encode_text(["a dog"])["states"], said)


def test_what_the_disk_holds_brings_no_part_and_a_run_that_was_stopped_goes_on(start, moved, monkeypatch):  # noqa: F811
    """With both caches on parts take turns unasked. Captions that change are encoded for each window; the second run finds what the first kept."""
    run = dataclasses.replace(RUN, total_samples=16, center_crop=True, ucg=0.3, **LORA)
    kept = {"cache_latents": True, "cache_text": True}
    monkeypatch.setattr("peer.samples.feed.WINDOW_SAMPLES", 8)
    whole = start("whole", run=run, **kept).run()
    assert {"text_encoder", "vae"} < {name for name, came in moved if came}
    moved.clear()
    first = start("parts", run=run, stop_after=3, cache_dir=whole_cache(whole), **kept).run()  # in the middle of a window
    second = start("parts", run=run, resume_from_checkpoint="latest", cache_dir=whole_cache(whole), **kept).run()
    assert first.losses + second.losses == whole.losses and torch.equal(flat(second.trainer.params), flat(whole.trainer.params))
    assert [name for name, came in moved if came] == ["unet", "unet"]


def whole_cache(started):
    return str(started.results._peer.output_dir) + "/cache"


class Threads:
    """A group of ranks that are threads of this process; a rank that waits for one that does not come ends the test."""

    def __init__(self, world):
        self.world, self.rank = world, 0
        self._meeting, self._box = threading.Barrier(world, timeout=60), [None] * world

    def ranked(self, rank):
        one = copy.copy(self)
        one.rank, one.is_main = rank, rank == 0
        return one

    def begin(self):
        pass

    def gather(self, value):
        self._box[self.rank] = value
        self._meeting.wait()
        told = list(self._box)
        self._meeting.wait()
        return told

    def broadcast_object(self, value):
        return self.gather(value)[0]

    def scatter(self, parts):
        return self.gather(parts)[0][self.rank]

    def barrier(self):
        self.gather(None)

    @torch.no_grad()
    def broadcast_(self, tensors):
        for tensor, first in zip(tensors, self.gather([tensor.clone() for tensor in tensors])[0], strict=True):
            tensor.copy_(first)

    @torch.no_grad()
    def sum_(self, tensors):
        for tensor, *ranks in zip(tensors, *self.gather([tensor.clone() for tensor in tensors]), strict=True):
            tensor.copy_(sum(ranks))


def of_ranks(folder, model, pictures, *offload):
    """What is trained in the end, at each rank. offload: each rank's."""
    group, trained, closing = Threads(len(offload)), {}, ExitStack()
    run = dataclasses.replace(RUN, total_samples=16, **LORA)

    def train(rank):
        peer = PeerConfig(output_dir=str(folder), train_data_dir=str(pictures), train_batch_size=2, offload=offload[rank])
        launch = Launch(
            joined=Joined(dataclasses.replace(run, model=str(model))), peer=peer, group=group.ranked(rank), device=CPU,
            stopping=lambda: False, closing=closing,
        )  # fmt: skip
        trainer, _ = assemble(launch)
        trainer.run()
        trained[rank] = flat(trainer.params)

    with closing, ThreadPoolExecutor(len(offload)) as pool:
        list(pool.map(train, range(len(offload))))
    return [trained[rank] for rank in range(len(offload))]


def test_held_out_pictures_bring_each_part_once_and_have_the_same_loss(start, moved, monkeypatch):  # noqa: F811
    monkeypatch.setattr("peer.drawing.held_out._LEAST_DRAWS", 8)
    run = dataclasses.replace(RUN, total_samples=8, validation_split=0.3, **LORA)
    told = []
    for name, options in (("plain", {}), ("turned", {"offload": True})):
        started = start(name, run=run, validation_steps=2, **options)
        started.trainer.sync.measured = told.append
        started.run()
    plain, turned = told
    assert turned == plain
    assert [name for name, came in moved if came] == 2 * ["text_encoder", "vae", "unet"]


def test_ranks_of_which_one_has_turns_draw_the_same_windows(tiny_model, pictures, tmp_path, moved, monkeypatch):  # noqa: F811
    """Else the one that has turns takes part in draws of which the other does not know, and both wait for ever."""
    one_by_one, loaded = threading.Lock(), threading.Barrier(2, timeout=60)

    def load(*asked, load=learner.load_model):
        with one_by_one:  # while transformers load a model, all modules that are made in this process are empty
            model = load(*asked)
        loaded.wait()
        return model

    monkeypatch.setattr(learner, "load_model", load)
    monkeypatch.setattr("peer.samples.feed.WINDOW_SAMPLES", 8)
    plain = of_ranks(tmp_path / "plain", tiny_model, pictures, False, False)
    turned = of_ranks(tmp_path / "turned", tiny_model, pictures, False, True)
    assert moved and all(torch.equal(params, plain[0]) for params in (*plain, *turned))


BOTH = {"cache_latents": True, "cache_text": True}


def test_parts_take_turns_where_a_device_has_memory_of_its_own_and_it_is_asked_for_or_both_caches_are_on(caplog):
    cuda, xla = torch.device("cuda", 0), torch.device("xla")
    assert [takes_turns(PeerConfig(offload=offload), cuda) for offload in (True, False)] == [True, False]
    assert takes_turns(PeerConfig(**BOTH), cuda) and takes_turns(PeerConfig(**BOTH), xla)
    assert not any(takes_turns(PeerConfig(**{name: True}), cuda) for name in BOTH), "half of the parts would come for each picture"
    assert not takes_turns(PeerConfig(**BOTH, compile=True), cuda) and not takes_turns(PeerConfig(), xla)
    assert not takes_turns(PeerConfig(**BOTH), CPU) and not caplog.text
    assert not takes_turns(PeerConfig(offload=True), CPU) and "offload=no: it makes room on a GPU" in caplog.text
    with pytest.raises(UserError, match=r"--offload was not tried on XLA.*--cache_latents --cache_text"):
        takes_turns(PeerConfig(offload=True), xla)


def test_a_step_that_is_tried_has_the_turns_of_training_and_keeps_nothing():
    cuda, prior = torch.device("cuda", 0), {"with_prior_preservation": True, "train_data_dir": "x", "class_data_dir": "y", "class_prompt": "a dog"}
    assert to_try(PeerConfig(**BOTH, **prior, train_batch_size=3), cuda) == PeerConfig(offload=True, train_data_dir="x", train_batch_size=3)
    assert to_try(PeerConfig(**BOTH), CPU) == to_try(PeerConfig(offload=True), CPU) == PeerConfig()


@pytest.mark.parametrize("other", [{"device": "cpu"}, {"device": "xla"}, {"compile": True}, {"ipex": True}])
def test_turns_are_refused_where_they_are_of_no_use_or_were_not_tried(other):
    with pytest.raises(UserError, match=f"offload.*{'|'.join(other)}"):
        PeerConfig(offload=True, **other)
