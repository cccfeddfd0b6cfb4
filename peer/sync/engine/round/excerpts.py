"""What some members sent for our share of a round, kept for who measures what it does to the loss (peer/audit).

A reducer sees all that a member brings for its own share, and nothing of the rest. What it keeps is one copy of that for each member drawn,
beside the mean; nobody else takes part, and nobody is told.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from peer.contracts import Member
from peer.sync.engine.codec import Part
from peer.sync.engine.round.groups import Group
from swarm.records import Finding


class Excerpts:
    """parts: those of our share, at least one, which follow each other; of: member -> their encoded bytes, as they came, before any clipping."""

    def __init__(self, parts: Sequence[Part], draw: Callable[[int], Collection[str]]):
        """draw: of whom to keep them, told their bytes."""
        self.parts, self._begin = tuple(parts), parts[0].begin
        num_bytes = parts[-1].stop - self._begin
        self.of: dict[str, Tensor] = {peer: torch.empty(num_bytes, dtype=torch.uint8) for peer in draw(num_bytes)}

    def keep(self, peer: str, index: int, data: Tensor) -> None:
        """One encoded part of our share, of a member that was drawn or not; index: within the share."""
        if peer in self.of:
            part = self.parts[index]
            self.of[peer][part.begin - self._begin : part.stop - self._begin].copy_(data)


class Auditor(Protocol):
    """Measures beside the rounds. Its methods are called within them, so they return at once."""

    def draw(self, members: Sequence[Member], num_bytes: int) -> Collection[str]:
        """Whose excerpts to keep, of `num_bytes` each, of a group that begins to average."""
        ...

    def averaged(self, round: int, group: Group, excerpts: Excerpts) -> None:
        """Round number `round` is made, of `group`."""
        ...

    def findings(self) -> Sequence[Finding]:
        """For our record, the most important first."""
        ...

class NoAuditor:
    """Of a peer that audits nobody."""

    def draw(self, members: Sequence[Member], num_bytes: int) -> Collection[str]:
        return ()

    def averaged(self, round: int, group: Group, excerpts: Excerpts) -> None:
        pass

    def findings(self) -> Sequence[Finding]:
        return ()

