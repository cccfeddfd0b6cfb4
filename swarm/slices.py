"""How the bytes of a vector's parts are hashed, so that 4 KiB of them can be shown by themselves, and averaged once more by anybody.

A part of a vector (`codec.Part`) is cut into slices: 4 KiB of its codes or values, and in front of them the scales that these need. A part's
hash is its layout and the root of a Merkle tree over its slices; a share's digest is that of a tree over its parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

BODY_BYTES = 4 << 10
HASH_BYTES = 32
MOST_ELEMENTS = 256 << 10
"""Of a part (`codec.PART_ELEMENTS`)."""
MOST_SLICES = 4 * MOST_ELEMENTS // BODY_BYTES
MOST_PARTS = 1 << 20
MOST_SLICE_BYTES = BODY_BYTES + 2 * 2 * (BODY_BYTES // 64 + 1)
"""Of int4, whose slices need the scales of two runs of blocks."""
MOST_PATH_BYTES = (8 + 20) * HASH_BYTES
Format = Literal["fp32", "fp16", "int8", "int4"]
_WIDTHS: dict[str, int] = {"fp32": 4, "fp16": 2}
_BLOCKS: dict[str, int] = {"int8": 128, "int4": 64}
"""Elements that share a scale (`codec.Blocks`)."""


@dataclass(frozen=True)
class Layout:
    """Of one part: `elements` values in a format of `codec.py`."""

    format: Format
    elements: int

    @property
    def block(self) -> int:
        """Elements that share a scale; 0 where there are none."""
        return _BLOCKS.get(self.format, 0)

    @property
    def blocks(self) -> int:
        return -(-self.elements // self.block) if self.block else 0

    @property
    def body_bytes(self) -> int:
        """Without the scales."""
        if not self.block:
            return self.elements * _WIDTHS[self.format]
        return self.blocks * (self.block if self.format == "int8" else self.block // 2)

    @property
    def slices(self) -> int:
        return -(-self.body_bytes // BODY_BYTES)

    def cut(self, data: memoryview) -> Iterator[bytes]:
        """A part's encoded bytes, slice by slice."""
        return (self.slice(data, number) for number in range(self.slices))

    def slice(self, data: memoryview, number: int) -> bytes:
        begin, stop = self._body(number)
        scales = [data[2 * first : 2 * last] for first, last in self._runs(begin, stop)]
        return b"".join((*scales, data[2 * self.blocks + begin : 2 * self.blocks + stop]))

    def _body(self, number: int) -> tuple[int, int]:
        """Bytes of the body, without the scales."""
        return number * BODY_BYTES, min((number + 1) * BODY_BYTES, self.body_bytes)

    def _runs(self, begin: int, stop: int) -> list[tuple[int, int]]:
        """The blocks whose scales a slice needs."""
        if not self.block:
            return []
        # int4: the first half of a part is in the low four bits, the second half in the high ones.
        starts = [0] if self.format == "int8" else [0, self.body_bytes]
        return [((start + begin) // self.block, -(-(start + stop) // self.block)) for start in starts]

    def places(self, number: int) -> NDArray[np.int64]:
        """Which of the part's values slice `number` holds; in a last block also places beyond its elements."""
        begin, stop = self._body(number)
        if not self.block:
            return np.arange(begin // _WIDTHS[self.format], stop // _WIDTHS[self.format])
        low = np.arange(begin, stop)
        return low if self.format == "int8" else np.concatenate([low, low + self.body_bytes])

    def scales(self, number: int, slice: bytes) -> NDArray[np.float64]:
        """Of each value of a slice: that of its block (bfloat16)."""
        runs = self._runs(*self._body(number))
        blocks = np.concatenate([np.arange(*run) for run in runs])
        of_blocks = (np.frombuffer(slice[: 2 * len(blocks)], dtype="<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        by_block = dict(zip(blocks.tolist(), of_blocks.tolist(), strict=True))
        return np.array([by_block[block] for block in (self.places(number) // self.block).tolist()])

    def decode(self, number: int, slice: bytes) -> NDArray[np.float64]:
        """The values of slice `number`, at `places`. Raises ValueError for what is not finite, or of another length."""
        begin, stop = self._body(number)
        scales_bytes = sum(2 * (last - first) for first, last in self._runs(begin, stop))
        if not 0 <= number < self.slices or len(slice) != scales_bytes + stop - begin:
            raise ValueError("a slice of another length")
        if not self.block:
            values = np.frombuffer(slice, dtype=f"<f{_WIDTHS[self.format]}").astype(np.float64)
        else:
            codes = np.frombuffer(slice[scales_bytes:], dtype=np.int8 if self.format == "int8" else np.uint8)
            if self.format == "int4":
                codes = np.concatenate([codes & 15, codes >> 4]).astype(np.int8) - 8
            values = codes * self.scales(number, slice)
        if not np.isfinite(values).all():
            raise ValueError("non-finite values")
        return values

    def part_hash(self, data: memoryview) -> bytes:
        """Of a part's encoded bytes."""
        return self.hash_by(root([blake3(each).digest() for each in self.cut(data)]))

    def hash_by(self, root: bytes) -> bytes:
        """Of the part whose slices have that root."""
        return blake3(f"part {self.format} {self.elements} ".encode() + root).digest()

    def path(self, data: memoryview, number: int) -> bytes:
        """From slice `number` to the root of its part."""
        return path_of([blake3(each).digest() for each in self.cut(data)], number)


def tree_digest(parts: Sequence[bytes]) -> str:
    """Of a share: of its parts' hashes, and how many they are."""
    return named(len(parts), root(parts))


def named(count: int, root: bytes) -> str:
    return blake3(f"share {count} ".encode() + root).hexdigest()


def root(leaves: Sequence[bytes]) -> bytes:
    """Of a Merkle tree. Where one has nobody beside it, it goes up as it is."""
    level = list(leaves)
    while len(level) > 1:
        level = _above(level)
    return level[0]


def path_of(leaves: Sequence[bytes], index: int) -> bytes:
    """The hashes, one after the other, with which leaf `index` leads to the root."""
    path, level = [], list(leaves)
    while len(level) > 1:
        path += level[index ^ 1 : (index ^ 1) + 1]
        level, index = _above(level), index // 2
    return b"".join(path)


def climb(leaf: bytes, index: int, count: int, path: bytes) -> tuple[bytes, bytes]:
    """The root to which leaf `index` of `count` leads, and what is left of the path. Raises ValueError for an index that there is not."""
    if not 0 <= index < count:
        raise ValueError("no such leaf")
    while count > 1:
        if index ^ 1 < count:
            other, path = path[:HASH_BYTES], path[HASH_BYTES:]
            leaf = _node(other, leaf) if index & 1 else _node(leaf, other)
        index, count = index // 2, (count + 1) // 2
    return leaf, path


def _above(level: list[bytes]) -> list[bytes]:
    pairs = [_node(level[at], level[at + 1]) for at in range(0, len(level) - 1, 2)]
    return [*pairs, *(level[-1:] if len(level) % 2 else ())]


def _node(left: bytes, right: bytes) -> bytes:
    return blake3(b"node " + left + right).digest()
