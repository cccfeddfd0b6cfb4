"""The peers that we have met: those that were in a group which we averaged in ourselves, as members or reducers. Kept on disk.

A key costs nothing, a round costs a contribution or a share of the averaging, and everybody's time: so a vote of peers that we have met cannot be bought with keys
alone. What a downloaded state says about its members makes nobody met: whoever made the state wrote that list.
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from swarm import files

log = logging.getLogger(__name__)

_MOST = 4096
"""Peers remembered, the last met; 200 kB on disk."""


class Met(dict[str, None]):
    """`peer in met`, the last met at the end. run: digest of the configuration; a file of another run is begun anew, as is one that cannot be
    read. A dict, since a peer of eight asks it a hundred times a second."""

    def __init__(self, path: Path, run: str):
        self._path, self._run = path, run
        super().__init__(dict.fromkeys(self._read()))

    def averaged(self, peers: Iterable[str]) -> None:
        """We have averaged a round with `peers`. A disk that cannot take the list costs memory of it after a restart, no more."""
        peers, known = list(peers), set(self)
        for peer in peers:
            self.pop(peer, None)
            self[peer] = None
        while len(self) > _MOST:
            del self[next(iter(self))]
        if self.keys() == known:
            return
        try:
            files.replace(self._path, json.dumps({"run": self._run, "peers": list(self)}).encode())
        except OSError as error:
            log.warning("cannot keep the list of peers met in %s: %s", self._path, error)

    def _read(self) -> list[str]:
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            peers = kept["peers"] if kept["run"] == self._run else []
            return [peer for peer in peers if isinstance(peer, str)][-_MOST:]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("ignored %s: %s", self._path, error)
            return []
