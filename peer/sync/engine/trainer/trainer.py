"""What the replica and the training process tell each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from peer.contracts import Member, Settlement
from peer.sync.engine.state import State
from swarm.errors import UserError

_STUCK_SECONDS = 5.0
"""A trainer that said nothing for so long beyond two of its steps does something else than steps."""


class Trainer(Protocol):
    """What the replica tells the training process; nothing here blocks."""

    def freeze(self) -> None: ...
    def train(self) -> None: ...
    def landed(self, state: State) -> None: ...
    def settled(self, settlements: list[Settlement]) -> None: ...
    def news(self, text: str) -> None: ...
    def extended(self, extension: Mapping[str, Any]) -> None: ...
    def done(self) -> None: ...
    def failed(self, error: UserError) -> None: ...


@dataclass
class Offer:
    """A frozen contribution: its bytes never change, whatever becomes of the attempts to average it."""

    member: Member
    encoded: Tensor | None
    """None: this peer assists, and brings nothing."""
    parent: str
    """The state that the trainer stood on when it offered this."""
    failures: int = 0
    next_attempt: float = 0.0


@dataclass
class Progress:
    """What the trainer last said of itself."""

    waiting: int = 0
    samples_per_second: float = 0.0
    step_seconds: float = 0.0
    share_lost: float = 0.0
    """Of its time, what it spent on rounds: waiting, freezing, landing."""
    loss: float | None = None
    waits: bool = False
    """For the swarm, instead of training at that speed."""
    paused: bool = False
    """By its owner."""

    def brings_samples(self, age_seconds: float) -> bool:
        """Whether samples are to be expected of a trainer that said this so long ago."""
        if age_seconds >= 2 * self.step_seconds + _STUCK_SECONDS:
            return False
        return self.waiting > 0 or (self.samples_per_second > 0 and not self.waits)
