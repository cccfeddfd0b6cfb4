"""What the sources have in common whose samples no ledger counts."""

from collections import deque
from collections.abc import Sequence

from peer.contracts import CommittedRound
from swarm.wrong_states import Accusation


class Alone:
    """Nobody else trains on these data, or it is said elsewhere who has which of them: there is no ledger to tell."""

    def __init__(self) -> None:
        self._again: deque[str] = deque()
        """Keys of samples that were given back: they come first."""
        self._closed = False

    def register(self, number: int, keys: Sequence[str]) -> str:
        return ""

    def report_final(self, committed_round: CommittedRound) -> None:
        return None

    def report_proofs(self, accusations: Sequence[Accusation]) -> None:
        return None

    def acknowledge(self, keys: Sequence[str]) -> None:
        """An epoch yields every sample once anyway."""

    def rest(self, resting: bool) -> None:
        """Nobody else waits for these samples."""

    def give_back(self, keys: Sequence[str]) -> None:
        self._again.extendleft(reversed(keys))

    def close(self) -> None:
        self._closed = True
