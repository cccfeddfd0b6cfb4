"""Every family with every method, by the program's own flags: it learns, and plain diffusers loads what it learned.

Judged by the loss at fixed noise and timesteps of what plain diffusers loaded from the result, so each row covers a run from flags to files.
Random weights are taught four colours first (full); a new word for one of them is then learned from bare pictures of it (textual inversion), and a
word is given another colour (lora and its like). Captions are loud here, so that a third of the steps teach what they teach where captions whisper: each says its
word 16 times, and what the text encoders say is LOUD times as large. LoHa and LoKr take turns from family to family; with
`--hypothesis-profile=deep` both are tried with each.
"""

import functools
import itertools

import pytest
import torch
from hypothesis import settings
from peft import PeftModel
from PIL import Image

from peer import finetune
from peer.contracts import PixelBatch
from peer.samples.encoding import Encoder
from swarm.run.family import families
from swarm.run.methods import textual_inversion
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.machine.shallow import with_one_level
from tests.peer.models.reading import folders_are_read_once  # noqa: F401
from tests.tiny.moulds import Mould

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
COLOURS = {"cat": (250, 5, 5), "dog": (5, 250, 5), "photo": (5, 5, 250), "object": (250, 250, 250)}
TEMPLATE = " ".join(["{0}"] * 16)
LOUD = 6.0
LAST_NORMS = ("text_model.final_layer_norm", "final_layer_norm", "encoder.final_layer_norm", "norm", "model.norm", "model.language_model.norm")
"""Of text encoders."""
COMMON = (
    "--resolution",
    "16",
    "--train_batch_size",
    "4",
    "--ucg",
    "0",
    "--seed",
    "3",
    "--mixed_precision",
    "no",
    "--num_train_epochs",
    "1000",
)


def train(base, data, out, *flags):
    assert finetune.main(["--model", str(base), "--train_data_dir", str(data), "--output_dir", str(out), *COMMON, *map(str, flags)]) == 0
    return out / "model"


def run_flags(family):
    return [word for name, value in tiny.MODELS[family].hearing.items() for word in (f"--{name}", value)]


@functools.cache
def read(family, folder):
    import diffusers

    facts = families()[tiny.FAMILIES[family]]
    return Mould(getattr(diffusers, facts.pipeline).from_pretrained(folder, **facts.unused))


def plain(family, folder):
    """What plain diffusers loads, this test's own."""
    return read(family, folder).cast()


@torch.no_grad()
def judge(family, pipeline, colour, word):
    """Mean loss on pictures of `colour` called `word`, the same noise and timesteps each time."""
    run = RunConfig(resolution=16, **tiny.MODELS[family].hearing)
    model = tiny.kind(family)(pipeline, CPU, run)
    pixels = torch.tensor(COLOURS[colour]).view(3, 1, 1).expand(16, 3, 16, 16) / 127.5 - 1
    rng = torch.Generator().manual_seed(5)
    batch = Encoder(model)(PixelBatch(pixels, [TEMPLATE.format(word)] * 16, torch.tensor([[16, 16, 0, 0, 16, 16]] * 16)), rng)
    return float(model.loss(batch, rng).mean())


@functools.cache
def judged(family, folder, colour, word):
    """Of what plain diffusers loads from a folder that stays as it is."""
    return judge(family, plain(family, folder), colour, word)


def write_colours(folder, words, called=None):
    """Four plain pictures of each word's colour, captioned with the word or with what it is `called`; '': not at all."""
    folder.mkdir()
    for word in words:
        for number in range(4):
            Image.new("RGB", (16, 16), COLOURS[word]).save(folder / f"{word}-{number}.png")
            if called != "":
                (folder / f"{word}-{number}.txt").write_text(TEMPLATE.format(called or word))
    return folder


@pytest.fixture(scope="module")
def random(tmp_path_factory):
    """`random("sdxl")`: the family with random weights, whose text encoders hear words rather than their places, and are loud."""

    @functools.cache
    def write(family):
        pipeline = with_one_level(tiny.build(family))
        for part in families()[tiny.FAMILIES[family]].text_encoders:
            # CLIP starts its embeddings at 0.02, which its places drown. Some families read what is said before the last norm.
            encoder = getattr(pipeline, part)
            torch.nn.init.normal_(encoder.get_input_embeddings().weight, std=LOUD, generator=torch.Generator().manual_seed(1))
            for name, module in encoder.named_modules():
                if name in LAST_NORMS:
                    module.weight.data.mul_(LOUD)
        folder = tmp_path_factory.mktemp(f"random-{family}")
        pipeline.save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="module")
def taught(tmp_path_factory, random):
    """`taught("sdxl")`: what `--method full` made of the family's random weights, once."""

    @functools.cache
    def teach(family):
        folder = tmp_path_factory.mktemp(family)
        data = write_colours(folder / "data", COLOURS)
        lesson = tiny.MODELS[family]
        # All pictures in each batch: in half the steps as much is learned as of batches of four.
        flags = ("--method", "full", "--train_batch_size", 16, "--cache_latents", "--learning_rate", lesson.rate, "--max_train_steps", lesson.steps)
        return train(random(family), data, folder / "out", *flags, *run_flags(family))

    return teach


FULLS = [*tiny.FAMILIES]


