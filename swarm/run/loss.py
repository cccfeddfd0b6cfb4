"""Facts about losses: a family says by which it is trained, and its options are that one's."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.run.rooms import modules


@dataclass(frozen=True, kw_only=True)
class Loss:
    title: str
    """For people: 'is trained by TITLE'."""
    options: type
    found_in: Callable[[Any, Path], Mapping[str, Any]] = lambda run, source: {}
    """What the founder reads of the base model (a folder or a file) for options that the run leaves open. Raises UserError."""
    said_by_file: Callable[[Path, bool], Mapping[str, Any]] = lambda path, configured: {}
    """What a .safetensors file says of its scheduler, by the names of its config. The flag: whether a --model_config was given."""


@functools.cache
def losses() -> dict[str, Loss]:
    return {name: module.LOSS for name, module in modules("losses").items()}
