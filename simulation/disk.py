"""A machine's disk: files in memory, of which a power cut loses or tears what was not flushed; it can be full.

`SimPath` stands for `pathlib.Path` and `SimFile` for an open file where the engine writes; `swarm.files` learns of both below.
"""

import contextlib
import errno
import fnmatch
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from swarm import files

Job = list[Callable[[], None]]
"""How to take back each thing that it wrote, in order."""


class _Inode:
    __slots__ = ("data", "made", "synced")

    def __init__(self, data: bytes = b"", synced: bytes | None = None, made: float = 0.0):
        self.data, self.synced, self.made = data, synced, made


class Disk:
    """names: path -> file, as the processes see it; `_durable`: as it is after a power cut."""

    def __init__(self, rng: random.Random, wall: Callable[[], float] = lambda: 0.0):
        self._rng, self.wall = rng, wall
        self.names: dict[str, _Inode] = {}
        self._durable: dict[str, _Inode] = {}
        self.full = False
        self.appended: Callable[[str, bytes], None] = lambda path, data: None
        """Told of each line that is added to a file, also if there is no room for it."""
        self._syncs: Counter[str] = Counter()
        """Of each folder. What one process made durable, the end of another's job takes back no more."""
        self._undo: Job | None = None

    def root(self) -> "SimPath":
        return SimPath(self, "/")

    # ------------------------------------------------------------- what processes do

    def write(self, inode: _Inode, data: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._did(partial(setattr, inode, "data", inode.data))
        inode.data += data

    def sync(self, inode: _Inode) -> None:
        if self.full and inode.synced != inode.data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._did(partial(setattr, inode, "synced", inode.synced))
        inode.synced = inode.data

    def create(self, path: str) -> _Inode:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._did(partial(self._put_back, path, self.names.get(path)))
        inode = self.names[path] = _Inode(made=self.wall())
        return inode

    def rename(self, source: str, target: str) -> None:
        inode, before = self._existing(source), self.names.get(target)
        self._did(lambda: (self._put_back(target, before), self._put_back(source, inode)))
        self.names.pop(target, None)  # so that the names stay in the order in which they came
        self.names[target] = inode
        del self.names[source]

    def link(self, path: str, target: str) -> None:
        self._did(partial(self._put_back, target, self.names.get(target)))
        self.names[target] = self._existing(path)

    def delete(self, path: str) -> None:
        self._did(partial(self._put_back, path, self._existing(path)))
        del self.names[path]

    def sync_folder(self, folder: str) -> None:
        inside = folder.rstrip("/") + "/"
        self._syncs[inside] += 1
        self._did(partial(self._unsync, inside, self._syncs[inside], self._durable))
        self._now_durable(inside, self.names)

    def _unsync(self, inside: str, sync: int, before: dict[str, _Inode]) -> None:
        if self._syncs[inside] == sync:
            self._now_durable(inside, before)

    def _now_durable(self, inside: str, names: dict[str, _Inode]) -> None:
        self._durable = {path: inode for path, inode in self._durable.items() if not path.startswith(inside)}
        self._durable |= {path: inode for path, inode in names.items() if path.startswith(inside)}

    def existing(self, path: str) -> _Inode:
        return self._existing(path)

    def _existing(self, path: str) -> _Inode:
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.names[path]

    # ------------------------------------------------------------- what happens to it

    def _did(self, undo: Callable[[], None]) -> None:
        if self._undo is not None:
            self._undo.append(undo)

    def _put_back(self, path: str, inode: _Inode | None) -> None:
        if inode is None:
            del self.names[path]
        else:
            self.names[path] = inode

    def flushed(self) -> list[str]:
        """The files that are the same after a power cut."""
        return [path for path, inode in self.names.items() if self._durable.get(path) is inode and inode.synced == inode.data]

    @contextlib.contextmanager
    def job(self) -> Iterator[Job]:
        """What a thread's job writes meanwhile."""
        self._undo = job = []
        try:
            yield job
        finally:
            self._undo = None

    def crash(self, jobs: Sequence[Job] = (), *, power: bool) -> None:
        """A process, or the whole machine, is gone. jobs: of those whose results were not there yet; each got to some point of what it wrote."""
        for job in reversed(jobs):
            for undo in reversed(job[self._rng.randrange(len(job) + 1) :]):
                undo()
        if power:
            self._lose()

    def rot(self, path: str, how: str) -> None:
        """A bit of a file has flipped, in its first line or behind it, or its end is gone."""
        inode = self._existing(path)
        if not inode.data:
            return  # its end went before, and all else with it
        border = inode.data.find(b"\n") + 1 or -(-len(inode.data) // 2)
        if how == "end":
            data = inode.data[: self._rng.randrange(len(inode.data))]
        else:
            in_line = how == "line" or border == len(inode.data)  # a file may be nothing but its first line
            at = self._rng.randrange(border) if in_line else self._rng.randrange(border, len(inode.data))
            data = inode.data[:at] + bytes([inode.data[at] ^ 1 << self._rng.randrange(8)]) + inode.data[at + 1 :]
        inode.data = inode.synced = data

    def _lose(self) -> None:
        """Each name that was not flushed is what it was or what it became; each file's bytes are the flushed ones, or torn."""
        names = {}
        for path in sorted({*self.names, *self._durable}):
            before, after = self._durable.get(path), self.names.get(path)
            kept = after if before is after or self._rng.random() < 0.5 else before
            if kept is not None:
                names[path] = kept
        for inode in names.values():
            if inode.synced != inode.data:  # there is more, and some of that is there
                flushed = len(inode.synced or b"")
                kept = flushed if inode.synced is not None and self._rng.random() < 0.5 else self._rng.randint(flushed, len(inode.data))
                inode.data = inode.synced = inode.data[:kept]
        self.names, self._durable = names, dict(names)


class SimFile:
    """Opened in mode "rb", "wb", "ab", or "a" (text)."""

    def __init__(self, disk: Disk, inode: _Inode, mode: str, path: str):
        self.disk, self.inode, self._mode, self._path, self._at, self.closed = disk, inode, mode, path, 0, False

    def __enter__(self) -> "SimFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, data: Any) -> int:
        data = data.encode() if isinstance(data, str) else bytes(data)
        if self._mode == "a":
            self.disk.appended(self._path, data)
        self.disk.write(self.inode, data)
        self._at = len(self.inode.data)
        return len(data)

    def read(self, count: int = -1) -> bytes:
        end = None if count < 0 else self._at + count
        data = self.inode.data[self._at : end]
        self._at += len(data)
        return data

    def readinto(self, room: memoryview) -> int:
        data = self.read(len(room))
        room[: len(data)] = data
        return len(data)

    def readline(self, limit: int = -1) -> bytes:
        end = self.inode.data.find(b"\n", self._at)
        length = (end + 1 if end >= 0 else len(self.inode.data)) - self._at
        return self.read(length if limit < 0 else min(length, limit))

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self.inode.data)}[whence]
        return self._at

    def flush(self) -> None:
        """What was written is with the operating system at once."""

    def close(self) -> None:
        self.closed = True


