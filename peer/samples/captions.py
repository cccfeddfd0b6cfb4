"""What a sample is trained with instead of its caption: one of several, a template, its tags in another order, or nothing.

Chance depends on the run's seed and the sample's key alone: the same at every peer, in every process, and after a resume. A key holds
the epoch, so that a picture is told differently in each.
"""

import random
from collections.abc import Sequence

from swarm.run_config import RunConfig

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


def choose_caption(key: str, caption: str | Sequence[str], run: RunConfig) -> str:
    """The caption to train sample `key` with; '' where it is dropped, which teaches the model to draw unguided."""
    if not isinstance(caption, str):
        caption = _chance("choice", key, run).choice(caption) if caption else ""
    if run.method == "textual_inversion":
        # Without the new word there is nothing to learn: no caption that lacks it, and none dropped.
        return caption if run.placeholder_token in caption else _template(key, run)
    if _chance("caption", key, run).random() < run.ucg:
        return ""
    return _shuffled(key, caption, run) if run.shuffle_tags else caption


def _template(key: str, run: RunConfig) -> str:
    templates = STYLE_TEMPLATES if run.learnable_property == "style" else OBJECT_TEMPLATES
    return _chance("template", key, run).choice(templates).format(run.placeholder_token)


def _shuffled(key: str, caption: str, run: RunConfig) -> str:
    tags = [tag.strip() for tag in caption.split(",") if tag.strip()]
    rest = tags[run.keep_tokens :]
    _chance("tags", key, run).shuffle(rest)
    return ", ".join(tags[: run.keep_tokens] + rest)


def _chance(what: str, key: str, run: RunConfig) -> random.Random:
    """A generator of its own for each decision, so that an option changes no other's."""
    return random.Random(f"{what}:{run.seed}:{key}")
