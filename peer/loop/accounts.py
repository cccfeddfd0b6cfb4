"""Which sample keys are in which contribution: the loop's translation of the swarm's numbers into the source's samples."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from peer.contracts import LeaseLost, Source, SyncReport

log = logging.getLogger(__name__)


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
        if self._source:
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
        """They made the loss or a gradient infinite: not now again, perhaps later; given back when this peer leaves."""
        if self._source:
            self._aside.extend(keys)

    def register(self, number: int) -> str | None:
        """All samples still open are in contribution `number`: its receipt, '' without one.

        None when the source refuses it, because others may train them too.
        """
        if self._source is None:
            return ""
        self._contributions[number], self._open = self._open, []
        try:
            return self._source.register(number, self._contributions[number])
        except LeaseLost as loss:
            log.warning("withdrawing contribution=%d because it was refused: %s", number, loss)
            self.lost(self._take(number))
            return None

    def apply(self, report: SyncReport) -> None:
        """Do with our samples what became of their contributions."""
        if self._source is None:
            return
        for committed_round in report.final_rounds:
            self._source.report_final(committed_round)
        if report.proven:
            self._source.report_proofs(report.proven)
        for number in report.final:
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
