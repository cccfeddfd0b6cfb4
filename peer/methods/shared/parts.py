"""A model's parts by what they are for."""

from collections.abc import Iterator

from torch import nn

from peer.contracts import Model

TOKENIZERS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
"""The pipeline's tokenizer of each text encoder."""


def denoiser(model: Model) -> str:
    """The name of the part that predicts: `unet` or `transformer`."""
    return next(name for name in ("unet", "transformer") if name in model.parts)


def text_encoders(model: Model) -> dict[str, nn.Module]:
    return {name: model.parts[name] for name in TOKENIZERS if name in model.parts}


def clip_encoders(model: Model) -> Iterator[str]:
    """Names of the text encoders that a fine-tune may train; diffusers' scripts leave FLUX's T5 (4.7 G parameters) as it is."""
    return (name for name, part in text_encoders(model).items() if type(part).__name__.startswith("CLIP"))


def freeze(model: Model) -> None:
    for part in model.parts.values():
        part.requires_grad_(False)
        part.eval()


def plain(name: str) -> str:
    """A parameter's name without `text_model.`, which transformers 5 dropped from some of CLIP's: names are hashed by the swarm."""
    return name.removeprefix("text_model.")