class SimPath:
    """As much of `pathlib.Path` as the engine uses. Folders need not be made."""

    def __init__(self, disk: Disk, path: str):
        self.disk, self._path = disk, path

    def __str__(self) -> str:
        return self._path

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimPath) and self._path == other._path and self.disk is other.disk

    def __hash__(self) -> int:
        return hash(self._path)

    def __lt__(self, other: "SimPath") -> bool:
        return self._path < other._path

    def __truediv__(self, name: str) -> "SimPath":
        return SimPath(self.disk, f"{self._path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self._path.rsplit("/", 1)[1]

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[0] or self.name

    @property
    def parent(self) -> "SimPath":
        return SimPath(self.disk, self._path.rsplit("/", 1)[0] or "/")

    def with_name(self, name: str) -> "SimPath":
        return self.parent / name

    def with_suffix(self, suffix: str) -> "SimPath":
        return self.parent / f"{self.stem}{suffix}"

    def exists(self) -> bool:
        return self._path in self.disk.names

    def stat(self) -> SimpleNamespace:
        inode = self.disk.existing(self._path)
        return SimpleNamespace(st_size=len(inode.data), st_mtime=inode.made)

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Beside a peer's own folder, one that has something in it is there already."""
        if self.disk.full and self._path != "/" and not any(path.startswith(f"{self._path}/") for path in self.disk.names):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def iterdir(self) -> list["SimPath"]:
        inside = self._path.rstrip("/") + "/"
        return [SimPath(self.disk, path) for path in sorted(self.disk.names) if path.startswith(inside) and "/" not in path[len(inside) :]]

    def glob(self, pattern: str) -> Iterator["SimPath"]:
        return iter([path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern)])

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok or self.exists():
            self.disk.delete(self._path)

    def replace(self, target: "SimPath") -> "SimPath":
        self.disk.rename(self._path, target._path)
        return target

    def open(self, mode: str = "r", encoding: str | None = None) -> SimFile:
        if mode in ("a", "ab") and not self.exists():
            self.disk.names[self._path] = _Inode()  # an empty file takes no room: only writing to it fails on a full disk
        if mode == "wb":
            return SimFile(self.disk, self.disk.create(self._path), mode, self._path)
        return SimFile(self.disk, self.disk.existing(self._path), mode, self._path)

    def read_bytes(self) -> bytes:
        return self.disk.existing(self._path).data

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        with self.open("wb") as file:
            file.write(text.encode(encoding))


@files.sync.register
def _(file: SimFile) -> None:
    file.disk.sync(file.inode)


@files.read_at.register
def _(file: SimFile, count: int, offset: int) -> bytes:
    if file.closed:
        raise ValueError("read of closed file")
    return file.inode.data[offset : offset + count]


@files.free_bytes.register
def _(folder: SimPath) -> int:
    return 0 if folder.disk.full else 1 << 40


@files.link.register
def _(path: SimPath, target: SimPath) -> None:
    path.disk.link(str(path), str(target))


@files.touch.register
def _(path: SimPath) -> None:
    """Shards here are few: none is evicted by its age."""


@files.flush.register
def _(path: SimPath) -> None:
    if path.exists():  # only files have names here
        path.disk.sync(path.disk.existing(str(path)))
    else:
        path.disk.sync_folder(str(path))


@files.create.register
def _(path: SimPath, mode: int = 0o666) -> SimFile:
    return path.open("wb")
