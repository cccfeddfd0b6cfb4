"""Writing that survives a power cut, folders that one process has for itself, and how many files it may open.

What takes a path or an open file here is a `singledispatch`: the simulator's disk, which tears and loses what was not flushed, adds its own kinds.
"""

import contextlib
import fcntl
import functools
import os
import resource
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

_MOST_OPEN = 65_536


@functools.singledispatch
def sync(file: BinaryIO) -> None:
    """Make what was written into an open file durable. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


@functools.singledispatch
def read_at(file: BinaryIO, count: int, offset: int) -> bytes:
    """`count` bytes of an open file from `offset`, from any thread. Raises OSError, and ValueError once it is closed."""
    return os.pread(file.fileno(), count, offset)


def left(file: BinaryIO) -> int:
    """Bytes from where an open file is read to its end."""
    here = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(here)
    return end - here


def version(path: Path) -> tuple[int, ...] | None:
    """Another one after each change of the file, so that it need not be read again without; None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


@functools.singledispatch
def free_bytes(folder: Path) -> int:
    """Room on the disk of `folder`. Raises OSError."""
    return shutil.disk_usage(folder).free


@functools.singledispatch
def link(path: Path, target: Path) -> None:
    """Give a file a second name, on the same disk. Raises OSError."""
    os.link(path, target)


@functools.singledispatch
def touch(path: Path) -> None:
    """Let a file be as if it had been changed now. Raises OSError."""
    os.utime(path)


@functools.singledispatch
def flush(path: Path) -> None:
    """Make what was written into a file, or renamed within a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@functools.singledispatch
def create(path: Path, mode: int = 0o666) -> BinaryIO:
    """Open a file that is not there yet for writing. mode: less the umask. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")


def replace(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file so that it is there in whole or not at all, durably. mode: less the umask. Raises OSError, and leaves what was there."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    part.unlink(missing_ok=True)
    try:
        with create(part, mode) as file:
            file.write(data)
            sync(file)
        part.replace(path)
    except BaseException:  # a part of 48 MiB would keep the last of a full disk's space from everything else
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    flush(path.parent)


def as_new(path: Path) -> None:
    """Give `path`, a file that a library made, the mode of a new file: 0666 less the umask. safetensors makes its own 0600.

    Where the file system knows no modes it stays as it is.
    """
    probe = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.mode")
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):
            path.chmod(stat.S_IMODE(os.fstat(descriptor).st_mode))
    finally:
        os.close(descriptor)
        probe.unlink()


def raise_open_limit() -> int:
    """Let this process open as many files as the system allows it, up to 65,536; returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_OPEN if hard == resource.RLIM_INFINITY else min(_MOST_OPEN, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One change in the folder at a time; waits while another process has it. Raises OSError.

    The folder itself is locked: a file that root made for it would keep out who owns the folder.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def lock_folder(folder: Path) -> TextIO:
    """Make `folder`, and keep it from other processes until what is returned is closed. Raises BlockingIOError while another has it, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock
