"""Samples for a simulated trainer: each key is given once, and what became of it is noted."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from peer.contracts import Settlement

if TYPE_CHECKING:
    from simulation.machine import Machine


class Source:
    """As `contracts.Source`, as far as `Accounts` asks. `registered`: contribution number -> its keys."""

    def __init__(self, machine: "Machine"):
        self._machine = machine
        self.registered: dict[int, tuple[str, ...]] = {}
        self.acknowledged: set[str] = set()
        self.given_back: set[str] = set()
        self.drawn_since_boot = 0
        self._prefix = ""

    def boot(self, number: int) -> None:
        self.drawn_since_boot = 0
        self._prefix = f"{self._machine.short}.{number}"
        self.registered.clear()
        self.acknowledged.clear()
        self.given_back.clear()

    def draw(self, count: int) -> list[str]:
        keys = [f"{self._prefix}.{self.drawn_since_boot + index}" for index in range(count)]
        self.drawn_since_boot += count
        return keys

    def register(self, number: int, keys: Sequence[str]) -> None:
        self.registered[number] = tuple(keys)

    def settle(self, settlement: Settlement) -> None:
        """The server's matter."""

    def acknowledge(self, keys: Sequence[str]) -> None:
        self._once(keys)
        self.acknowledged.update(keys)

    def give_back(self, keys: Sequence[str]) -> None:
        self._once(keys)
        self.given_back.update(keys)

    def _once(self, keys: Sequence[str]) -> None:
        for key in keys:
            if key in self.acknowledged or key in self.given_back:
                self._machine.world.checks.breach(f"sample {key} was reported twice", self._machine)
