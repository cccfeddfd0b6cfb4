"""Whom we average with gladly: who is a stranger, who has answered us, and who is left out for what it cost us.

What each peer saw itself counts. A reducer's word about another member is hearsay: believed of a peer we have met about a stranger,
never the other way round; between equals the two simply do not share a group for a while (`at_odds`), and neither is banned by it.
Nothing here is for good: honest peers die, lose streams and are slow, and must be back soon.
"""

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from peer.sync.engine.round.groups import rank
from swarm.records import PeerRecord

log = logging.getLogger(__name__)

MOST_STRANGERS = 4
"""Counted at a time, of those we have not met: invented identities cost nothing, honest newcomers come a few at a time."""
_STRANGERS_FIRST, _STEP, _LONGEST, _LONGEST_OF_THE_SLOW = 4, 2, 8, 6
"""Exponents: the first offence of a peer that we have met costs it 1 round, then 4, 16 .. 256; that of a stranger 16 at once. A stranger
whose every offence costs 5 s takes four times that of the first three minutes of rounds of half a second. Who is only slow, as newcomers on
busy machines are, is tried again after 64 rounds: it costs 2 s of these."""
_ROUND_SECONDS = 2.0
"""A round that takes longer than this ends an exclusion sooner: what an offence costs is small beside a long round."""
_GOOD_ROUNDS = 16
"""Averaged together, they take one offence back. Fewer, and a peer could spoil every other round for ever."""
_REMEMBERED = 1024
_ACCUSATION_SECONDS = 600.0
_MOST_ACCUSED = 3
"""Of its like, by one peer in that time. One that is honest keeps away from the first; seldom are three more at fault."""


@dataclass
class _Conduct:
    offences: int = 0
    good_rounds: int = 0
    until_round: int = 0
    until: float = 0.0