@pytest.mark.parametrize("family", FULLS)
def test_full_teaches_the_model_what_captions_mean(taught, random, family):
    after = judged(family, taught(family), "cat", "cat")
    assert after < 0.9 * judged(family, random(family), "cat", "cat")
    assert after < 0.9 * judged(family, taught(family), "cat", "photo")


PRODUCTS = ("loha", "lokr")
WAYS = {
    "attention": ("--lora_targets", "attention"),
    "attention+ff": ("--lora_targets", "attention+ff"),
    "all-linear": ("--lora_targets", "all-linear"),
    "dora": ("--use_dora",),
    **{product: ("--method", product) for product in PRODUCTS},
    "fp8": ("--base_precision", "fp8"),
    "int8": ("--base_precision", "int8"),
    "nf4": ("--base_precision", "nf4"),
    "all-linear+conv, dropout": ("--lora_targets", "all-linear+conv", "--lora_dropout", "0.1"),
}
"""Of a LoRA and its like, tried on one family; the products on every other, too."""
TURNS = {family: PRODUCTS[number % 2] for number, family in enumerate(tiny.ONE_OF_EACH) if family != "sd"}


LORAS = [
    *((family, "") for family in tiny.FAMILIES),
    *(("sd", way) for way in WAYS),
    *((family, product) for family in TURNS for product in PRODUCTS),
]


@pytest.mark.parametrize(("family", "way"), LORAS)
def test_lora_gives_a_word_another_colour(taught, family, tmp_path, way, steps=10):
    if way and TURNS.get(family, way) != way and settings.get_current_profile_name() != "deep":
        pytest.skip("the other product's turn: --hypothesis-profile=deep")
    base = taught(family)
    data = write_colours(tmp_path / "data", ["dog"], called="cat")
    flags = ("--method", "lora", "--learning_rate", "4e-2", "--max_train_steps", steps, *run_flags(family), *WAYS.get(way, ()))
    result = train(base, data, tmp_path / "out", *flags)
    pipeline, before = plain(family, base), judged(family, base, "dog", "cat")
    if way in PRODUCTS:
        denoiser = families()[tiny.FAMILIES[family]].denoiser
        PeftModel.from_pretrained(getattr(pipeline, denoiser), result, subfolder=denoiser)
    else:
        pipeline.load_lora_weights(result)
    assert judge(family, pipeline, "dog", "cat") < 0.9 * before


WORDS = [family for family in tiny.FAMILIES if tiny.takes(family, "textual_inversion")]


@pytest.mark.parametrize("family", WORDS)
def test_textual_inversion_finds_the_word_for_bare_pictures(taught, family, tmp_path, monkeypatch, steps=20):
    monkeypatch.setattr(textual_inversion, "OBJECT_TEMPLATES", (TEMPLATE,))  # the only words that the tiny model was taught with
    base, data = taught(family), write_colours(tmp_path / "data", ["cat"], called="")
    flags = ("--placeholder_token", "<dicoo>", "--initializer_token", "photo", "--learning_rate", "2", "--max_train_steps", steps)
    result = train(base, data, tmp_path / "out", *flags, *run_flags(family))
    pipeline = plain(family, base)
    before, wanted = (judged(family, base, "cat", word) for word in ("photo", "cat"))
    load_words(family, pipeline, result)
    after = judge(family, pipeline, "cat", "<dicoo>")
    assert after < 0.9 * before and after - wanted < 0.75 * (before - wanted)


def load_words(family, pipeline, result):
    """The files of each text encoder, as diffusers' pages say for that family."""
    files = sorted(result.glob("learned_embeds*.safetensors"))
    encoders = families()[tiny.FAMILIES[family]].text_encoders
    for file, (name, encoder) in zip(files, encoders.items(), strict=True):
        pipeline.load_textual_inversion(
            file, token="<dicoo>", text_encoder=getattr(pipeline, name), tokenizer=getattr(pipeline, encoder.tokenizer)
        )


CHECKED = {"sd": ("full", "textual_inversion", "", "dora", *PRODUCTS, "all-linear+conv, dropout")}
"""Ways that are tried without the optimizer. The checks are the same for all families: of each other one its own model is judged, in one way, by turns."""
CHECKED |= {
    family: (turn if tiny.takes(family, turn) else TURNS.get(family, ""),)
    for family, turn in zip((family for family in tiny.FAMILIES if family != "sd"), itertools.cycle(("textual_inversion", "full")), strict=False)
}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_these_checks_fail_when_the_optimizer_does_nothing(random, tmp_path, monkeypatch, family):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, **__: None)
    steps = 1  # which comes to the same as any number of them
    for way in CHECKED[family]:
        folder = tmp_path / f"way {way}"
        folder.mkdir()
        with pytest.raises(AssertionError, match=r"< \(0\.9 \*"):
            if way == "full":
                flags = ("--max_train_steps", steps, "--learning_rate", "3e-3", *run_flags(family))
                result = train(random(family), write_colours(folder / "data", COLOURS), folder / "out", *flags)
                test_full_teaches_the_model_what_captions_mean(lambda family, result=result: result, random, family)
            elif way == "textual_inversion":
                test_textual_inversion_finds_the_word_for_bare_pictures(random, family, folder, monkeypatch, steps)
            else:
                test_lora_gives_a_word_another_colour(random, family, folder, way, steps)
