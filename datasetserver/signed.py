"""Whether a request that speaks in a peer's name was signed by that peer, lately, and comes for the first time."""

import math
import time
from collections.abc import Callable, Mapping
from itertools import takewhile

from datasetserver.answers import RefusedWith
from datasetserver.refused import Refused
from swarm.peer_key import check_statement
from swarm.signed_request import (
    CLOCK_DIFFERS,
    KEY_HEADER,
    SERVER_TIME_HEADER,
    SIGNATURE_HEADER,
    TIME_HEADER,
    WINDOW_SECONDS,
    statement,
)
from swarm.signing import BadSignature

MOST_REMEMBERED = 200_000
"""Signatures at a time, about 30 MB: 1,600 requests a second for two minutes."""
_SIGN = "Sign it with that peer's key, as docs/http.md describes; dd-peer of this version does."


def steady() -> Callable[[], float]:
    """UNIX seconds that only go forward: those of this call, and what has passed since.

    A wall clock that is put back by an hour would refuse each request for an hour, as signed before the start; or let copies of that hour in. A peer
    whose clock differs from this one is told so, and signs again.
    """
    ahead = time.time() - time.monotonic()
    return lambda: time.monotonic() + ahead


class Signatures:
    """clock: UNIX seconds, which never go back; None: `steady`. What was signed before this was made is refused, so that a restart forgets nothing that
    could be replayed.

    verify(peer, statement, key, signature) raises BadSignature.
    """

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        most: int = MOST_REMEMBERED,
        verify: Callable[[str, bytes, str, str], None] = check_statement,
    ):
        self._clock, self._most, self._verify = clock or steady(), most, verify
        self._since = self._clock()
        self._seen: dict[int, float] = {}

    def glance(self, headers: Mapping[str, str]) -> tuple[str, str, str]:
        """Key, time and signature, as they are said. Raises Refused (403) for a request that `check` would refuse whatever its body is."""
        key, at, signature = (headers.get(name, "") for name in (KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER))
        if not (key and at and signature):
            raise Refused(403, "signature_needed", "Nothing shows which peer makes this request.", _SIGN)
        self._refuse_old(at)
        return key, at, signature

    def check(self, peer: str, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Raises Refused: 403 where it is not `peer` that speaks, now, and 503 when more were seen than there is room for."""
        key, at, signature = self.glance(headers)
        said = statement(method, path, at, body)
        name = hash((peer, said))  # not the signature, which base64 can write in sixteen ways
        if name in self._seen:
            raise Refused(403, "replayed", "This very request came before.", "Sign it again.")
        try:
            self._verify(peer, said, key, signature)
        except BadSignature as error:
            raise Refused(403, "bad_signature", f"This request is not {peer}'s: {error}.", _SIGN) from None
        self._remember(name)

    def _refuse_old(self, at: str) -> None:
        now = self._clock()
        try:
            signed = float(at)
        except ValueError:
            signed = math.nan
        if not max(now - WINDOW_SECONDS, self._since) <= signed <= now + WINDOW_SECONDS:
            message = f"The request's time is {at[:32]}, and here it is {now:.3f}."
            raise RefusedWith(403, CLOCK_DIFFERS, message, "Sign it with the server's time.", {SERVER_TIME_HEADER: f"{now:.3f}"})

    def _remember(self, name: int) -> None:
        now = self._clock()
        for old in list(takewhile(lambda one: self._seen[one] + 2 * WINDOW_SECONDS < now, self._seen)):
            del self._seen[old]
        if len(self._seen) >= self._most:
            raise Refused(503, "busy", "The server remembers as many requests as it has room for.", "Try again later.")
        self._seen[name] = now
