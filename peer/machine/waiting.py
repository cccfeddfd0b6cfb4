"""Where weights wait for the device, for machines with little memory: in files, --swap_to disk."""

from pathlib import Path

import torch
from torch import Tensor

from peer.sync.engine.buffers import OnDisk
from swarm.errors import ExitCode, UserError

_FILE_BYTES = 256 << 20
"""Of a file, which holds many tensors: each takes one of the 1,024 descriptors that a process may have."""
_ALIGNED = 256
"""Bytes, as CUDA's allocator aligns tensors: kernels read 16 at a time."""


def room(tensor: Tensor) -> int:
    """Bytes that it takes in one piece of memory with others."""
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


class Files(OnDisk):
    """Mapped files without names in `folder`: their pages are no process's own memory, and the kernel takes them away when memory is short."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._free = torch.empty(0, dtype=torch.uint8)
        """What is left of the newest file."""

    def hold(self, tensor: Tensor) -> Tensor:
        """A copy of it, in a file. Raises UserError (disk)."""
        needed = room(tensor)
        if len(self._free) < needed:
            self._free = torch.frombuffer(self.private(max(needed, _FILE_BYTES)), dtype=torch.uint8)
        held, self._free = self._free[: tensor.nbytes], self._free[needed:]
        return held.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _error(self, reason: str) -> UserError:
        return UserError(
            f"Cannot keep weights that wait in {self._folder}: {reason}.",
            fix="Free some space, choose a --cache_dir on another disk, or remove --swap_to disk.",
            code=ExitCode.DISK,
        )
