"""Which sample keys are in which contribution: the loop's translation of the swarm's numbers into the source's samples."""

from collections.abc import Mapping, Sequence
from typing import Any

from peer.contracts import Source, SyncReport


class Accounts:
    """Every sample trained here is open, in a numbered contribution, or reported to the source as done or lost: exactly one of them.

    Ranks other than 0 have no source and keep no accounts.
    """

    def __init__(self, source: Source | None):
        self._source = source
        self._open: list[str] = []
        self._contributions: dict[int, list[str]] = {}
        self._aside: list[str] = []

    def trained(self, keys: Sequence[str]) -> None:
        self._open.extend(keys)

    def unusable(self, keys: Sequence[str]) -> None:
        """They cannot be decoded, by anyone: done with."""
        if self._source and keys:
            self._source.acknowledge(keys)

    def lost(self, keys: Sequence[str]) -> None:
        """The step they were in did not count."""
        if self._source and keys:
            self._source.give_back(keys)

    def set_aside(self, keys: Sequence[str]) -> None:
        """They made the loss infinite: not now again, perhaps later; given back when this peer leaves."""
        self._aside.extend(keys)

    def apply(self, report: SyncReport) -> None:
        """Do with our samples what became of their contributions."""
        if self._source is None:
            return
        if report.frozen is not None:
            self._contributions[report.frozen], self._open = self._open, []
            self._source.register(report.frozen, self._contributions[report.frozen])
        for settlement in report.settlements:
            self._source.settle(settlement)
        for number in report.settled:
            self._source.acknowledge(self._contributions.pop(number, []))
        for number in report.dropped:
            self.lost(self._take(number))

    def _take(self, number: int) -> list[str]:
        if number:
            return self._contributions.pop(number, [])
        keys, self._open = self._open, []
        return keys

    def give_back_aside(self) -> None:
        self.lost(self._aside)
        self._aside = []

    def state_dict(self) -> dict[str, Any]:
        return {"open": self._open[:], "contributions": {n: keys[:] for n, keys in self._contributions.items()}, "aside": self._aside[:]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._open, self._aside = list(state["open"]), list(state["aside"])
        self._contributions = {number: list(keys) for number, keys in state["contributions"].items()}
