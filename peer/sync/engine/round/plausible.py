"""Whether a state that others signed can have come about: checked by its header, before a byte of its tensors is fetched."""

import time
from collections.abc import Callable

from peer.sync.engine.round.ending import Ending
from peer.sync.engine.round.heads import Heads
from peer.sync.engine.state import BadState, Head, Header, State
from peer.sync.engine.transfer.discarded import Discarded
from swarm.run_config import RunConfig

NUMBER_FILE = "contribution_number"
"""In a peer's folder: the number of the last contribution that it ever made."""
PEERS, SAMPLES_PER_SECOND = 1000, 1000.0
"""No swarm is larger, and no peer of a large one faster on average: an H100 trains some 20 images of SD 1.5 a second."""


class Plausible:
    """discarded: states that are never taken over. issued: the number of the last contribution that we ever made; None where that is not known."""

    def __init__(
        self,
        run: RunConfig,
        peer_id: str,
        state: State,
        heads: Heads,
        ending: Ending,
        discarded: Discarded,
        issued: int | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._target, self._peer_id, self._heads, self._ending = run.target_batch_size, peer_id, heads, ending
        self._discarded, self._issued, self._clock = discarded, issued, clock
        self._header, self._since = state.header, None
        """Of our state, and since when it has been: None where an earlier process, or nobody, made it."""

    def moved(self, state: State) -> None:
        """Our state is `state` from now on."""
        self._header, self._since = state.header, self._clock()

    def offered(self, number: int) -> None:
        """We offer our contribution `number`."""
        self._issued = max(number, self._issued or 0)

    def refusal(self, head: Head, header: Header) -> str:
        """Why a state with this header is not to be taken over as `head`; empty: nothing is against it."""
        if self._discarded.holds(head.digest, header.parents):
            return "it is, or descends from, a state that was discarded here (--discard_state)"
        try:
            header.check_bounds(self._target)
        except BadState as error:
            return str(error)
        return self._numbers(header) or self._growth(header) or self._ending.refusal(header) or self._heads.refusal(head, header)

    def _numbers(self, header: Header) -> str:
        number = header.included.get(self._peer_id, 0)
        if self._issued is None or number <= self._issued:
            return ""
        return (
            f"it holds contribution {number} of ours, and we have made {self._issued}: it is made up, or this folder an old copy "
            f"(then delete contribution_number in it)"
        )

    def _growth(self, header: Header) -> str:
        if self._since is None:
            return ""
        grown, seconds = header.samples - self._header.samples, self._clock() - self._since
        # What waited at all peers may come at once.
        most = PEERS * (2 * self._target + SAMPLES_PER_SECOND * seconds)
        return f"it has {grown} samples more than ours after {seconds:.0f} s, at most {most:.0f} are possible" if grown > most else ""
