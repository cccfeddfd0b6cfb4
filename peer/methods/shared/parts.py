"""A model's parts by what they are for."""

from typing import Any

from torch import nn

from peer.contracts import Model
from swarm.run_config import RunConfig


def text_encoders(model: Model) -> dict[str, nn.Module]:
    return {name: model.parts[name] for name in model.facts.text_encoders if name in model.parts}


def tokenizers(model: Model) -> dict[str, Any]:
    """The pipeline's tokenizer of each text encoder."""
    return {name: getattr(model.pipeline, model.facts.text_encoders[name].tokenizer) for name in text_encoders(model)}


def trained_parts(model: Model, run: RunConfig) -> list[str]:
    """Names of the denoiser and, where asked for, of the text encoders that a fine-tune may train."""
    encoders = [name for name in text_encoders(model) if model.facts.text_encoders[name].trainable]
    return [model.facts.denoiser, *(encoders if run.train_text_encoder else ())]


def freeze(model: Model) -> None:
    for part in model.parts.values():
        part.requires_grad_(False)
        part.eval()


def plain(name: str) -> str:
    """A parameter's name without `text_model.`, which transformers 5 dropped from some of CLIP's: names are hashed by the swarm."""
    return name.removeprefix("text_model.")
