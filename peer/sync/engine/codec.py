"""How vectors travel: fp32 as they are, fp16 at half the bytes.

A lossy codec's error is not lost: what the encoding dropped goes into the sender's next contribution (error feedback).
"""

from typing import Protocol

import torch
from torch import Tensor

_FP16_MAX = 65504.0


class Codec(Protocol):
    bytes_per_element: int
    lossy: bool

    def encode(self, vector: Tensor) -> Tensor:
        """(n,) float32 -> (n * bytes_per_element,) uint8."""
        ...

    def decode(self, data: Tensor) -> Tensor:
        """(n * bytes_per_element,) uint8 -> (n,) float32. Raises ValueError for non-finite values."""
        ...


class Fp32:
    bytes_per_element, lossy = 4, False

    def encode(self, vector: Tensor) -> Tensor:
        return vector.contiguous().view(torch.uint8)

    def decode(self, data: Tensor) -> Tensor:
        return _finite(data.view(torch.float32))


class Fp16:
    bytes_per_element, lossy = 2, True

    def encode(self, vector: Tensor) -> Tensor:
        return vector.clamp(-_FP16_MAX, _FP16_MAX).to(torch.float16).view(torch.uint8)

    def decode(self, data: Tensor) -> Tensor:
        return _finite(data.view(torch.float16).to(torch.float32))


def _finite(vector: Tensor) -> Tensor:
    if not bool(torch.isfinite(vector).all()):
        raise ValueError("non-finite values")
    return vector


CODECS: dict[str, Codec] = {"fp32": Fp32(), "fp16": Fp16()}
