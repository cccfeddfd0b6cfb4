"""How slow a download may be: its two ends, and the whole of it. Slower is given up, and somebody else is asked."""

from collections.abc import Callable

from peer.sync.engine.net.streams import PeerLost

SLOWEST_BYTES_PER_SECOND = 26_000
"""What a download gets at least, from all its holders together: 0.2 Mbit/s. With somebody else to ask instead: from each of them."""
FETCH_SECONDS = 120.0
FETCH_BYTES_PER_SECOND = 125_000
"""A state is fetched within FETCH_SECONDS and its bytes at this rate: 1 Mbit/s, without which no peer can average either (reduction.py)."""
CONTESTED_BYTES_PER_SECOND = 1_250_000
"""The same rate while peers that have no part in the download offer another state: 10 Mbit/s, so that theirs has its turn."""


class Slow(PeerLost):
    """The other end gives or takes, but less than the stated rate."""


class Credit:
    """The time that an end of a download has left. It passes while we wait for that end; each byte earns some, at `rate` bytes a second."""

    def __init__(self, clock: Callable[[], float], rate: float, first: float, most: float):
        """first: seconds to begin with; most: that can be saved up by having been faster."""
        self._clock, self._rate, self._most = clock, rate, most
        self._left, self._since = first, None

    @property
    def seconds(self) -> float:
        """Below 0: it was slower than it may be for too long."""
        return self._left - (0.0 if self._since is None else self._clock() - self._since)

    def wait(self) -> None:
        """From now on it is the other end that keeps us waiting."""
        self._left, self._since = self.seconds, self._clock()

    def rest(self) -> None:
        """From now on it is not."""
        self._left, self._since = self.seconds, None

    def moved(self, num_bytes: int, share: int = 1) -> None:
        """`num_bytes` have come or gone. share: how many such ends have to reach the rate together."""
        self._left = min(self._left + num_bytes * share / self._rate, self._most + self._left - self.seconds)


def fetch_seconds(num_bytes: int, contested: bool) -> float:
    """How long fetching a state of `num_bytes` may take."""
    return FETCH_SECONDS + num_bytes / (CONTESTED_BYTES_PER_SECOND if contested else FETCH_BYTES_PER_SECOND)
