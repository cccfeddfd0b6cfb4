"""Which states have been safe long enough to be reported: a committed round may still be lost until then."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from peer.contracts import CommittedRound
from peer.sync.engine.state import ELDER_CHARACTERS, State
from swarm.records import PeerRecord

FINAL_SECONDS = 120.0
"""After this long on disk and on our lineage a state is final, even if a live peer signs another one. That peer may never follow."""


def safe(
    waiting: Iterable[str], others: Sequence[PeerRecord], met: Collection[str], is_on_disk: Callable[[str, float], bool]
) -> set[str]:
    """Those of the digests `waiting` that our disk has, and that nobody's branch will overtake: another peer, met if any is, stands on them
    or their descendants; or there is nobody else; or the disk has had them for FINAL_SECONDS.

    Others' word alone is not enough: who lies signs a state that it does not have. is_on_disk: a digest, and for how many seconds at least.
    """
    others = [record for record in others if record.peer_id in met] or others
    signed = {digest for record in others for digest in (record.digest, *record.parents)}
    return {digest for digest in waiting if is_on_disk(digest, 0.0 if digest in signed or not others else FINAL_SECONDS)}


class Finality:
    """The states of our lineage that nobody was told of yet, oldest first.

    A state read from disk, or fetched, may never have been reported by those who made it; reporting twice does no harm. earlier: the rounds
    before those that the header of `state` names, oldest first.
    """

    def __init__(self, state: State, earlier: Iterable[CommittedRound] = ()):
        self.waiting = [*earlier, *_committed_rounds(state)]
        self._told: deque[str] = deque(maxlen=64)

    def moved(self, state: State) -> None:
        """Our state is `state`; what is not an ancestor of it is forgotten."""
        line = {digest[:ELDER_CHARACTERS] for digest in (state.digest, *state.header.past())}
        kept = [committed_round for committed_round in self.waiting if committed_round.digest[:ELDER_CHARACTERS] in line]
        known = {*self._told, *(committed_round.digest for committed_round in kept)}
        self.waiting = kept + [committed_round for committed_round in _committed_rounds(state) if committed_round.digest not in known]

    def take(self, safe: Collection[str]) -> list[CommittedRound]:
        """Those that are final now that the digests `safe` are: a safe state's ancestors are in it."""
        newest = max((index for index, committed_round in enumerate(self.waiting) if committed_round.digest in safe), default=-1)
        final, self.waiting = self.waiting[: newest + 1], self.waiting[newest + 1 :]
        self._told.extend(committed_round.digest for committed_round in final)
        return final


def _committed_rounds(state: State) -> list[CommittedRound]:
    own = [state.header.committed_round(state.digest)] if state.header.round else []
    return [*reversed(state.header.ancestors), *own]
