"""Who is there, who was until lately, and when each was last heard of by our own clock."""

from collections.abc import Mapping, Sequence
from typing import Any

GONE_SECONDS = 3600.0
"""How long a gone peer is still shown, with its last figures."""
MOST_GONE = 20


class Roster:
    def __init__(self) -> None:
        self._heard: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._live: set[str] = set()

    def look(self, peers: Sequence[Mapping[str, Any]], now: float) -> None:
        """peers: the live ones, as `protocol.PeerInfo` describes them; now: UNIX seconds."""
        for peer in peers:
            before = self._heard.pop(peer["peer_id"], None)
            self._heard[peer["peer_id"]] = (before[0] if before and before[1]["time"] == peer["time"] else now, peer)
        self._live = {peer["peer_id"] for peer in peers}
        gone = [name for name, (heard, _) in self._heard.items() if name not in self._live]
        recent = sorted((name for name in gone if now - self._heard[name][0] < GONE_SECONDS), key=lambda name: self._heard[name][0])
        for name in set(gone) - set(recent[-MOST_GONE:]):
            del self._heard[name]

    def seen(self) -> dict[str, int]:
        """UNIX seconds at which each live peer last said something new."""
        return {name: int(heard) for name, (heard, _) in self._heard.items() if name in self._live}

    def gone(self) -> list[dict[str, Any]]:
        """The last gone first: the last that each said, and when."""
        kept = ("peer_id", "name", "hardware", "phase", "note", "round")
        found = [(heard, peer) for name, (heard, peer) in self._heard.items() if name not in self._live]
        return [
            {**{name: peer[name] for name in kept}, "seen": int(heard)}
            for heard, peer in sorted(found, key=lambda entry: entry[0], reverse=True)
        ]
