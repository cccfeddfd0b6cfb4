"""The newest final state that a peer which assists keeps on this machine, offered for download: `--states helper/`.

A state is one vector without names, which `dd-export` turns into a model. The folder is only read, and only files of ours in it.
"""

import json
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from swarm.protocol import StateInfo

log = logging.getLogger(__name__)
LOOK_SECONDS = 5.0
_NAME = re.compile(r"round-\d{8}-samples-\d{10}-[0-9a-f]{12}\.state")
_MAX_HEADER_BYTES = 1 << 20


class States:
    """folder: the --output_dir of a peer that assists; None: nothing is offered. clock: in seconds."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.monotonic):
        self._folder, self._clock = folder / "settled" if folder else None, clock
        self._looked, self._path, self._newest = float("-inf"), None, None

    def newest(self) -> StateInfo | None:
        """As it was within the last seconds; None when there is none."""
        if self._folder is not None and self._clock() - self._looked >= LOOK_SECONDS:
            self._looked = self._clock()
            self._look()
        return self._newest

    def path(self, digest: str) -> Path | None:
        """The file of the newest state, if it is that one."""
        newest = self.newest()
        return self._path if newest and newest.digest == digest else None

    def _look(self) -> None:
        """A file is a link to one that is whole: it never changes, and a run's rounds are in the order of their names."""
        try:
            paths = sorted((path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)
        except OSError:
            paths = []  # the helper has not begun
        for path in paths:
            if path == self._path:
                return
            try:
                with path.open("rb") as file:
                    first = json.loads(file.readline(_MAX_HEADER_BYTES))
                header = first["header"]
                info = StateInfo(digest=first["digest"], round=header["round"], samples=header["samples"], bytes=path.stat().st_size)
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("ignored %s: %s", path.name, error)
                continue
            self._path, self._newest = path, info
            return
        self._path = self._newest = None
