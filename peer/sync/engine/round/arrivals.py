"""How long after its word each peer came, in former rounds: what a leader grants it in the next."""

import statistics
from collections import deque

UNKNOWN_SECONDS = 10.0
"""Granted to a peer that was never seen to come."""
_SLACK_SECONDS = 1.0
_LONGEST_SECONDS = 120.0
_MISSED_SHARE = 0.7
_REMEMBERED_ROUNDS, _REMEMBERED_PEERS = 8, 1024


class Arrivals:
    def __init__(self) -> None:
        self._late: dict[str, deque[float]] = {}

    def came(self, peer: str, late_seconds: float) -> None:
        """`peer` came `late_seconds` after it had said it would be ready."""
        seen = self._late.pop(peer, None) or deque(maxlen=_REMEMBERED_ROUNDS)
        seen.append(max(late_seconds, 0.0))
        self._late[peer] = seen
        while len(self._late) > _REMEMBERED_PEERS:
            del self._late[next(iter(self._late))]

    def missed(self, peer: str) -> None:
        """What `peer` was granted was not enough: the next time it is granted more, half as much again at first."""
        self.came(peer, _MISSED_SHARE * self.grant(peer))

    def grant(self, peer: str) -> float:
        """Seconds to wait for `peer` beyond the time at which it says it will be ready: twice the median lateness, and a second."""
        seen = self._late.get(peer)
        if not seen:
            return UNKNOWN_SECONDS
        return min(_SLACK_SECONDS + 2 * statistics.median(seen), _LONGEST_SECONDS)
