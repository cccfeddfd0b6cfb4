"""A new word, as vectors of the text encoders' tables."""

from collections.abc import Callable
from random import Random
from typing import Any

from swarm.errors import UserError
from swarm.options import option, options
from swarm.run.family import family_named
from swarm.run.method import Method

OBJECT_TEMPLATES = (
    "a photo of a {}", "a picture of the {}", "a photograph of one {}", "a close-up of a {}", "a sharp photo of the {}", "a bright photo of a {}",
    "a dark photo of the {}", "a good photo of a {}", "a blurred photo of a {}", "a cropped picture of the {}", "a drawing of a {}", "the {}",
    "my {} in a photo", "a small {}", "a large {}", "a clean {} in a picture", "a photo of a nice {}", "a photo of a strange {}",
)  # fmt: skip
STYLE_TEMPLATES = (
    "a painting in the style of {}", "a drawing in the style of {}", "a picture in the style of {}", "a print in the style of {}",
    "a detail of a picture in the style of {}", "a bright painting in the style of {}", "a dark painting in the style of {}",
    "a large painting in the style of {}", "a small painting in the style of {}", "a clean picture in the style of {}", "art in the style of {}",
)  # fmt: skip


@options
class Options:
    """Of a new word."""

    placeholder_token: str = option(
        "",
        "The new word that is learned, such as <dicoo>; the tokenizer must not know it yet.",
        section="the method textual_inversion",
    )
    initializer_token: str = option("", "A word of one token whose meaning the new one starts from.")
    learnable_property: str = option(
        "object", "What the word stands for; chooses the captions of bare pictures.", choices=("object", "style")
    )
    num_vectors: int = option(1, "How many vectors the word has; more say more, and take more of the prompt's 77 tokens.", ge=1, founding={"le": 75})


def _check(run: Any) -> None:
    for name, example in (("placeholder_token", "<dicoo>"), ("initializer_token", "toy")):
        value = getattr(run, name)
        if not value or value != value.strip() or len(value.split()) > 1:
            raise UserError(f"{name} is '{value}', but must be one word.", fix=f"For example: --{name} '{example}'.")
    if run.shuffle_tags and "," in run.placeholder_token:
        raise UserError(
            f"shuffle_tags cuts captions at commas, and placeholder_token is '{run.placeholder_token}'.",
            fix="Choose a word without a comma, or remove --shuffle_tags.",
        )
    if run.caption_tag_dropout_rate:
        raise UserError(
            f"caption_tag_dropout_rate is {run.caption_tag_dropout_rate:g}, but a caption with a new word keeps all its tags.",
            fix="Remove --caption_tag_dropout_rate.",
        )


def _caption(caption: str, run: Any, chance: Callable[[str], Random]) -> str:
    """Without the new word there is nothing to learn: no caption that lacks it, and none dropped."""
    templates = STYLE_TEMPLATES if run.learnable_property == "style" else OBJECT_TEMPLATES
    return caption if run.placeholder_token in caption else chance("template").choice(templates).format(run.placeholder_token)


def file_of(encoder: str, suffix: str = ".safetensors") -> str:
    """As diffusers' textual_inversion.py and textual_inversion_sdxl.py call it; in each the placeholder is the only key."""
    return f"learned_embeds{encoder.removeprefix('text_encoder')}{suffix}"


def _loading(pipeline: str, base: str, run: Any, suffix: str) -> str:
    lines = [f"from diffusers import {pipeline}", "", f"pipeline = {base}"]
    family = family_named(run.family)
    for name, encoder in family.text_encoders.items() if family else (("text_encoder", None),):
        its = f", text_encoder=pipeline.{name}, tokenizer=pipeline.{encoder.tokenizer}" if name != "text_encoder" else ""
        lines.append(f'pipeline.load_textual_inversion("THIS_FOLDER", weight_name="{file_of(name, suffix)}"{its})')
    return "\n".join([*lines, f'picture = pipeline("a photo of {run.placeholder_token}").images[0]'])


METHOD = Method(
    since="0.1.0",
    learning_rate=5e-4,
    sections=(Options,),
    asked_by="placeholder_token",
    check=_check,
    learns_words=True,
    changes_model=False,
    in_one_file="A single file has no place for a new word.",
    bare_pictures=True,
    caption=_caption,
    steps_name="learned_embeds",
    has_forms=True,
    kind="a textual inversion embedding",
    tags=("diffusers-training", "textual_inversion"),
    loading=_loading,
)
