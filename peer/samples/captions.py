"""What a sample is trained with instead of its caption: one of several, what the method says, its tags in another order, or nothing.

Chance depends on the run's seed and the sample's key alone: the same at every peer, in every process, and after a resume. A key holds
the epoch, so that a picture is told differently in each.
"""

import random
from collections.abc import Sequence

from swarm.run.method import method_named
from swarm.run_config import RunConfig


def choose_caption(key: str, caption: str | Sequence[str], run: RunConfig) -> str:
    """The caption to train sample `key` with; '' where it is dropped, which teaches the model to draw unguided."""
    if not isinstance(caption, str):
        caption = _chance("choice", key, run).choice(caption) if caption else ""
    own = method_named(run.method).caption(caption, run, lambda what: _chance(what, key, run))
    if own is not None:
        return own
    if _chance("caption", key, run).random() < run.ucg:
        return ""
    return _shuffled(key, caption, run) if run.shuffle_tags else caption


def _shuffled(key: str, caption: str, run: RunConfig) -> str:
    tags = [tag.strip() for tag in caption.split(",") if tag.strip()]
    rest = tags[run.keep_tokens :]
    _chance("tags", key, run).shuffle(rest)
    return ", ".join(tags[: run.keep_tokens] + rest)


def _chance(what: str, key: str, run: RunConfig) -> random.Random:
    """A generator of its own for each decision, so that an option changes no other's."""
    return random.Random(f"{what}:{run.seed}:{key}")
