"""Tiny but real pipelines of every family and a folder of captioned pictures, all made in code in a second or two.

Every part is the genuine diffusers or transformers class, only narrow and with random weights: the folder is what
`save_pretrained` writes, and anything that loads such a family loads it.
"""

import functools
import importlib
import pkgutil
from pathlib import Path

import torch
from PIL import Image

from peer.rooms import load_part
from swarm import founding
from swarm.run.family import families as families_of_runs
from swarm.run.family import family_of_pipeline
from tests.tiny import families
from tests.tiny.facts import Tiny
from tests.tiny.families import stable_diffusion
from tests.tiny.moulds import Mould
from tests.tiny.parts import clip_text, clip_tokenizer, ddpm, unet, vae

__all__ = ["clip_text", "clip_tokenizer", "ddpm", "unet", "vae"]

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "white": (250, 250, 250)}
MODELS: dict[str, Tiny] = {
    name: model
    for module in pkgutil.iter_modules(families.__path__)
    for name, model in importlib.import_module(f"{families.__name__}.{module.name}").MODELS.items()
}
FAMILIES = {name: model.family for name, model in MODELS.items()}
"""What `build` takes: the module of peer/models that trains it."""
ONE_OF_EACH = [*{family: name for name, family in reversed(FAMILIES.items())}.values()][::-1]
"""The first model of each family."""


def build_pipeline(channels: tuple[int, int] = (16, 32), seed: int = 0, prediction_type: str = "epsilon"):
    """StableDiffusionPipeline for 16x16 pictures: VAE factor 2, 8x8 latents; channels: the UNet's two levels."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer()
        encoder, autoencoder = clip_text(tokenizer), vae()
        return stable_diffusion.pipeline(autoencoder, encoder, tokenizer, unet(16, channels), ddpm(prediction_type))


@functools.cache
def _mould(family: str, seed: int) -> Mould:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = MODELS[family].build()
    with torch.no_grad():
        MODELS[family].scale(pipeline.vae)
    return Mould(pipeline)


def build(family: str, seed: int = 0):
    """A pipeline of one of `FAMILIES` for 16x16 pictures, the caller's own; every text encoder has two layers, and knows `WORDS`."""
    return _mould(family, seed).cast()


def takes(family: str, method: str) -> bool:
    """Whether a model of `build` can be trained by the method, which "with text encoder" may follow."""
    facts = families_of_runs()[FAMILIES[family]]
    return founding.takes(facts, method.split()[0]) and (facts.trains_texts or not method.endswith("with text encoder"))


WORDY = [name for name in ONE_OF_EACH if takes(name, "textual_inversion")]
"""Those whose pipelines read learned words."""


def drawing(pipeline) -> dict:
    """Arguments with which a tiny pipeline is called in plain diffusers."""
    family = family_of_pipeline(type(pipeline).__name__).name
    return dict(next(model.drawing for model in MODELS.values() if model.family == family))


def kind(family: str) -> type:
    """The class in peer/models that trains a pipeline of `build`."""
    module = load_part("models", FAMILIES[family])
    return next(kind for kind in vars(module).values() if isinstance(kind, type) and getattr(kind, "facts", None) is module.FAMILY)


def write_model(folder: Path, **options) -> Path:
    build_pipeline(**options).save_pretrained(folder)
    return folder


def write_family(folder: Path, family: str, seed: int = 0) -> Path:
    build(family, seed).save_pretrained(folder)
    return folder


def write_pictures(folder: Path, count: int = 12, side: int = 16) -> Path:
    """`count` PNGs of a coloured square on grey, each different, with a .txt beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        name, colour = list(COLOURS.items())[i % len(COLOURS)]
        picture = Image.new("RGB", (side, side), (128, 128, 128))
        picture.paste(colour, (i % 5, i % 3, side // 2 + i % 5, side // 2 + i % 3))
        picture.save(folder / f"{i:03}.png")
        (folder / f"{i:03}.txt").write_text(f"a {name} square", encoding="utf-8")
    return folder
