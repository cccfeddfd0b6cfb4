"""Reading plain tars of strangers: names and places of the files in them. Nothing is decompressed, nothing extracted.

Libraries that read WebDataset tars decompress members that look compressed: an xz member of 0.25 MB took 3.4 GB. Here a member is the bytes
that lie in the file, so that reading all of them takes no more memory than the tar has bytes.
"""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MAX_HEADER_BYTES = 1 << 20


class Member(NamedTuple):
    """A file in a tar: `size` bytes from `offset` on. plain: not a link, a folder, a device or a file with holes."""

    name: str
    offset: int
    size: int
    plain: bool


def members(path: Path) -> Iterator[Member]:
    """The members of a tar in their order; only headers are read.

    Raises OSError, tarfile.ReadError, and on hostile bytes whatever tarfile raises: ValueError, UnicodeError, RecursionError, ...
    """
    if not path.is_file():
        raise OSError("no file, or a link that leads nowhere")
    size, position = path.stat().st_size, -1
    with path.open("rb") as file, tarfile.open(fileobj=_Headers(file), mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # it keeps them all
            if member.size < 0 or tar.offset <= position:  # older versions of tarfile go round in circles
                raise tarfile.ReadError("a negative size")
            position = tar.offset
            plain = member.isreg() and not member.issparse() and "\0" not in member.name
            if plain and member.offset_data + member.size > size:
                raise tarfile.ReadError(f"{member.name} is cut off")
            yield Member(member.name, member.offset_data, member.size, plain)
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes this for the end
            raise tarfile.ReadError(f"no header at byte {tar.offset}")


class _Headers(io.RawIOBase):
    """A tar's file as far as its headers need it: one whose header claims to be larger is damaged, and reading it would take all memory."""

    def __init__(self, file: io.BufferedReader):
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()
