"""Who may start: nobody starts again from the base model where a later state is known to exist, nor before the company it asks for."""

import time
from collections.abc import Callable, Collection

from peer.sync.engine.round.heads import head_of
from peer.sync.engine.state import Head, better
from peer.sync.engine.transfer.discarded import Discarded
from swarm.end import End
from swarm.errors import ExitCode, UserError
from swarm.records import ASSIST, JOINING, RECORD_LIFE_SECONDS, PeerRecord
from swarm.run_config import RunConfig

_JOIN_PATIENCE_SECONDS = 60.0
"""For so long a founder, and a peer with a state of its own, wait for a better state that somebody signs. Then they start from theirs."""
_HOLDER_PATIENCE_SECONDS = 120.0
"""A peer that has a state of its own, or discarded it, waits so long for the holder of a later one that nobody live has."""
_NAMED = 8


class Beginning:
    """last_known: the latest state that the server or the DHT knew of when we came; last_holders: the peers that had it.

    min_peers: how many that train must be live at once, we included, before we start; what becomes of them later does not matter.

    discarded: states that are never taken over. The latest known one is not waited for if it is one of them. Whether it descends from one
    may be known to nobody who is live: so who discards states waits for it no longer than a peer that has a state of its own.
    """

    def __init__(
        self,
        run: RunConfig,
        last_known: Head | None,
        last_holders: Collection[str],
        min_peers: int,
        clock: Callable[[], float] = time.monotonic,
        end: End | None = None,
        discarded: Discarded | None = None,
    ):
        self._end = end or End(run)
        self._discards = discarded is not None and bool(discarded.names)
        forged = last_known is not None and discarded is not None and discarded.holds(last_known.digest, last_known.parents)
        self._run, self._known, self._clock = run, None if forged else last_known, clock
        self._holders = ", ".join(peer[-6:] for peer in last_holders) or "unknown peers"
        self._min_peers, self._company = min_peers, min_peers <= 1
        self._began = clock()

    def again(self) -> None:
        """We were away, and have to look around as if we had just come."""
        self._began = self._clock()

    def may_start(
        self,
        ours: Head,
        *,
        own_round: int,
        fetching: bool,
        behind: bool,
        others: Collection[PeerRecord],
        news: Callable[[str], None],
        counts: Callable[[str], bool] = lambda peer: True,
    ) -> bool:
        """Whether we may train from our state `ours`; `news` is told why not. Raises UserError when the run is over.

        behind: whether another state is right (heads.py). counts: whether a peer that signs a later one may still give it to us (promises.py).
        """
        if not self._in_company(others, news):
            return False
        waited = self._clock() - self._began
        if fetching or (behind and waited < _JOIN_PATIENCE_SECONDS):
            return False
        others = [record for record in others if not better(head_of(record), ours) or counts(record.peer_id)]
        holders = sorted(record.peer_id[-6:] for record in others if record.round and better(head_of(record), ours))
        if not own_round and holders:
            news(f"waiting for the run's state, which this peer does not begin anew while others hold it: {', '.join(holders[:_NAMED])}")
            return False
        known = self._known
        running = any(record.phase not in (JOINING, ASSIST) and record.round for record in others)
        if known is None or not known.samples or not better(known, ours) or running:
            return True
        if (own_round or self._discards) and waited >= _HOLDER_PATIENCE_SECONDS:
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
