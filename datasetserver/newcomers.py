"""Limits how many new peers one owner brings into a run for members. Ids cost nothing, and each member counts."""

import time
from collections import Counter
from collections.abc import Callable

from datasetserver.refused import Refused

MOST_OF_AN_OWNER = 64
"""New peers a day for one token, or one address of an --open server: enough for a laboratory behind one router, too few for a crowd of 1,000."""
_DAY_SECONDS = 86_400.0
_MOST = 20_000


class Newcomers:
    """The peers let in within the last day, the oldest first. A restart forgets them. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = _MOST):
        self._clock, self._most = clock, most
        self._let_in: dict[tuple[str, str], float] = {}
        self._of: Counter[str] = Counter()

    def let_in(self, owner: str, peer: str) -> None:
        """Count `peer`; owner: as `Owners` names it. Raises Refused: 429 for one peer too many, 503 when there is no room."""
        self._sweep()
        if (owner, peer) in self._let_in:
            return
        if self._of[owner] >= MOST_OF_AN_OWNER:
            message = f"{MOST_OF_AN_OWNER} peers of one owner came within a day."
            raise Refused(429, "too_many_members", message, "Come back tomorrow, or with another token.")
        if len(self._let_in) >= self._most:
            raise Refused(503, "busy", "The server has let in as many peers as it has room for.", "Try again later.")
        self._let_in[owner, peer] = self._clock()
        self._of[owner] += 1

    def _sweep(self) -> None:
        while self._let_in:
            (owner, _), since = next(iter(self._let_in.items()))
            if since + _DAY_SECONDS >= self._clock():
                return
            del self._let_in[next(iter(self._let_in))]
            self._of[owner] -= 1
            if not self._of[owner]:
                del self._of[owner]
