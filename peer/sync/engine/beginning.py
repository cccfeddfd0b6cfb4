"""Who may start: nobody starts again from the base model where a later state is known to exist, nor before the company it asks for."""

import time
from collections.abc import Callable, Collection

from peer.sync.engine.state import Head, better
from swarm.end import End
from swarm.errors import ExitCode, UserError
from swarm.records import ASSIST, JOINING, RECORD_LIFE_SECONDS, PeerRecord
from swarm.run_config import RunConfig

_JOIN_PATIENCE_SECONDS = 60.0
"""A newcomer waits so long for a better state that somebody signs, before it starts from its own."""
_HOLDER_PATIENCE_SECONDS = 120.0
"""A peer that has a state of its own waits so long for the holder of a later one that nobody live has."""


class Beginning:
    """last_known: the latest state that the server or the DHT knew of when we came; last_holders: the peers that had it.

    min_peers: how many that train must be live at once, we included, before we start; what becomes of them later does not matter.
    """

    def __init__(
        self,
        run: RunConfig,
        last_known: Head | None,
        last_holders: Collection[str],
        min_peers: int,
        clock: Callable[[], float] = time.monotonic,
        end: End | None = None,
    ):
        self._end = end or End(run)
        self._run, self._known, self._clock = run, last_known, clock
        self._holders = ", ".join(peer[-6:] for peer in last_holders) or "unknown peers"
        self._min_peers, self._company = min_peers, min_peers <= 1
        self._began = clock()

    def may_start(self, ours: Head, *, own_round: int, fetching: bool, others: Collection[PeerRecord], news: Callable[[str], None]) -> bool:
        """Whether we may train from our state `ours`; `news` is told why not. Raises UserError when the run is over."""
        if not self._in_company(others, news):
            return False
        waited = self._clock() - self._began
        if fetching or (waited < _JOIN_PATIENCE_SECONDS and any(better(head_of(record), ours) for record in others)):
            return False
        known = self._known
        running = any(record.phase not in (JOINING, ASSIST) and record.round for record in others)
        if known is None or not known.samples or not better(known, ours) or running:
            return True
        if own_round and waited >= _HOLDER_PATIENCE_SECONDS:
            news(f"nobody has brought the state {known.digest[:8]} at {known.samples} samples; going on from {ours.samples}")
            return True
        if 0 < self._end.total <= known.samples and waited >= RECORD_LIFE_SECONDS:
            raise UserError(
                f"The run '{self._run.run_name}' is over: all {known.samples} samples are in its last state, and no peer is left.",
                fix=f"Ask the host for the result, or one of the peers that had it: {self._holders}.",
                code=ExitCode.FAILED,
            )
        news(
            f"the run is at {known.samples} samples (state {known.digest[:8]}), this peer at {ours.samples}; "
            f"waiting for one who has that state: {self._holders}"
        )
        return False

    def _in_company(self, others: Collection[PeerRecord], news: Callable[[str], None]) -> bool:
        live = 1 + sum(record.phase != ASSIST for record in others)
        if not self._company and live >= self._min_peers:
            self._company = True
            news(f"{live} peers are live; starting")
        if not self._company:
            news(f"waiting for company: {live} of {self._min_peers} peers are live (--min_peers)")
        return self._company


def head_of(record: PeerRecord) -> Head:
    return Head(record.digest, record.samples)
