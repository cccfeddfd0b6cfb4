"""What every method promises, for every family: peer/contracts.py's Method, and that its result is what was trained."""

import dataclasses
import functools

import pytest
import torch

from peer.contracts import PixelBatch
from peer.launch.starting_model import load_model
from peer.rooms import load_part
from peer.samples.encoding import Encoder
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.machine.shallow import shallow_family  # noqa: F401
from tests.peer.models.reading import folders_are_read_once  # noqa: F401
from tests.sources import parts

CPU = torch.device("cpu")
WORD = {"placeholder_token": "<dicoo>", "initializer_token": "a"}
METHODS = {
    "full": {},
    "full with text encoder": {"train_text_encoder": True},
    "lora": {"rank": 2, "lora_alpha": 4.0},
    "lora with text encoder": {"rank": 2, "train_text_encoder": True},
    "textual_inversion": {**WORD, "num_vectors": 2},
}
DRAWN = ("lora_A", "hada_w1", "hada_w2_a", "lokr_w2")
"""What begins with numbers drawn by chance; its gradient is 0 until what begins as 0 has moved."""
WAYS = {
    "loha": {"rank": 2, "lora_alpha": 4.0, "train_text_encoder": True, "lora_targets": "all-linear+conv"},
    "lokr": {"rank": 2, "lora_alpha": 4.0, "train_text_encoder": True, "lora_targets": "all-linear+conv"},
    "lora with dora": {"rank": 2, "lora_alpha": 4.0, "use_dora": True, "train_text_encoder": True, "lora_targets": "all-linear+conv"},
}
"""Of a method, tried on one family."""


def run_of(name, model, **options):
    return RunConfig(method=name.split()[0], model=str(model), resolution=16, **(METHODS | WAYS)[name] | options)


def attached(run):
    model = load_model(run, {}, CPU)
    method = load_part("methods", run.method).build(run)
    return model, method, method.attach(model)


def losses(model, caption="a <dicoo> square"):
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    geometry = torch.tensor([[16, 16, 0, 0, 16, 16]] * 2)
    batch = Encoder(model)(PixelBatch(pixels, (caption, ""), geometry), torch.Generator().manual_seed(2))
    return model.loss(batch, torch.Generator().manual_seed(3))


def everything(model):
    """Every tensor of the parts, a copy."""
    return {f"{part}.{name}": tensor.clone() for part, module in model.parts.items() for name, tensor in module.state_dict().items()}


def unread(model):
    return {id(parameter) for module in model.unread() for parameter in module.parameters()}


def test_every_method_of_the_room_is_tried():
    assert set(parts("methods")) == {name.split()[0] for name in METHODS | WAYS}


PAIRS = [(family, name) for family in tiny.ONE_OF_EACH for name in METHODS if tiny.takes(family, name)] + [("sd", name) for name in WAYS]


class Lesson:
    """A step of a method on a model: what there was before, and what it left."""

    def __init__(self, name, folder):
        self.run = run_of(name, folder)
        self.model, _, self.params = attached(self.run)
        self.before, self.first = everything(self.model), {key: parameter.detach().clone() for key, parameter in self.params.items()}
        loss = losses(self.model).mean()
        loss.backward()
        torch.optim.AdamW(self.params.values(), lr=2e-3 if self.run.method == "full" else 3e-2).step()
        with torch.no_grad():
            self.fallen = float(loss - losses(self.model).mean())


@pytest.fixture(scope="module", params=PAIRS, ids=" ".join)
def pair(request):
    """Of a family and a method: all tests of one come after each other, and look at one lesson."""
    return request.param


@pytest.fixture(scope="module")
def learned():
    return functools.lru_cache(1)(Lesson)


@pytest.fixture
def lesson(pair, learned, tiny_family, shallow_family):  # noqa: F811
    """The ways that are tried on one family alone have layers of all kinds."""
    family, name = pair
    return learned(name, (tiny_family if name in WAYS else shallow_family)(family))


def test_what_a_method_trains_has_gradients_and_all_else_stays(lesson):
    model, params = lesson.model, lesson.params
    own = {parameter.data_ptr() for parameter in params.values()}
    assert all(p.dtype == torch.float32 and p.requires_grad for p in params.values())
    read = {key: p for key, p in params.items() if id(p) not in unread(model)}
    assert read.keys() <= {key for key, p in params.items() if p.grad is not None}
    assert not any(p.grad is not None and p.grad.any() for key, p in params.items() if key not in read)
    assert all(p.grad.abs().sum() > 0 for key, p in read.items() if not any(word in key for word in DRAWN))
    trained = {key for part, module in model.parts.items() for key, p in module.named_parameters(part) if p.data_ptr() in own}
    assert any(not torch.equal(old, params[key]) for key, old in lesson.first.items())
    assert all(torch.equal(tensor, lesson.before[key]) for key, tensor in everything(model).items() if key not in trained)
    untrained = [
        key for part, module in model.parts.items() for key, p in module.named_parameters(part) if key not in trained and p.requires_grad
    ]
    assert untrained == []


