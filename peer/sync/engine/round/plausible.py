"""Whether a state that others signed can have come about: checked by its header, before a byte of its tensors is fetched."""

from peer.sync.engine.cell import Cell
from peer.sync.engine.round.ending import Ending
from peer.sync.engine.round.heads import Heads
from peer.sync.engine.state import BadState, Head, Header, State
from peer.sync.engine.trainer.trainer import Trainer
from peer.sync.engine.transfer.discarded import Discarded
from swarm.run_config import RunConfig

NUMBER_FILE = "contribution_number"
"""In a peer's folder: the number of the last contribution that it ever made."""
PEERS, SAMPLES_PER_SECOND = 1000, 1000.0
"""No swarm is larger, and no peer of a large one faster on average: an H100 trains some 20 images of SD 1.5 a second."""


class Plausible:
    """discarded: states that are never taken over."""

    def __init__(
        self,
        run: RunConfig,
        peer_id: str,
        state: Cell[State],
        trainer: Trainer,
        heads: Heads,
        ending: Ending,
        discarded: Discarded,
    ):
        self._target, self._peer_id, self._state, self._trainer = run.target_batch_size, peer_id, state, trainer
        self._heads, self._ending, self._discarded = heads, ending, discarded

    def refusal(self, head: Head, header: Header) -> str:
        """Why a state with this header is not to be taken over as `head`; empty: nothing is against it."""
        if self._discarded.holds(head.digest, header):
            return "it is, or descends from, a state that the host or --discard_state has discarded"
        try:
            header.check_bounds(self._target)
        except BadState as error:
            return str(error)
        return self._numbers(header) or self._growth(header) or self._ending.refusal(header) or self._heads.refusal(head, header)

    def _numbers(self, header: Header) -> str:
        number, issued = header.included.get(self._peer_id, 0), self._trainer.issued
        if issued is None or number <= issued:
            return ""
        return (
            f"it holds contribution {number} of ours, and we have made {issued}: it is made up, or this folder an old copy "
            f"(then delete contribution_number in it)"
        )

    def _growth(self, header: Header) -> str:
        if not self._state.changes:
            return ""  # an earlier process, or nobody, made our state: how long ago is not known
        grown, seconds = header.samples - self._state.value.header.samples, self._state.age_seconds
        # What waited at all peers may come at once.
        most = PEERS * (2 * self._target + SAMPLES_PER_SECOND * seconds)
        return f"it has {grown} samples more than ours after {seconds:.0f} s, at most {most:.0f} are possible" if grown > most else ""
