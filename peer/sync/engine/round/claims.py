"""Where each live peer says that it stands: in its record, or in what it has told us since."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from peer.sync.engine.state import Head
from swarm.records import ASSIST, AVERAGING, JOINING, PAUSED, RENEW_SECONDS, PeerRecord


@dataclass(frozen=True)
class Claim:
    """A live peer's own word about where it stands."""

    peer: str
    head: Head
    votes: bool = True
    """False: it has only just come, or come back, and stands wherever it stood before."""
    backers: int = 1
    """How many live peers whom it has met stand with it, itself included."""
    leads: bool = True
    """Whether others can dial it: only such a peer leads a round."""
    stays: bool = True
    """False: it averages, and where it stands says nothing against the state that may come of that."""
    trains: bool = True
    """False: it assists, or its owner has paused it, and it begins no round where it stands."""


class Claims:
    """others: the live peers' records."""

    def __init__(self, others: Callable[[], Collection[PeerRecord]], clock: Callable[[], float]):
        self._others, self._clock = others, clock
        self._heard: dict[str, tuple[Head, float]] = {}
        self._told: dict[str, tuple[PeerRecord, Claim]] = {}
        """Of each live peer its record, and what that claims: a look comes some thirty times as often as a record."""
        self._known: tuple[Collection[PeerRecord], dict[str, tuple[Head, float]], float, list[Claim]] = (), {}, 0.0, []
        """All claims, of which records and words, and until when; in place only words are ever changed that are no news."""

    def heard(self, peer: str, head: Head) -> None:
        """`peer` itself has just told us where it stands; its record may be seconds old."""
        now, before = self._clock(), self._heard.get(peer, (head,))[0]
        if self._is_news(peer, head) or self._is_news(peer, before):
            self._heard = {**self._heard, peer: (head, now)}
        else:
            self._heard[peer] = head, now

    def _is_news(self, peer: str, head: Head) -> bool:
        """Whether its word that it stands at `head` counts in place of its record: of a hundred callers in a round few bring any."""
        known = self._told.get(peer)
        return known is None or head.samples > known[1].head.samples

    def all(self) -> list[Claim]:
        """One of each live peer, in the order of their records; the same list while nothing is new."""
        now, others = self._clock(), self._others()
        known, heard, until, claims = self._known
        if others is known and heard is self._heard and now < until:
            return claims
        told, claims = {}, []
        self._heard = {peer: entry for peer, entry in self._heard.items() if now - entry[1] < RENEW_SECONDS}
        for record in others:
            kept = self._told.get(record.peer_id)
            if kept is None or kept[0] is not record:
                kept = record, _claim_of(record)
            told[record.peer_id], claim = kept, kept[1]
            heard = self._heard.get(record.peer_id)
            if heard is not None and heard[0].samples > claim.head.samples:
                claim = replace(claim, head=heard[0])
            claims.append(claim)
        self._told = told
        self._known = others, self._heard, self.words_last_until(now), claims
        return claims

    def words_last_until(self, now: float) -> float:
        """When the first word is so old that the record counts again; inf where there is none."""
        return min([since + RENEW_SECONDS for _, since in self._heard.values() if now - since < RENEW_SECONDS], default=math.inf)


def _claim_of(record: PeerRecord) -> Claim:
    phase = record.phase
    trains = phase not in (ASSIST, PAUSED)
    return Claim(record.peer_id, head_of(record), phase != JOINING, record.backers, not record.client_mode, phase != AVERAGING, trains)


def head_of(record: PeerRecord) -> Head:
    return Head(record.digest, record.samples, tuple(record.parents))