class Company:
    """met: the peers that we have averaged with; round_: our state's number; trusted: whom the host trusts to lead and reduce."""

    def __init__(
        self,
        met: Collection[str] = frozenset(),
        round_: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
        me: str = "",
        trusted: Callable[[], Container[str]] = frozenset,
    ):
        self._met, self._round, self._clock, self._me, self._trusted = met, round_, clock, me, trusted
        self._conduct: dict[str, _Conduct] = {}
        self._answered: dict[str, bool] = {}
        self._averaged: dict[str, None] = {}
        """Who was in a round that worked, from that moment on: that we have met it is written once the round is ours."""
        self._accusations: dict[tuple[str, str], float] = {}

    # ---------------------------------------------------------------- strangers

    def is_stranger(self, peer: str) -> bool:
        """Who has met nobody yet, as founders and newcomers have, takes all for friends: it has nothing else to go by."""
        known = peer in self._met or peer in self._averaged or peer == self._me
        return not known and len(self._met) > 0 and peer not in self._trusted()

    def answered(self, peer: str) -> None:
        """`peer` called us, or answered our call."""
        _put(self._answered, peer, True)

    def did_not_answer(self, peer: str) -> None:
        _put(self._answered, peer, False)

    def has_answered(self, peer: str) -> bool:
        return self._answered.get(peer, False)

    def counted(self, records: Sequence[PeerRecord]) -> Sequence[PeerRecord]:
        """Those of `records`, the longest seen first, that are waited for and whose samples count: of strangers at most four.

        A stranger counts once it has answered. As long as no peer that we have met is among them, it counts until it fails to.
        """
        strangers = [record.peer_id for record in records if record.peer_id not in self._met and self.is_stranger(record.peer_id)]
        if not strangers:  # asked 170 times a round of 8 peers
            return records
        found_friends = len(strangers) < len(records)
        first = [peer for peer in strangers if self._answered.get(peer, not found_friends)][:MOST_STRANGERS]
        passed_over = set(strangers).difference(first)
        return [record for record in records if record.peer_id not in passed_over]

    def untried(self, records: Iterable[PeerRecord]) -> list[PeerRecord]:
        """Strangers to be called for the first time: a few with each attempt, which does not wait for them."""
        return [r for r in records if self.is_stranger(r.peer_id) and r.peer_id not in self._answered][:MOST_STRANGERS]

    # ---------------------------------------------------------------- offences

    def left_out(self, peer: str) -> bool:
        conduct = self._conduct.get(peer)
        return conduct is not None and self._round() < conduct.until_round and self._clock() < conduct.until

    def offences(self, peer: str) -> int:
        return self._conduct[peer].offences if peer in self._conduct else 0

    def all_left_out(self) -> list[str]:
        return [peer for peer in self._conduct if self.left_out(peer)] if self._conduct else []

    def blame(self, peers: Iterable[str], slow: Container[str] = ()) -> None:
        """They cost us an attempt, or time: left out for 2^k of our rounds, or 2 s for each of these, whichever is over first.

        slow: those of them that came too late, or went away without a word, as peers do on a busy machine or a bad link: k is small at
        first even for a stranger.
        """
        for peer in peers:
            if peer != self._me:
                means_harm = self.is_stranger(peer) and peer not in slow
                self._offence(peer, _STRANGERS_FIRST if means_harm else 0, _LONGEST_OF_THE_SLOW if peer in slow else _LONGEST)

    def _offence(self, peer: str, first: int, longest: int = _LONGEST) -> None:
        conduct = self._conduct.get(peer) or _Conduct()
        rounds = 2 ** min(first + _STEP * conduct.offences, longest)
        conduct.until_round, conduct.until = self._round() + rounds, self._clock() + _ROUND_SECONDS * rounds
        conduct.offences, conduct.good_rounds = conduct.offences + 1, 0
        log.info("leaving out %s for %d rounds or %.0f s: its offence %d", peer[-6:], rounds, _ROUND_SECONDS * rounds, conduct.offences)
        _put(self._conduct, peer, conduct)

    def told(self, accuser: str, accused: Collection[str], *, hearsay: bool = False) -> bool:
        """`accuser`, whose share of a round failed, says that the `accused` are to blame. It could frame them.

        hearsay: it was told so itself. Returns whether anybody will stay out of the next attempt.
        """
        if not accused:
            self._offence(accuser, 0)
        helped = [self._told_of(accuser, peer, hearsay) for peer in accused].count(True) > 0
        if not (helped or self.left_out(accuser)) and self._said_before(accuser, ""):  # once it may be chance that nobody says it first-hand
            self.blame([accuser], slow=[accuser])
        return helped or self.left_out(accuser)

    def _told_of(self, accuser: str, accused: str, hearsay: bool) -> bool:
        if self.is_stranger(accused) and not self.is_stranger(accuser):
            self.blame([accused])
        elif self.is_stranger(accuser) and not self.is_stranger(accused):
            self._offence(accuser, 0)  # lightly at first: it may be a newcomer that saw a member die
        elif not hearsay and accuser in self._trusted() and accused not in self._trusted():
            self.blame([accused])  # else one that stalls would take a reducer out with it
        elif not hearsay:
            self._one_says_of_its_like(accuser, accused)
        return not hearsay or self.left_out(accused)

    def _one_says_of_its_like(self, accuser: str, accused: str) -> None:
        """The accuser keeps away from the accused now. If it meets it again nevertheless, with the same end, the two share the blame.

        Who accuses one after the other has it alone.
        """
        since = self._clock() - _ACCUSATION_SECONDS
        others = [one for (by, one), at in self._accusations.items() if by == accuser and one != accused and at > since]
        if len(others) >= _MOST_ACCUSED:
            self.blame([accuser], slow=[accuser])
        elif self._said_before(accuser, accused):
            self.blame([accuser, accused])

    def _said_before(self, accuser: str, accused: str) -> bool:
        """Whether it has said so within _ACCUSATION_SECONDS; it says so now. accused: '' for whomever, by hearsay."""
        before, now = self._accusations.get((accuser, accused)), self._clock()
        _put(self._accusations, (accuser, accused), now)
        return before is not None and now - before < _ACCUSATION_SECONDS

    def averaged(self, peers: Iterable[str]) -> None:
        """They were in a round that worked."""
        for peer in peers:
            self.answered(peer)
            _put(self._averaged, peer, None)
            conduct = self._conduct.get(peer)
            if conduct is None:
                continue
            conduct.good_rounds += 1
            if conduct.good_rounds >= _GOOD_ROUNDS:
                conduct.offences, conduct.good_rounds = conduct.offences - 1, 0
            if conduct.offences <= 0:
                del self._conduct[peer]

    # ---------------------------------------------------------------- who does not go with whom

    def at_odds(self, parent: str, without: Mapping[str, Container[str]], leader: str) -> set[str]:
        """Who stays out of a group so that nobody is in it with one that it leaves out. without: member -> whom it leaves out.

        Nobody whom the host trusts, if the other is not; strangers first; then whoever is in most of the quarrels; then the worse ranked for
        this `parent`. So one that falsely accuses several loses its own place, and one that accuses a single other loses every second round as that one does. The leader
        stays: whoever leaves it out has not come to it.
        """
        pairs = {frozenset((one, other)) for one in without for other in without if one != other and other in without[one]}
        out, trusted = set(), self._trusted()

        def badness(peer: str) -> tuple[bool, bool, int, str]:
            return peer not in trusted, self.is_stranger(peer), sum(peer in pair for pair in pairs), rank(parent, peer)

        while pairs:
            quarrelling = {peer for pair in pairs for peer in pair} - {leader}
            worst = max(quarrelling, key=badness)
            out.add(worst)
            pairs = {pair for pair in pairs if worst not in pair}
        return out


def _put(known: dict, key: object, value: object) -> None:
    """The last ones put are kept."""
    known.pop(key, None)
    known[key] = value
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]
