"""Files of chunks for others: a line of JSON that says what is in them, then the bytes. States and means are both kept so."""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from peer.sync.engine.state import CHUNK_BYTES
from swarm import files

_MAX_FIRST_LINE_BYTES = 16 << 20
"""A mean's line names the hashes of its state: 128 characters per 4 MiB, so 16 MiB are those of half a tebibyte."""


class ChunkFile(contextlib.AbstractContextManager):
    """An open one, which can be read even when it was deleted meanwhile. first: its line; num_bytes: of what follows."""

    def __init__(self, path: Path):
        """Raises OSError, and ValueError when the first line is not a JSON object."""
        self._file = path.open("rb")
        try:
            self.first = json.loads(self._file.readline(_MAX_FIRST_LINE_BYTES))
            if not isinstance(self.first, dict):
                raise ValueError("it is not a JSON object")
            self._offset, self.num_bytes = self._file.tell(), files.left(self._file)
        except BaseException:
            self.close()
            raise

    async def chunk(self, index: int) -> bytes:
        """Raises OSError, and ValueError once the file is closed."""
        offset = self._offset + index * CHUNK_BYTES
        return await asyncio.get_running_loop().run_in_executor(None, files.read_at, self._file, CHUNK_BYTES, offset)

    def read_into(self, target: Tensor) -> None:
        """All of its bytes at once; target: (num_bytes,) uint8. Once. Raises OSError."""
        self._file.readinto(memoryview(target.numpy()))

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *error) -> None:
        self.close()


def write(path: Path, first: Mapping[str, Any], content: Tensor, *, durable: bool) -> None:
    """Make the file whole or not at all; durable: so that a power cut does not take it. content: uint8. Raises OSError, and leaves what was there.

    first: values that are bytes are JSON already, in one line: a state's header is long, and was made into JSON for its digest.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(_line(first))
            file.write(memoryview(content.numpy()))
            if durable:
                files.sync(file)
        temporary.replace(path)
        if durable:
            files.flush(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _line(values: Mapping[str, Any]) -> bytes:
    items = (json.dumps(name).encode() + b": " + (value if isinstance(value, bytes) else json.dumps(value).encode()) for name, value in values.items())
    return b"{" + b", ".join(items) + b"}\n"
