"""Linear layers whose weights nobody trains, in 16, 8 or 4 bits a weight.

A layer unpacks its weights for each pass, forwards and backwards, and keeps nothing of them in between; so it needs no gradient checkpointing. It is
a torch.nn.Linear for whoever looks at it: `weight` is what is computed with, so adapters of every kind work beside it.
"""

import ctypes
import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peer.contracts import Hold

PRECISIONS = ("bf16", "fp8", "int8", "nf4")
_BLOCK = 64
"""Weights in a row that share a scale in nf4 (Dettmers et al. 2023, arXiv:2305.14314, section 3)."""
_GIVE_BACK = 2**27
"""Weights after whose packing memory is given back. A layer in float32 leaves a hole that its packed bits split: the next layer does not fit into it, and
nf4 of a UNet of SDXL's size had grown to 5.9 GB before its last layers, for some 1.4 GB of bits."""


class PackedLinear(nn.Linear):
    """A linear layer in fewer bits. error: (2,), the squared lengths of what its weights lost, and of the weights that it was made of."""

    def __init__(self, layer: nn.Linear, precision: str, device: torch.device):
        """precision: of PRECISIONS; device: where it is packed and stays. The layer's own weights may be elsewhere."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        weight = layer.weight.detach().to(device).float()  # widened there: asked at once, the host would hold it in float32
        pack, self._unpack = _BY_NAME[precision]
        bits, scales = pack(weight)
        self.own: Tensor | None = None
        """The weights that it was made of, on any device, while it is to compute with these."""
        # bitsandbytes' bits are a view on a CPU: with another `data` later, it would keep the memory that it was a view of.
        self.register_buffer("bits", bits.data)
        self.register_buffer("scales", scales.data)
        difference = self.unpacked(torch.float32) - weight
        self.error = torch.stack([difference.square().sum(), weight.square().sum()])

    @property
    def weight(self) -> Tensor:
        """(outputs, inputs), as it is computed with."""
        return self.unpacked(self.bias.dtype if self.bias is not None else torch.float32)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        if self.own is not None:
            return self.own.to(self.bits.device, dtype)
        return self._unpack(self.bits, self.scales, (self.out_features, self.in_features)).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return _Apply.apply(x.to(dtype), self)


class _Apply(torch.autograd.Function):
    """A packed layer's answer; no gradient for the layer. What it saves is the layer: its weights are unpacked again on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.unpacked(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.unpacked(gradient.dtype), None


def pack(
    part: nn.Module, ends: Iterable[str], precision: str, device: torch.device, hold: Hold | None = None
) -> tuple[dict[str, PackedLinear], float]:
    """Put packed layers in the place of the part's linear ones whose names end so, one after the other, on `device`; hold: keeps their tensors elsewhere.

    Returns them by name, and how far their weights are from the layers' own: the length of the difference over the length of the weights.
    """
    ends = tuple(f".{end}" for end in ends)
    packed: dict[str, PackedLinear] = {}
    errors, freed = torch.zeros(2, device=device), 0
    for name in [name for name, module in part.named_modules() if name.endswith(ends) and isinstance(module, nn.Linear)]:
        packed[name] = PackedLinear(part.get_submodule(name), precision, device)
        errors += packed[name].error
        for tensor in packed[name].buffers() if hold else ():
            tensor.data = hold(tensor.data)
        part.set_submodule(name, packed[name])
        freed += packed[name].in_features * packed[name].out_features
        if freed > _GIVE_BACK and not errors.is_meta:
            freed = 0
            give_back()
    return packed, 0.0 if errors.is_meta else (errors[0] / errors[1]).sqrt().item()


def give_back() -> None:
    """Have glibc give the system all that was freed, also between blocks that are in use. Nothing happens with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# ---------------------------------------------------------------- formats: (bits, scales) of a weight, and a weight of them, in float32 or bf16


def _pack_rows(dtype: torch.dtype, most: float) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Each output's weights by the largest of them, which becomes `most`."""

    def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
        scales = weight.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / most
        scaled = weight / scales
        bits = scaled.round() if not dtype.is_floating_point else scaled
        return bits.to(dtype).view(torch.uint8), scales  # as bytes: whoever casts floats to another format leaves these alone

    return packed


def _unpack_rows(dtype: torch.dtype) -> Callable[[Tensor, Tensor, tuple[int, int]], Tensor]:
    return lambda bits, scales, shape: bits.view(dtype).float().mul_(scales)


def _pack_bf16(weight: Tensor) -> tuple[Tensor, Tensor]:
    return weight.bfloat16().view(torch.uint8), weight.new_ones(1)  # a scale as the others have


def _pack_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    return _kernels().quantize_4bit(weight.contiguous(), _BLOCK, "nf4", torch.uint8)


def _unpack_nf4(bits: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
    return _kernels().dequantize_4bit(bits, scales, _BLOCK, "nf4", shape, torch.float32)


@functools.cache
def _kernels() -> Any:
    """bitsandbytes' operators, which it registers with torch when it is loaded: once a name of it is asked for (peer/__init__.py).

    Once: a logger's level, when it is set, goes through all loggers, which takes longer than to unpack a small layer.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    importlib.import_module("bitsandbytes").functional  # noqa: B018
    return torch.ops.bitsandbytes


_BY_NAME: Mapping[str, tuple[Any, Any]] = {
    "bf16": (_pack_bf16, lambda bits, scales, shape: bits.view(torch.bfloat16)),
    "fp8": (_pack_rows(torch.float8_e4m3fn, 448.0), _unpack_rows(torch.float8_e4m3fn)),
    "int8": (_pack_rows(torch.int8, 127.0), _unpack_rows(torch.int8)),
    "nf4": (_pack_nf4, _unpack_nf4),
}
