"""Which samples are in the contributions that were offered while the dataset server was away, and which rounds were final: on disk, so
that it will hear of them even when this peer is killed before it is back. Otherwise the swarm would have learned from samples that the
ledger gives out again.
"""

import json
import logging
import threading
from pathlib import Path
from typing import Any

from swarm import files
from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)

Letter = dict[str, Any]


class Unsaid:
    """Letters in a file, one line each; no file when there are none. Several threads may use one, which alone writes its file."""

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()
        self._lines = _lines_of(path)
        """As they are on disk: with hundreds that wait, to read them anew for each that is kept or said takes longer than all else."""

    def letters(self) -> list[Letter]:
        """What was kept."""
        with self._lock:
            return [json.loads(line) for line in self._lines]

    def keep(self, letter: Letter) -> None:
        """Durable when this returns, and once: each start says the same rounds again. Raises UserError when the disk takes nothing."""
        line = _line_of(letter)
        with self._lock:
            if line in self._lines:
                return
            try:
                self._write([*self._lines, line])
            except OSError as error:
                raise UserError(
                    f"Cannot write {self._path}: {error.strerror or error}.",
                    fix="Free some space, or choose another --cache_dir.",
                    code=ExitCode.DISK,
                ) from None

    def said(self, letter: Letter) -> None:
        """The server has answered it: forget it, if it was kept at all. What cannot be forgotten is said again, which does no harm."""
        line = _line_of(letter)
        with self._lock:
            if line not in self._lines:
                return
            lines = list(self._lines)
            lines.remove(line)
            try:
                self._write(lines)
            except OSError as error:
                log.warning("cannot write %s: %s", self._path, error)

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            files.replace(self._path, b"\n".join([*lines, b""]))
        else:
            self._path.unlink()
        self._lines = lines


def _line_of(letter: Letter) -> bytes:
    return json.dumps(letter).encode()


def _lines_of(path: Path) -> list[bytes]:
    """Those that are whole: a line that a kill cut short was never relied upon."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [line for line in lines if _is_letter(path, line)]


def _is_letter(path: Path, line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        log.warning("%s: a line was cut short", path)
        return False
