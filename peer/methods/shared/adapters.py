"""What adapters have in common: peft's layers beside those of the model."""

import contextlib
import importlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peer.contracts import Model, Params
from peer.methods.shared.parts import freeze, plain


def layers(part: nn.Module, ends: Sequence[str]) -> list[str]:
    """The part's linear layers and convolutions whose names end so: all within its blocks, since an end is never the whole name."""
    found = [(name, module) for name, module in part.named_modules() if name.endswith(tuple(f".{end}" for end in ends))]
    return [name for name, module in found if isinstance(module, nn.Linear | nn.Conv2d)]


_peft = threading.Lock()
"""Held while peft's module has other functions: of two threads the second would take these for its own, and leave them there."""


@contextlib.contextmanager
def without_bitsandbytes() -> Iterator[None]:
    """Within it peft's LoRA does not look for bitsandbytes' layers, of which our models have none: it would load all of that library."""
    lora = importlib.import_module("peft.tuners.lora.model")
    with _peft:
        asked = {name: getattr(lora, name) for name in ("is_bnb_available", "is_bnb_4bit_available") if hasattr(lora, name)}
        try:
            for name in asked:
                setattr(lora, name, lambda: False)
            yield
        finally:
            for name, function in asked.items():
                setattr(lora, name, function)


def add_adapters(model: Model, names: Sequence[str], ends: Sequence[str], config: Callable[..., Any]) -> Params:
    """Put peft's layers of a `config` beside those of the named parts that `ends` chooses; their parameters, float32, as peft drew them."""
    logging.getLogger("peft").setLevel(logging.ERROR)
    freeze(model)
    params: Params = {}
    for name in names:
        part = model.parts[name]
        with torch.random.fork_rng(devices=[]), without_bitsandbytes():
            part.add_adapter(config(target_modules=layers(part, ends)))
        part.train()
        params.update((f"{name}.{plain(key)}", parameter) for key, parameter in part.named_parameters() if parameter.requires_grad)
    for parameter in params.values():
        parameter.data = parameter.data.float()
    return params


def uniform(shape: torch.Size, rng: torch.Generator) -> Tensor:
    """Equally distributed within 1 / sqrt(inputs), by whole numbers that are rounded once: the same bits on every machine."""
    drawn = torch.randint(-(2**23), 2**23, shape, generator=rng)
    return drawn.float() * 2.0**-23 * (1 / math.sqrt(math.prod(shape[1:])))


def shown(config: Any) -> dict[str, Any]:
    """peft's configuration for others: without the sets, which JSON lacks, and paths of this machine."""
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return {**values, "base_model_name_or_path": None}
