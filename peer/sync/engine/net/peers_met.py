"""The file of the peers met, `peers_met.json`: by it a peer that starts again finds its run, also where nobody was named to it."""

import contextlib
import json
from collections.abc import Collection
from pathlib import Path

from swarm.dht import parse_maddrs
from swarm.errors import UserError


class PeersMet:
    """folder: the peer's own. What cannot be read is nothing; what cannot be written is written at a later call."""

    def __init__(self, folder: Path):
        self._folder, self._written = folder, ""

    def read(self) -> list[list[str]]:
        """Addresses of peers met before, one list per peer."""
        try:
            return [parse_maddrs(maddrs, need_peer_id=True) for maddrs in json.loads((self._folder / "peers_met.json").read_text())]
        except (OSError, ValueError, TypeError, UserError):
            return []

    def write(self, addresses: Collection[tuple[str, ...]]) -> None:
        """Keep these, one tuple per peer. Nothing is written where none are known, or the same as before: this is called once a second."""
        text = json.dumps(list(addresses))
        if not addresses or text == self._written:
            return
        with contextlib.suppress(OSError):
            temporary = self._folder / "peers_met.tmp"
            temporary.write_text(text)
            temporary.replace(self._folder / "peers_met.json")
            self._written = text
