"""Where a peer's copies of the state lie (`--state_on`): states, contributions and means, each as large as the model.

On disk they are mapped files, whose pages the kernel writes back and takes away when memory is short. Such a file never has a name, so a
process that is killed leaves none. All of its blocks are taken when it is made: on a disk that fills later, writing to it cannot fail with
SIGBUS. Not promised on file systems that write changed blocks elsewhere (btrfs, ZFS), nor when a network disk goes away.
"""

import errno
import logging
import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import Protocol

import psutil

from peer.sync.engine.vectors import SharedBuffer, new_memory
from swarm.advice import size
from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)

DISK, MEMORY = "disk", "memory"
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "fuse.glusterfs"}
_ZEROS = bytes(1 << 20)


class Buffers(Protocol):
    state_on: str

    def shared(self, num_bytes: int) -> SharedBuffer:
        """Zeros, which another process can map. Raises UserError (disk)."""
        ...

    def private(self, num_bytes: int) -> mmap.mmap:
        """Zeros of this process alone. Raises UserError (disk)."""
        ...


class InMemory:
    state_on = MEMORY

    def shared(self, num_bytes: int) -> SharedBuffer:
        return SharedBuffer(num_bytes)

    def private(self, num_bytes: int) -> mmap.mmap:
        return new_memory(num_bytes)


class OnDisk:
    """In `folder`, which is made. Raises UserError (disk) when it cannot be, lies in memory itself, or has less than `needed` bytes free.

    needed: the most bytes that will be taken; 0 where that was asked already, as by the trainer of a sidecar.
    """

    state_on = DISK

    def __init__(self, folder: Path, needed: float = 0):
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kind, free = file_system(folder), shutil.disk_usage(folder).free
        except OSError as error:
            raise self._error(f"{error.strerror}") from None
        if kind in _IN_MEMORY:
            raise self._error(f"it lies in memory ({kind})")
        if free < needed:
            raise self._error(f"{size(needed)} are needed, and {size(free)} are free")
        if needed and kind in _NETWORK:
            log.warning("--state_on disk: %s is on a network disk (%s): rounds wait for it, and without it this peer ends", folder, kind)

    def shared(self, num_bytes: int) -> SharedBuffer:
        try:
            return SharedBuffer(fd=_unnamed_file(self._folder, num_bytes))
        except OSError as error:
            raise self._error(f"{error.strerror}, with {size(num_bytes)} to be added") from None

    def private(self, num_bytes: int) -> mmap.mmap:
        return self.shared(num_bytes).memory

    def _error(self, reason: str) -> UserError:
        return UserError(
            f"Cannot keep the swarm's state in {self._folder}: {reason}.",
            fix="Free some space, choose an --output_dir on another disk, or remove --state_on disk.",
            code=ExitCode.DISK,
        )


IN_MEMORY = InMemory()


def buffers_on(state_on: str, folder: Path, needed: float = 0) -> Buffers:
    """What `--state_on` says; folder, needed: as of `OnDisk`. Raises UserError (disk)."""
    return OnDisk(folder, needed) if state_on == DISK else IN_MEMORY


def file_system(folder: Path) -> str:
    """The kind of the file system that `folder` is on, as the kernel names it; '' where it does not say."""
    path, mounts = folder.resolve(), psutil.disk_partitions(all=True)
    # Of two at one place the later one lies on top.
    around = [(len(mount.mountpoint), index, mount.fstype) for index, mount in enumerate(mounts) if path.is_relative_to(mount.mountpoint)]
    return max(around, default=(0, 0, ""))[2]


def _unnamed_file(folder: Path, num_bytes: int) -> int:
    """A descriptor of a file of zeros that has all of its blocks. Raises OSError."""
    # Asked first: an allocation that fails takes the whole disk for a moment, from all who write there.
    if shutil.disk_usage(folder).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            _write_zeros(file.fileno(), num_bytes)  # a file system that cannot, with a libc that does not do this itself
        return os.dup(file.fileno())


def _write_zeros(fd: int, num_bytes: int) -> None:
    """Raises OSError."""
    at = 0
    while at < num_bytes:
        at += os.pwrite(fd, _ZEROS[: num_bytes - at], at)
    os.fsync(fd)  # a network disk may say only now that it is full
