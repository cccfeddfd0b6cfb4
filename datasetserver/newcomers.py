"""Limits how many peers one owner has in a run for members. Ids cost nothing, and each member counts."""

import time
from collections import Counter
from collections.abc import Callable

from datasetserver.refused import Refused

MOST_OF_AN_OWNER = 64
"""Peers of one token, or of one address of an --open server: enough for a laboratory behind one router, too few for a crowd of 1,000."""
_REMEMBERED_SECONDS = 2 * 86_400.0
"""Peers renew their membership every day; one that has not done so for two is gone, and makes room for another."""
_MOST = 20_000


class Newcomers:
    """The peers let in within the last two days, in the order of their last request. A restart forgets them. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = _MOST):
        self._clock, self._most = clock, most
        self._let_in: dict[tuple[str, str], float] = {}
        self._of: Counter[str] = Counter()

    def let_in(self, owner: str, peer: str, most: int = MOST_OF_AN_OWNER) -> None:
        """Count `peer`; owner: as `Owners` names it; most: of its peers. Raises Refused: 403 for one peer too many, 503 when there is no room."""
        self._sweep()
        if self._let_in.pop((owner, peer), None) is not None:
            self._let_in[owner, peer] = self._clock()
            return
        if self._of[owner] >= most:
            message = f"One owner has {most} peer{'s' if most > 1 else ''} in this run, and no more are let in."
            fix = "Start with the --output_dir of before, come back two days after a peer has left, or ask the host for another line."
            raise Refused(403, "too_many_members", message, fix)
        if len(self._let_in) >= self._most:
            raise Refused(503, "busy", "The server has let in as many peers as it has room for.", "Try again later.")
        self._let_in[owner, peer] = self._clock()
        self._of[owner] += 1

    def _sweep(self) -> None:
        while self._let_in:
            (owner, _), since = next(iter(self._let_in.items()))
            if since + _REMEMBERED_SECONDS >= self._clock():
                return
            del self._let_in[next(iter(self._let_in))]
            self._of[owner] -= 1
            if not self._of[owner]:
                del self._of[owner]
