"""How batches come to the device that trains them, and weights from it."""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from peer.contracts import LatentBatch, Model, Params, PixelBatch

Encode = Callable[[PixelBatch, torch.Generator], LatentBatch]


class Placing:
    """On a CPU or one GPU, which computes what it is asked for at once."""

    lazy: torch.device | None = None
    """The device, where it compiles a program for every new shape."""

    def __init__(self, device: torch.device):
        self._device = device

    def whole(self, batch: PixelBatch) -> PixelBatch:
        """The batch as it is trained, its pixels where they are."""
        return batch

    def pixels(self, batch: PixelBatch) -> PixelBatch:
        """The batch as it is trained, its pixels on their way to the device."""
        if self._device.type != "cuda" or batch.pixels is None:
            return batch
        return dataclasses.replace(batch, pixels=batch.pixels.pin_memory().to(self._device, non_blocking=True))

    def latents(self, encode: Encode) -> Encode:
        """`encode`, its answers where they are trained."""
        return encode

    def boundary(self) -> None:
        """Have all computed that was asked for so far."""


def placing(device: torch.device, rows: int) -> Placing:
    """rows: of a whole batch."""
    return importlib.import_module("peer.machine.xla").Spread(device, rows) if device.type == "xla" else Placing(device)


@contextmanager
def written(model: Model, params: Params) -> Iterator[Params]:
    """Within the block the model's weights can be written to files: those of XLA, whose memory nobody can read, are copies on the host.

    Yields `params` as they are then.
    """
    stores = [store for part in model.parts.values() for module in part.modules() for store in (module._parameters, module._buffers)]
    kept = [(store, name, tensor) for store in stores for name, tensor in store.items() if tensor is not None and _unreadable(tensor)]
    copies = {id(tensor): _copy(tensor) for _, _, tensor in kept}  # tied weights stay tied
    copies |= {id(tensor): _copy(tensor) for tensor in params.values() if _unreadable(tensor) and id(tensor) not in copies}
    try:
        for store, name, tensor in kept:
            store[name] = copies[id(tensor)]
        yield {name: copies.get(id(parameter), parameter) for name, parameter in params.items()}
    finally:
        for store, name, tensor in kept:
            store[name] = tensor


def _unreadable(tensor: Tensor) -> bool:
    return tensor.device.type == "xla"


def _copy(tensor: Tensor) -> Tensor:
    host = tensor.detach().cpu()
    return nn.Parameter(host, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else host
