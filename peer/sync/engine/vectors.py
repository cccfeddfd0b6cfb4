"""`params` as one flat float32 vector on the host, and back: what is averaged, hashed, stored and sent.

Everything here is elementwise, so every CPU gives the same bits; a sum would differ with the number of threads.
"""

import bisect
import contextlib
import itertools
import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peer.contracts import Params
from peer.loop.rounding import round_stochastically
from swarm.digest import digest_json

BIG_ELEMENTS = 1024
"""In a smaller tensor (a bias, a norm) too many blocks of a codec would share their scale with a neighbour's values."""


@dataclass(frozen=True)
class Schema:
    """Names, shapes and dtypes of `params` in the order of the flat vector: the large tensors first, each kind by name.

    bf16 counts as float32: which of the two a machine keeps is its own affair, what is sent and hashed is float32.
    """

    entries: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, params: Params) -> "Schema":
        return cls(tuple((name, tuple(p.shape), _dtype(p)) for name, p in ordered(params)))

    @property
    def digest(self) -> str:
        """Peers whose schemas differ never average; hivemind's own schema hash leaves the names out."""
        return digest_json([[name, list(shape), dtype] for name, shape, dtype in self.entries])

    @property
    def size(self) -> int:
        """Number of elements of the flat vector."""
        return sum(math.prod(shape) for _, shape, _ in self.entries)

    @property
    def big_size(self) -> int:
        """Number of elements of the large tensors, which come first."""
        return sum(math.prod(shape) for _, shape, _ in self.entries if math.prod(shape) >= BIG_ELEMENTS)


def _dtype(tensor: Tensor) -> str:
    return "float32" if tensor.dtype is torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")


def ordered(params: Params) -> list[tuple[str, Tensor]]:
    """The tensors in the order of the flat vector."""
    return sorted(params.items(), key=lambda item: (item[1].numel() < BIG_ELEMENTS, item[0]))


@torch.no_grad()
def flatten(params: Params, out: Tensor) -> Tensor:
    """Copy `params`, in their order, into the (size,) float32 vector `out` and return it."""
    offset = 0
    for _, parameter in ordered(params):
        out[offset : offset + parameter.numel()].view(parameter.shape).copy_(parameter)
        offset += parameter.numel()
    return out


class Flat:
    """Tensors as one flat float32 vector that is read and written by slices: nothing is copied but the slice.

    The order is the logical one, whatever strides a tensor has (channels_last; what was permuted when it was converted). What is written
    to bf16 tensors is rounded by chance, by every peer on its own: rounded to the nearest, what several peers learned would be undone.
    XLA compiles a program for each slice of a tensor (a model has 20,000 parts): its tensors come to the host as a whole, and go back so.
    """

    def __init__(self, params: Params):
        self._rng = torch.Generator()
        self._rng.seed()
        self._copy: tuple[Tensor, Tensor] | None = None
        """(an XLA parameter, its copy on the host), while its elements are at hand."""
        self._changed = self._in_order = False
        self._params = [parameter for _, parameter in ordered(params)]
        self._starts = list(itertools.accumulate((parameter.numel() for parameter in self._params), initial=0))

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Within the block slices are read and written from front to back, and nobody else changes the tensors: each is copied once."""
        self._in_order = True
        try:
            yield
        finally:
            self._in_order = False
            self._put_back()

    def read(self, start: int, end: int) -> Tensor:
        """A copy of the elements [start, end), on the host."""
        out = torch.empty(end - start)
        for tensor, span, here in self._pieces(start, end):
            out[here].copy_(_values(tensor, span))
        return out

    def minus(self, start: int, values: Tensor) -> Tensor:
        """The elements from `start` on, less as many `values`, on the host."""
        out = torch.empty_like(values)
        for tensor, span, here in self._pieces(start, start + values.numel()):
            torch.sub(_on_host(tensor, span), values[here], out=out[here])
        return out

    def move(self, start: int, before: Tensor, after: Tensor) -> None:
        """The elements from `start` on become after + (they - before), worked out in float32."""
        for tensor, span, here in self._pieces(start, start + before.numel()):
            mine = _on_host(tensor, span)
            moved = mine.sub_(before[here]).add_(after[here])
            self._changed = True
            if not _shares(moved, tensor):
                self._put(tensor, span, moved)

    def write(self, start: int, values: Tensor) -> None:
        for tensor, span, here in self._pieces(start, start + values.numel()):
            self._changed = True
            self._put(tensor, span, values[here])

    def _put(self, tensor: Tensor, span: slice, values: Tensor) -> None:
        if tensor.dtype is torch.bfloat16:
            values = round_stochastically(values.cpu().float(), self._rng)
        if tensor.is_contiguous():
            tensor.view(-1)[span].copy_(values)
        else:
            tensor.put_(_indices(tensor, span), values.to(tensor))

    def _pieces(self, start: int, end: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """(tensor, span, here): the elements `span` of `tensor` are `here` in the vector's slice [start, end)."""
        index, at = bisect.bisect_right(self._starts, start) - 1, start
        while at < end:
            offset, until = self._starts[index], min(self._starts[index + 1], end)
            yield self._at_hand(self._params[index]), slice(at - offset, until - offset), slice(at - start, until - start)
            index, at = index + 1, until
        if not self._in_order:
            self._put_back()

    def _at_hand(self, parameter: Tensor) -> Tensor:
        """Its own memory; of an XLA parameter a copy on the host, which `_put_back` writes back when it was changed."""
        if self._copy is None or self._copy[0] is not parameter:
            self._put_back()
            if parameter.device.type != "xla":
                # Asked for each time: whoever gives a parameter other memory (`.data = ...`) would leave us with what was there before.
                return parameter.detach()
            self._copy = parameter, parameter.detach().cpu()
        return self._copy[1]

    def _put_back(self) -> None:
        if self._copy is not None and self._changed:
            self._copy[0].detach().copy_(self._copy[1])
        self._copy, self._changed = None, False


