"""Whether this machine's clock is that of the others: records of the DHT live by it, for seconds."""

import logging
import statistics
from collections.abc import Sequence

from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)

WARN_SECONDS = 2.0
REFUSED_SECONDS = 3.0
"""hivemind lets nobody join whose clock differs by more (MAX_DHT_TIME_DISCREPANCY_SECONDS)."""
WARN_IN_SWARM_SECONDS = 5.0
_NEWS_SECONDS = 10.0
"""A record may be so old when it is read for the first time: renewed every 5 s, and looked for as often."""
FIX = "Set the clock: `timedatectl set-ntp true`, or chrony; in a container or WSL2, that of the host."


def clock_error(theirs: float, asked: float, answered: float) -> float:
    """Seconds by which our clock is at least behind (ahead: negative) of one that said `theirs` between `asked` and `answered`; 0: may be right."""
    return max(theirs - answered, 0.0) + min(theirs - asked, 0.0)


def words(error: float) -> str:
    return f"{abs(error):.1f} s {'behind' if error > 0 else 'ahead of'}"


def check_clock(error: float, whose: str, *, refuse: bool) -> None:
    """Warn of a clock that is off; refuse: raise UserError where the swarm would not let this peer in."""
    if refuse and abs(error) > REFUSED_SECONDS:
        raise UserError(
            f"This machine's clock is {words(error)} that of {whose}; the swarm refuses more than {REFUSED_SECONDS:.0f} s.",
            fix=FIX,
            code=ExitCode.CLOCK,
        )
    if abs(error) > WARN_SECONDS:
        log.warning("this machine's clock is %s that of %s; beyond %.0f s no peer joins. %s", words(error), whose, REFUSED_SECONDS, FIX)


class SwarmClock:
    """Our clock as the records of others show it: each says when it was signed, and is seen first some seconds later."""

    def __init__(self) -> None:
        self._warned = False

    def look(self, signed: Sequence[float], now: float) -> str:
        """A warning, once, when most peers' clocks differ from ours; signed: of the records seen now for the first time, one of each peer."""
        if not signed:
            return ""
        differences = [time - now for time in signed]
        if not self._warned and max(differences) <= WARN_IN_SWARM_SECONDS and min(differences) >= -_NEWS_SECONDS - WARN_IN_SWARM_SECONDS:
            return ""  # so is the median
        error = statistics.median(max(difference, 0.0) or min(difference + _NEWS_SECONDS, 0.0) for difference in differences)
        if abs(error) <= WARN_IN_SWARM_SECONDS:
            self._warned = self._warned and abs(error) > WARN_IN_SWARM_SECONDS / 2
            return ""
        if self._warned:
            return ""
        self._warned = True
        return f"this machine's clock is {words(error)} that of {len(signed)} peers: what we publish may be refused. {FIX}"