def test_the_loss_at_fixed_noise_falls_by_what_the_optimizer_does(lesson):
    assert lesson.fallen > 1e-5


def test_two_peers_start_from_the_same_bits_and_names_and_another_seed_from_others(lesson):
    one, (_, _, two) = lesson.first, attached(lesson.run)
    assert list(one) == list(two) and all(torch.equal(one[key], two[key]) for key in one)
    assert not any("text_model." in key for key in one)
    _, _, other = attached(dataclasses.replace(lesson.run, seed=1))
    differ = {key for key in one if not torch.equal(one[key], other[key])}
    assert differ == {key for key in one if any(word in key for word in DRAWN)}


def test_the_layers_that_clip_skip_leaves_out_have_no_gradient(shallow_family):  # noqa: F811
    model, _, params = attached(run_of("full with text encoder", shallow_family("sd"), clip_skip=1))
    losses(model).mean().backward()
    without = {key for key, p in params.items() if p.grad is None}
    assert without == {key for key, p in params.items() if id(p) in unread(model)} and all(".layers.1." in key for key in without)
    assert without


def test_fresh_lora_layers_do_not_depend_on_what_was_drawn_before_and_change_nothing_yet(tiny_model):
    plain = losses(load_model(run_of("full", tiny_model), {}, CPU))
    torch.manual_seed(0)
    model, _, params = attached(run_of("lora with text encoder", tiny_model))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    _, _, again = attached(run_of("lora with text encoder", tiny_model))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(params[key], again[key]) for key in params)
    torch.testing.assert_close(losses(model), plain)


def test_fresh_lora_layers_are_drawn_as_diffusers_scripts_draw_them(tiny_model):
    _, _, params = attached(run_of("lora", tiny_model, rank=8))
    drawn = torch.cat([p.flatten() for key, p in params.items() if "lora_A" in key]) * 8  # peft's init_lora_weights="gaussian"
    assert abs(drawn.mean()) < 0.03 and abs(drawn.std() - 1) < 0.03 and 3 < drawn.abs().max() < 6
    torch.testing.assert_close(drawn.pow(4).mean(), torch.tensor(2.9), atol=0.2, rtol=0)  # 3 - 6/5/12


def test_lora_layers_of_runs_before_are_drawn_as_they_were(tiny_model):
    _, _, params = attached(run_of("lora", tiny_model, rank=8, lora_init="uniform"))
    drawn = torch.cat([p.flatten() * p.shape[1] ** 0.5 for key, p in params.items() if "lora_A" in key])
    assert 0.99 < drawn.abs().max() <= 1 and abs(drawn.std() - 3**-0.5) < 0.02


def test_only_the_new_words_rows_travel(tiny_model):
    _, _, params = attached(run_of("textual_inversion", tiny_model))
    assert {key: tuple(p.shape) for key, p in params.items()} == {"text_encoder.learned_embeds": (2, 16)}


def test_the_word_starts_as_its_initializer_and_its_vectors_are_read_one_after_the_other(tiny_model):
    model, _, params = attached(run_of("textual_inversion", tiny_model))
    start, without = (model.encode_text([caption])["states"] for caption in ("a <dicoo> b", "a a a b"))
    torch.testing.assert_close(start, without)
    with torch.no_grad():
        params["text_encoder.learned_embeds"][1].neg_()
    moved = model.encode_text(["a <dicoo> b"])["states"]
    assert torch.equal(moved[:, :3], start[:, :3]) and not torch.allclose(moved[:, 3], start[:, 3])
    assert torch.equal(model.encode_text(["a a a b"])["states"], without), "of captions without the word"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placeholder_token": "a</w>"}, r"knows a</w> already.*Choose another --placeholder_token"),
        ({"initializer_token": "toy"}, r"'toy' is 3 tokens .* not one"),
    ],
)
def test_a_word_that_cannot_be_learned_is_refused(tiny_model, options, message):
    with pytest.raises(UserError, match=message):
        attached(run_of("textual_inversion", tiny_model, **options))
