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
    """Letters in a file, one line each; no file when there are none. Several threads may use one."""

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()

    def letters(self) -> list[Letter]:
        """What was kept; a line that a kill cut short was never relied upon."""
        with self._lock:
            return self._read()

    def keep(self, letter: Letter) -> None:
        """Durable when this returns. Raises UserError when the disk takes nothing."""
        with self._lock:
            try:
                self._write([*self._read(), letter])
            except OSError as error:
                raise UserError(
                    f"Cannot write {self._path}: {error.strerror or error}.",
                    fix="Free some space, or choose another --cache_dir.",
                    code=ExitCode.DISK,
                ) from None

    def said(self, letter: Letter) -> None:
        """The server has answered it: forget it, if it was kept at all. What cannot be forgotten is said again, which does no harm."""
        with self._lock:
            letters = self._read()
            if letter not in letters:
                return
            letters.remove(letter)
            try:
                self._write(letters) if letters else self._path.unlink()
            except OSError as error:
                log.warning("cannot write %s: %s", self._path, error)

    def _read(self) -> list[Letter]:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        letters = []
        for line in lines:
            try:
                letters.append(json.loads(line))
            except ValueError:
                log.warning("%s: a line was cut short", self._path)
        return [letter for letter in letters if isinstance(letter, dict)]

    def _write(self, letters: list[Letter]) -> None:
        files.replace(self._path, "".join(json.dumps(letter) + "\n" for letter in letters).encode())
