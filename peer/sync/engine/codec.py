"""How vectors travel: fp32 as they are, fp16 at half the bytes, int8 and int4 in blocks that share a scale.

A vector is cut once into parts, the same at every peer; a part's bytes stand alone, so that parts are encoded, averaged, sent and
decoded one by one. Every operation is elementwise (or a maximum), so all CPUs give the same bits. A lossy codec's error is not
lost: what the encoding dropped stays with the sender and goes into its next contribution (error feedback).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from peer.sync.engine.vectors import Schema
from swarm.slices import Layout

PART_ELEMENTS = 256 << 10
"""At most. 512 KiB at fp16: small enough to pipeline and to stay in a core's cache, large enough that Python's share stays small."""
LEAST_ELEMENTS = 16 << 10
_PARTS = 32
"""At least, of a vector of half a million values or more: each of as many reducers then has some. A learned word is one part."""
_FP16_MAX = 65504.0
_LARGEST = 2.0**100
"""Of a value in blocks, and of a scale: no product of a code and a scale, and no sum of such products, overflows float32."""
_SMALLEST_SCALE = 2.0**-126
"""Below it are the subnormals, which some CPUs are told to flush to zero: such a block is zero for all."""


class Codec(Protocol):
    name: str
    """As `swarm.slices` knows it."""

    def num_bytes(self, elements: int) -> int:
        """Bytes of this many encoded elements."""
        ...

    def encode(self, values: Tensor, out: Tensor) -> None:
        """(n,) float32 -> `out`, (num_bytes(n),) uint8. Clamps what it cannot hold; a NaN comes out as one that `decode` refuses."""
        ...

    def decode(self, data: Tensor, out: Tensor) -> None:
        """(num_bytes(n),) uint8 -> `out`, (n,) float32. Raises ValueError for what is not finite."""
        ...


class Fp32:
    name = "fp32"

    def num_bytes(self, elements: int) -> int:
        return 4 * elements

    def encode(self, values: Tensor, out: Tensor) -> None:
        out.view(torch.float32).copy_(values)

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(torch.float32))
        check_finite(out)


class Fp16:
    name = "fp16"

    def num_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Tensor, out: Tensor) -> None:
        halves = out.view(torch.float16).copy_(values)
        if not math.isfinite(float(halves.sum())):  # hardly ever; clamping takes twice the time of both
            halves.copy_(values.clamp(-_FP16_MAX, _FP16_MAX))

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(torch.float16))
        check_finite(out)


@dataclass(frozen=True)
class Blocks:
    """Codes of `bits` (8 or 4) bits, symmetric about zero, times a scale per `block` elements: the largest magnitude over the
    largest code. The scales (bfloat16: float32's range, 2 bytes) come first, then the codes; the last block is filled with zeros.

    The scale is rounded up, so no code is clipped and the error of an element is at most half its block's scale.
    """

    bits: int
    block: int

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def num_bytes(self, elements: int) -> int:
        return self._count(elements) * (2 + self.block * self.bits // 8)

    def encode(self, values: Tensor, out: Tensor) -> None:
        blocks = self._whole(values).view(-1, self.block)
        largest = blocks.abs().amax(1, keepdim=True) if blocks.numel() else blocks[:, :1]
        if largest.numel() and float(largest.max()) > _LARGEST:
            blocks = blocks.clamp(-_LARGEST, _LARGEST)
            largest = largest.clamp(max=_LARGEST)
        scales = _bfloat16_above(largest / self._largest_code)
        inverses = torch.where(scales > 0, 1 / scales, 0)
        out_scales, out_codes = self._split(out)
        out_scales.copy_(scales.view(-1))
        self._pack((blocks * inverses).round_().view(-1), out_codes)

    def decode(self, data: Tensor, out: Tensor) -> None:
        scales, packed = self._split(data)
        # As floats: to compare a tensor with a number takes as long as to look at 2,048 scales. NaNs fail the comparisons as well.
        smallest, largest = map(float, scales.aminmax()) if scales.numel() else (0.0, 0.0)
        if not (smallest >= 0 and largest <= _LARGEST):
            raise ValueError("non-finite values" if not bool(scales.isfinite().all()) else "scales out of range")
        whole = out if out.numel() == scales.numel() * self.block else torch.empty(scales.numel() * self.block)
        self._unpack(packed, whole)
        whole.view(-1, self.block).mul_(scales.float().unsqueeze(1))
        if whole is not out:
            out.copy_(whole[: out.numel()])

    @property
    def _largest_code(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _count(self, elements: int) -> int:
        return -(-elements // self.block)

    def _whole(self, values: Tensor) -> Tensor:
        missing = -values.numel() % self.block
        return pad(values, (0, missing)) if missing else values

    def _split(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """(scales as bfloat16, codes as uint8), views of `data`."""
        count = data.numel() // self.num_bytes(self.block)
        return data[: 2 * count].view(torch.bfloat16), data[2 * count :]

    def _pack(self, codes: Tensor, out: Tensor) -> None:
        if self.bits == 8:
            out.view(torch.int8).copy_(codes)
        else:
            # The first half of the part in the low four bits, the second half in the high ones: whole rows, no strides.
            # By way of int8: float32 to uint8 takes five times as long.
            nibbles = codes.to(torch.int8).add_(8).view(torch.uint8)
            torch.bitwise_or(nibbles[: out.numel()], nibbles[out.numel() :] << 4, out=out)

    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        if self.bits == 8:
            out.copy_(packed.view(torch.int8))
        else:
            out[: packed.numel()].copy_(packed & 15)
            out[packed.numel() :].copy_(packed >> 4)
            out.sub_(8)


@dataclass(frozen=True)
class Part:
    """Elements [start, end) of the vector, bytes [begin, stop) of what is sent."""

    start: int
    end: int
    begin: int
    stop: int
    codec: Codec

    @property
    def num_bytes(self) -> int:
        return self.stop - self.begin

    @property
    def layout(self) -> Layout:
        """How its bytes are cut and hashed."""
        return Layout(self.codec.name, self.end - self.start)

    def of(self, vector: Tensor) -> Tensor:
        """This part of a (size,) vector."""
        return vector[self.start : self.end]

    def bytes_of(self, encoded: Tensor) -> Tensor:
        """This part of an encoded (num_bytes,) vector."""
        return encoded[self.begin : self.stop]

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """(end - start,) float32 -> (stop - begin,) uint8; into `out` when given."""
        out = torch.empty(self.num_bytes, dtype=torch.uint8) if out is None else out
        self.codec.encode(values, out)
        return out

    def decode(self, data: Tensor, out: Tensor | None = None) -> Tensor:
        """(stop - begin,) uint8 -> (end - start,) float32; into `out` when given. Raises ValueError for what is not finite."""
        out = torch.empty(self.end - self.start) if out is None else out
        self.codec.decode(data, out)
        return out

    def check_length(self, data: Tensor) -> None:
        """Raise ValueError unless `data` is as long as this part."""
        if data.numel() != self.num_bytes:
            raise ValueError(f"{data.numel()} bytes instead of {self.num_bytes}")


_CODECS: dict[str, tuple[Codec, Codec]] = {
    "fp32": (Fp32(), Fp32()),
    "fp16": (Fp16(), Fp16()),
    "int8": (Blocks(8, 128), Fp16()),  # 8.125 bits an element; root mean square error 0.0065 of a normal vector's deviation
    "int4": (Blocks(4, 64), Fp16()),  # 4.25 bits; 0.107
}
"""For the tensors large enough for blocks, and for the others."""
WIRES = tuple(_CODECS)


class Wire:
    """How the vectors of one run travel: `big` elements in its codec, then `small` ones in a format without blocks."""

    def __init__(self, name: str, big: int, small: int = 0):
        codec, fallback = _CODECS[name]
        self.name, self.sizes, self.size = name, (big, small), big + small
        longest = min(PART_ELEMENTS, LEAST_ELEMENTS * max(1, self.size // (_PARTS * LEAST_ELEMENTS)))
        parts: list[Part] = []
        for start, end, of in ((0, big, codec), (big, big + small, fallback)):
            for first in range(start, end, longest):
                last, begin = min(first + longest, end), parts[-1].stop if parts else 0
                parts.append(Part(first, last, begin, begin + of.num_bytes(last - first), of))
        self.parts = tuple(parts)
        self.num_bytes = parts[-1].stop if parts else 0

    @classmethod
    def of(cls, name: str, schema: Schema) -> "Wire":
        return cls(name, schema.big_size, schema.size - schema.big_size)

    def encode(self, vector: Tensor, out: Tensor | None = None) -> Tensor:
        """(size,) float32 -> (num_bytes,) uint8; into `out` when given."""
        out = torch.empty(self.num_bytes, dtype=torch.uint8) if out is None else out
        for part in self.parts:
            part.encode(part.of(vector), part.bytes_of(out))
        return out

    def decode(self, encoded: Tensor) -> Tensor:
        """(num_bytes,) uint8 -> (size,) float32. Raises ValueError for a wrong length and for what is not finite."""
        if encoded.numel() != self.num_bytes:
            raise ValueError(f"{encoded.numel()} bytes instead of {self.num_bytes}")
        vector = torch.empty(self.size)
        for part in self.parts:
            part.decode(part.bytes_of(encoded), part.of(vector))
        return vector

    def square_norm(self, encoded: Tensor) -> float:
        """Sum of the squares of the decoded values, part by part; for one peer alone: another CPU may add up otherwise."""
        return add_up(square_norm(part.decode(part.bytes_of(encoded))) for part in self.parts)

    def norm(self, encoded: Tensor) -> float:
        """L2 norm of the decoded values, right to 2e-4. Raises ValueError for what is not finite."""
        room = torch.empty(PART_ELEMENTS)
        return math.sqrt(add_up(rough_square(part.decode(part.bytes_of(encoded), room[: part.end - part.start])) for part in self.parts))


def square_norm(values: Tensor) -> float:
    """Sum of squares in float64, where squares of float32 never overflow. Its last bits depend on the CPU."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def rough_square(values: Tensor) -> float:
    """Sum of squares, right to 3e-4 on every CPU, in an eighth of the time of `square_norm`."""
    square = float(torch.dot(values, values))
    return square if math.isfinite(square) else square_norm(values)


def add_up(parts: Iterable[float]) -> float:
    """The sum of the parts' squares, rounded once: the same bits at every member.

    Not `sum`, which Python 3.12 began to compensate: of 25 parts' sums every second one differs from 3.11's.
    """
    return math.fsum(parts)


def check_finite(values: Tensor) -> None:
    """Raise ValueError for a NaN or an infinity."""
    # Any of them makes the sum non-finite, and a sum is read in a hundredth of isfinite's time.
    if not math.isfinite(float(values.sum())) and not bool(values.isfinite().all()):
        raise ValueError("non-finite values")


def _bfloat16_above(values: Tensor) -> Tensor:
    """The smallest bfloat16 values, as float32, that are not below these positive ones; 0 for those that are too small, NaN for NaN."""
    above = ((values.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(values >= _SMALLEST_SCALE, above, values * 0)