def _values(tensor: Tensor, span: slice) -> Tensor:
    """Those elements in their logical order: a view where the memory has them in this order."""
    return tensor.view(-1)[span] if tensor.is_contiguous() else tensor.take(_indices(tensor, span))


def _on_host(tensor: Tensor, span: slice) -> Tensor:
    """Those elements as float32 on the host: the tensor's own memory where they are that already, which saves a copy."""
    return _values(tensor, span).to("cpu", torch.float32)


def _indices(tensor: Tensor, span: slice) -> Tensor:
    return torch.arange(span.start, span.stop, device=tensor.device)


def _shares(values: Tensor, tensor: Tensor) -> bool:
    return values.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


class Reused:
    """Memory of one size that is taken again and again; what was taken comes back by itself when the last tensor on it is gone.

    New pages took a sixth of an average's CPU time, 200 M floats. One block is kept at most, and the kernel may have it meanwhile.
    """

    def __init__(self, num_bytes: int, new: Callable[[int], mmap.mmap] | None = None):
        """new: makes such a block; default: private memory."""
        self._num_bytes, self._new = num_bytes, new or new_memory
        self._kept: list[mmap.mmap] = []

    def take(self) -> Tensor:
        """(num_bytes,) uint8, of no particular content."""
        memory = self._kept.pop() if self._kept else self._new(self._num_bytes)
        array = np.frombuffer(memory, dtype=np.uint8, count=self._num_bytes)
        weakref.finalize(array, _keep, self._kept, memory).atexit = False
        return torch.from_numpy(array)


def new_memory(num_bytes: int) -> mmap.mmap:
    """Private, in huge pages where the kernel gives them: the first touch of each small one takes 1.5 us."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _keep(kept: list[mmap.mmap], memory: mmap.mmap) -> None:
    if not kept:
        with contextlib.suppress(OSError):  # a kernel before 4.5; a file's pages, which the kernel may have anyway
            memory.madvise(mmap.MADV_FREE)
        kept.append(memory)


class SharedBuffer:
    """Memory that another process can map when it is handed `fd`; it has no name and vanishes with its last holder."""

    def __init__(self, num_bytes: int = 0, *, fd: int | None = None):
        self.fd = os.memfd_create("swarm") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, num_bytes)
        self.num_bytes = os.fstat(self.fd).st_size
        self.memory = mmap.mmap(self.fd, self.num_bytes)
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    def bytes(self) -> Tensor:
        """(num_bytes,) uint8 view; it keeps the mapping alive."""
        return self._bytes

    def floats(self) -> Tensor:
        """(num_bytes / 4,) float32 view; it keeps the mapping alive."""
        return self._bytes.view(torch.float32)

    def __del__(self) -> None:
        # The mapping outlives the descriptor, and tensors outlive this object.
        os.close(self.fd)
