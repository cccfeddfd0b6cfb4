"""What tests have to know of a tiny model that the facts of its family do not say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from peer.contracts import Text
from tests.tiny.parts import scale_latents


def _scaled_back(pipeline: Any, latents: Tensor) -> Tensor:
    config = pipeline.vae.config
    return latents / config.scaling_factor + (config.shift_factor or 0.0)


@dataclass(frozen=True, kw_only=True)
class Tiny:
    family: str
    """The module of peer/models that trains it."""
    build: Callable[[], Any]
    """Its pipeline, for 16x16 pictures; every text encoder has two layers, and knows WORDS."""
    encode: Callable[[Any, Sequence[str]], Text]
    """What the pipeline itself makes of captions."""
    scale: Callable[[Any], None] = scale_latents
    """Gives its VAE's latents what real ones have: mean 0, variance 1, and a posterior that is hardly wider than its mean."""
    framed: Callable[[Tensor], Tensor] = lambda pixels: pixels
    """(B, 3, H, W) pixels as its VAE takes them."""
    decoded: Callable[[Any, Tensor], Tensor] = _scaled_back
    """What the pipeline makes of latents before its VAE decodes them."""
    keys: tuple[str, ...]
    """Names of tensors by which one file of the original layout is known."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Options of a run that fit its tokenizers."""
    drawing: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with which its pipeline is called in plain diffusers."""
    hearing: Mapping[str, Any] = field(default_factory=dict)
    """Options of a run with which what a caption says is heard: at high noise only, or where the velocity is predicted."""
    rate: str = "5e-3"
    steps: int = 30
    """Learning rate and steps in which it is taught four colours."""
    foreign: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Reasons for which options of others are refused, and the options."""
    wrong: Mapping[str, list[tuple]] = field(default_factory=dict)
    """Wrong values of the options that only its family has, as in tests/test_wrong_options.py."""
