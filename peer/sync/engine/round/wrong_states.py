"""Which of our last states a proven wrong mean has made: shown to the dataset server, which discards it (docs/decisions/0031)."""

from collections import deque

from peer.sync.engine.state import State
from peer.sync.engine.transfer.download import Manifest
from swarm.proofs import Proofs
from swarm.wrong_states import WrongState, group_of

_KEPT = 16
"""Of our states, the newest: more than the server discards, for what is shown too late the host hears of."""


class WrongStates:
    """state: ours now."""

    def __init__(self, proofs: Proofs, state: State):
        self._proofs = proofs
        self._last: deque[tuple[str, Manifest]] = deque(maxlen=_KEPT)
        self.moved(state)

    def moved(self, state: State) -> None:
        """Our state is `state`, averaged, repeated or fetched. Its bytes are not kept."""
        if state.header.group:
            self._last.append((state.digest, Manifest(state.header, state.chunk_hashes)))

    def found(self) -> list[WrongState]:
        """Those of which somebody has proven it."""
        proofs = {group_of(proof): proof for proof in self._proofs.of_wrong_means} if self._last else {}
        made = [(proofs[state.header.group], digest, state) for digest, state in self._last if state.header.group in proofs]
        shown = [WrongState.of(proof, digest, state.header.json, state.chunk_hashes) for proof, digest, state in made]
        return [each for each in shown if each is not None]
