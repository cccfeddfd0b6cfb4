"""What the sources have in common whose samples no ledger counts."""

from collections import deque
from collections.abc import Callable, Sequence

from peer.contracts import CommittedRound, Sample
from swarm.wrong_states import Accusation


class Alone:
    """Nobody else trains on these data, or it is said elsewhere who has which of them: there is no ledger to tell."""

    def __init__(self) -> None:
        self._again: deque[str] = deque()
        """Keys of samples that were given back: they come first."""
        self._reading = ""
        """Key of the sample that is being read, which may take seconds from a slow disk or the network; '' when none is."""
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
        """A key that is already to come again comes once: a checkpoint may name a sample both as being read and as drawn."""
        self._again = deque(dict.fromkeys([*keys, *self._again]))

    def _read_as(self, key: str, read: Callable[[str], Sample]) -> Sample:
        """The sample of that key, which a checkpoint that is made meanwhile still counts as to come."""
        self._reading = key
        sample = read(key)
        self._reading = ""
        return sample

    def _to_come_again(self) -> list[str]:
        """For a checkpoint: keys of the sample that is being read, and of those that were given back."""
        reading = self._reading  # the thread that reads may clear it meanwhile
        return [*([reading] if reading else []), *self._again]

    def close(self) -> None:
        self._closed = True
