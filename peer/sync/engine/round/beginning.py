"""Who may start: nobody starts again from the base model where a later state is known to exist, nor before the company it asks for."""

import time
from collections.abc import Callable, Collection

from peer.sync.engine.round.claims import head_of
from peer.sync.engine.state import Head, better
from swarm.end import End
from swarm.errors import ExitCode, UserError
from swarm.records import ASSIST, JOINING, RECORD_LIFE_SECONDS, PeerRecord
from swarm.run_config import RunConfig

_JOIN_PATIENCE_SECONDS = 60.0
"""How long a founder, and a peer with a state of its own, wait for a better state that somebody signs. Then they start from theirs."""
_HOLDER_PATIENCE_SECONDS = 120.0
"""How long a peer that has a state of its own, or had one that is discarded, waits for a holder of the latest known state, if none is live."""
_NAMED = 8


class Beginning:
    """last_known: the latest state that the server or the DHT knew of when we came; last_holders: the peers that had it.

    min_peers: how many that train must be live at once, we included, before we start, unless we have a state of the run; what becomes of them
    later does not matter.

    discards: whether the state of a digest is discarded; nobody waits for it. forsaken: whether we had such a state. The latest known one may descend from it, which nobody who is live may know: so we
    wait for it no longer than if we had a state of our own.
    """

    def __init__(
        self,
        run: RunConfig,
        last_known: Head | None,
        last_holders: Collection[str],
        min_peers: int,
        clock: Callable[[], float] = time.monotonic,
        end: End | None = None,
        discards: Callable[[str], bool] = lambda digest: False,
        forsaken: bool = False,
    ):
        self._end, self._discards, self._forsaken = end or End(run), discards, forsaken
        self._run, self._known, self._clock = run, last_known, clock
        self._holders = last_holders
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
        waited, known = self._clock() - self._began, self._known
        givers = [record for record in others if not better(head_of(record), ours) or counts(record.peer_id)]
        running = any(record.phase not in (JOINING, ASSIST) and record.round for record in givers)
        lacks_known = known is not None and known.samples > 0 and better(known, ours) and not running and not self._discards(known.digest)
        holders = sorted(record.peer_id[-6:] for record in givers if record.round and better(head_of(record), ours))
        coming = fetching or (behind and waited < _JOIN_PATIENCE_SECONDS) or (holders and not own_round)
        company = self._in_company(own_round, others, news)
        goes_on = self._forsaken and company  # without the known state, which may descend from the discarded one
        patience = _HOLDER_PATIENCE_SECONDS if self._forsaken else RECORD_LIFE_SECONDS
        if lacks_known and not coming and not goes_on and waited >= patience:
            refuse_when_over(self._run, self._end, known, self._holders)
        if not company:
            return False
        if fetching or (behind and waited < _JOIN_PATIENCE_SECONDS):
            return False
        if not own_round and holders:
            news(f"waiting for the run's state, which this peer does not begin again while others hold it: {', '.join(holders[:_NAMED])}")
            return False
        if not lacks_known:
            return True
        if (own_round or self._forsaken) and waited >= _HOLDER_PATIENCE_SECONDS:
            news(f"nobody has brought the state {known.digest[:8]} at {known.samples} samples; going on from {ours.samples}")
            return True
        news(
            f"the run is at {known.samples} samples (state {known.digest[:8]}), this peer at {ours.samples}; "
            f"waiting for one who has that state: {_named(self._holders)}"
        )
        return False

    def _in_company(self, own_round: int, others: Collection[PeerRecord], news: Callable[[str], None]) -> bool:
        live = 1 + sum(record.phase != ASSIST for record in others)
        if own_round:  # the last peer of a run may be started again, and nobody may come any more
            self._company = True
        if not self._company and live >= self._min_peers:
            self._company = True
            news(f"{live} peers are live; starting")
        if not self._company:
            news(f"waiting for company: {live} of {self._min_peers} peers are live (--min_peers)")
        return self._company


def refuse_when_over(run: RunConfig, end: End, known: Head, holders: Collection[str]) -> None:
    """Raise UserError if the state `known`, which nobody is left to give, is the run's last one. holders: who had it."""
    if 0 < end.total <= known.samples:
        raise UserError(
            f"The run '{run.run_name}' is over: all {known.samples} samples are in its last state, and no peer that has it is left.",
            fix=f"Ask the host for the result, or one of the peers that had it: {_named(holders)}.",
            code=ExitCode.OVER,
        )


def _named(holders: Collection[str]) -> str:
    return ", ".join(peer[-6:] for peer in holders) or "unknown peers"
