"""Which states have been safe long enough to be reported: a committed round may still be lost until then."""

from collections import deque
from collections.abc import Collection

from peer.contracts import Settlement
from peer.sync.engine.state import State


class Settling:
    """The states of our lineage that nobody was told of yet, oldest first.

    A state read from disk, or fetched, may never have been reported by those who made it; reporting twice does no harm.
    """

    def __init__(self, state: State):
        self.waiting = _settlements(state)
        self._told: deque[str] = deque(maxlen=64)

    def moved(self, before: State, state: State) -> None:
        """Our state was `before` and is `state`; what is not an ancestor of it any more is forgotten."""
        kept = self.waiting if before.digest in state.header.parents else []
        known = {*self._told, *(settlement.digest for settlement in kept)}
        self.waiting = kept + [settlement for settlement in _settlements(state) if settlement.digest not in known]

    def take(self, safe: Collection[str]) -> list[Settlement]:
        """Those that are settled now that the digests `safe` are: a safe state's ancestors are in it."""
        newest = max((index for index, settlement in enumerate(self.waiting) if settlement.digest in safe), default=-1)
        settled, self.waiting = self.waiting[: newest + 1], self.waiting[newest + 1 :]
        self._told.extend(settlement.digest for settlement in settled)
        return settled


def _settlements(state: State) -> list[Settlement]:
    own = [state.header.settlement(state.digest)] if state.header.round else []
    return [*reversed(state.header.ancestors), *own]
