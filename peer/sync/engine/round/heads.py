"""Which state is right, when others sign another one than ours: decided by those whom we have met, not by what a state says of itself.

A state is numbers that anybody can make up, and naming ours as its ancestor proves nothing. So a state that we did not make counts by
who stands behind it: live peers that averaged with us before (met.py). docs/internals.md, "Which state is right", says why all honest
peers come to one answer, and what a stranger, or one whom we have met, can still do.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection

from peer.sync.engine.round.ballot import Ballot
from peer.sync.engine.round.claims import Claim, Claims, head_of
from peer.sync.engine.round.evidence import Evidence
from peer.sync.engine.round.lineage import Lineage
from peer.sync.engine.round.met import Met
from peer.sync.engine.state import Head, Header, State, better
from swarm.records import RENEW_SECONDS, PeerRecord

DESERTED_SECONDS = 30.0
"""Once nobody that we have met has stood where we stand for this long, one signer of a descendant is enough: a second may never come. And once
nobody that we have met can lead us for this long, nor we ourselves, strangers have a vote: without them there is no round any more."""
ALONE_SECONDS = 300.0
"""In a run for members, once nobody that we have met is live, nor another one who sealed what our certificate is of, nobody leads us for this
long. A restart, or a link that broke, is over by then; and strangers that we do follow cost the rounds that we made alone meanwhile."""
IDLE_SECONDS = 300.0
"""Once nobody has trained for this long on the state where we stand and do not train either, those who stand there have no say: no round comes
of it. Shorter, a member that lies could lead those who assist astray while all others restart."""
_LATELY_SECONDS = 30.0
"""After our state has changed, within which the others know of that: a record lives for 20 s."""
_CALLS_KEPT, _LED_KEPT = 16, 64
_MOST_STRANGERS = 32
"""The longest seen, of those that vote where nobody that we have met is live: a look compares all of them with each other."""


class Heads:
    """What we know of where others stand. others: the live peers' records; broken: whether a peer has just not given what it signed."""

    def __init__(
        self,
        met: Met,
        others: Callable[[], Collection[PeerRecord]],
        state: State,
        broken: Callable[[str], bool] = lambda peer: False,
        clock: Callable[[], float] = time.monotonic,
        *,
        leads: bool = True,
        trains: Callable[[], bool] = lambda: True,
        evidence: Evidence | None = None,
        starting_again: Callable[[], Collection[str]] = frozenset,
        is_last: Callable[[Head], bool] = lambda head: False,
    ):
        """leads: whether others can dial us; trains: whether we begin rounds, other than who assists or is paused; evidence: what those
        whom we have not met can show (None: nothing is asked of them); starting_again: peers that are none of the others now, and will
        be within seconds. is_last: whether the run ends with a state."""
        self._evidence, self._starting_again = evidence, starting_again
        self._met, self._others, self._broken, self._clock, self._leads, self._trains = met, others, broken, clock, leads, trains
        self._claims, self._is_last = Claims(others, clock), is_last
        self._let_go: dict[str, deque[str]] = {}
        self._lineage = Lineage()
        self._left: dict[str, float] = {}
        """The last states before ours, and when we, or who led us to ours, had left them."""
        self._with_us: tuple[Collection[PeerRecord], float] = (), 0.0
        """The others as they were when nobody stood but on our state or before it, and until when that is known to last."""
        self._deserted, self._idle, self._leaderless = Lasting(clock), Lasting(clock), Lasting(clock)
        self._left_idle = ""
        """The state that we left since nobody trained there: who still stands there without training has no say either, or three would each be led
        back by the two others, for ever."""
        self._company_at = clock()
        """When somebody was live whom we have met, or who sealed what our certificate is of."""
        self._led: dict[str, bool] = {}
        """States that were right, and whether those said so that we have met."""
        self.moved(state)

    def moved(self, state: State, *, fetched: bool = False) -> None:
        """Our state is `state` from now on. fetched: others made it, without us; who led us there may be a round ahead by now."""
        if self._idle.has_lasted(IDLE_SECONDS):
            self._left_idle = self._ours.digest
        if fetched:
            for digests in self._let_go.values():
                if self._ours.digest in digests:
                    digests.append(state.digest)
        self._ours, self._from_base = Head.of(state), not state.header.round
        self._left = {digest: self._left.get(digest, self._clock()) for digest in state.header.parents}
        self._lineage.stand(self._ours, state.header)
        self._included = state.header.included
        self._with_us = (), 0.0
        self._deserted.note(False)
        self._idle.note(False)

    def heard(self, peer: str, head: Head) -> None:
        """`peer` itself has just told us where it stands; its record may be seconds old."""
        now, (others, until) = self._clock(), self._with_us
        # What we know already, or what is before it, leaves nobody elsewhere: that was counted when the others' records came.
        self._with_us = (others, min(until, now + RENEW_SECONDS)) if self._is_ours_or_before(head) else ((), 0.0)
        self._claims.heard(peer, head)

    def let_go(self, peer: str, digest: str) -> None:
        """`peer` called us to a round on the state `digest`, and we had nothing to bring in time: it may go on without us."""
        self._let_go.setdefault(peer, deque(maxlen=_CALLS_KEPT)).append(digest)
        self._let_go = {peer: digests for peer, digests in self._let_go.items() if peer in self._met}

    def right(self) -> dict[Head, set[str]]:
        """The states to take over in place of ours, the best first, and who stands on each; empty while ours is right."""
        others, now = self._others(), self._clock()
        if others is self._with_us[0] and now < self._with_us[1]:
            return {}
        claims = self._claims.all()
        self._look_for_a_leader(claims)
        self._look_for_company(claims)
        self._look_for_work(claims)
        if all([self._is_ours_or_before(claim.head) for claim in claims]):  # between two rounds; spares the count
            self._deserted.note(False)
            self._idle.note(False)
            self._with_us = others, self._claims.words_last_until(now)
            return {}
        ballot = self._ballot(self._one_is_enough, claims)
        right = ballot.right()
        self._deserted.note(ballot.deserted and not right)
        if right or not ballot.deserted:
            return self._noted(right, ballot)
        if not self._is_left_behind(ballot):
            return {}
        ballot = self._ballot(lambda head, signers: True, left_behind=True)
        return self._noted(ballot.right(), ballot)

    def _is_left_behind(self, ballot: Ballot) -> bool:
        return ballot.deserted and self._deserted.has_lasted(DESERTED_SECONDS)

    def _noted(self, right: dict[Head, set[str]], ballot: Ballot) -> dict[Head, set[str]]:
        for head in right:
            self._led.pop(head.digest, None)
            self._led[head.digest] = ballot.met
        while len(self._led) > _LED_KEPT:
            del self._led[next(iter(self._led))]
        return right

    def _is_ours_or_before(self, head: Head) -> bool:
        """Whether `head` is known, and nothing for which we would leave our state."""
        ours = self._ours
        return head.digest == ours.digest or (
            head.digest in ours.parents and head.samples < ours.samples and self._lineage.has_learned(head)
        )

    def is_right(self, head: Head) -> bool:
        """Whether to prefer `head` to ours now."""
        known = head.digest == self._ours.digest or self._lineage.descends(self._ours, head)
        return not known and self._ballot(self._one_is_enough).is_right(head)

    def keeps(self, head: Head) -> bool:
        """Whether to stay although `head` was right when its download began: it is no more, and another one stays with us.

        Else two that have begun to take over each other's branch would swap, and swap again. And where strangers led us to it, one whom we have
        met is back, or may be.
        """
        if self.is_right(head):
            return False
        if self._is_last(self._ours) and not self._is_last(head):
            return True
        ballot = self._ballot(self._one_is_enough)
        if not self._led.get(head.digest, True) and (ballot.met or self._waits_for_company()):
            return True
        descends = self._from_base or ballot.may_descend(head)
        return (ballot.certified and not self._is_left_behind(ballot)) or (not descends and ballot.is_shared(head))

    def _ballot(
        self, one_is_enough: Callable[[Head, Collection[Claim]], bool], claims: Collection[Claim] | None = None, *, left_behind: bool = False
    ) -> Ballot:
        idle = {self._left_idle, self._ours.digest} if self._idle.has_lasted(IDLE_SECONDS) else {self._left_idle}
        everybody = [claim for claim in (self._claims.all() if claims is None else claims) if claim.trains or claim.head.digest not in idle]
        claims = [claim for claim in everybody if claim.peer in self._met or not self._broken(claim.peer)]
        leaderless = self._leaderless.has_lasted(DESERTED_SECONDS)
        if sure := self._on_the_branch(claims):
            ballot = Ballot(
                self._ours, True, claims, _with_a_vote(sure)[:_MOST_STRANGERS], False, self._lineage, one_is_enough, we_lead=self._leads,
                left_behind=left_behind, certified=True, needs_more=True, is_last=self._is_last,
            )  # fmt: skip
            if ballot.right():  # else ours is better, and what comes after it counts as ever
                return ballot
        met = [] if leaderless else [claim for claim in claims if claim.peer in self._met]
        counted, certified, elsewhere = self._still_on_the_branch(met), False, False
        if not met and not leaderless and self._had_company() and any(peer in self._met for peer in self._starting_again()):
            counted = []  # a wrong mean is found late, and those who lie may be back before all others
        elif not met:
            counted, certified, elsewhere = self._judged(claims, leaderless)
        voters = _with_a_vote(counted) if met else _with_a_vote(counted)[:_MOST_STRANGERS]
        anew = not met and not leaderless and self._has_nothing_to_stay_for()
        # Strangers may vote only after five minutes, and by then what one stands on no longer names ours.
        for claim in voters if met else claims[:_MOST_STRANGERS]:
            self._lineage.learn(claim.head)
        return Ballot(
            self._ours, self._from_base or elsewhere or anew, claims, voters, bool(met), self._lineage, one_is_enough, self._left_lately(),
            self._leads, self._backers(everybody), () if leaderless or elsewhere or anew else self._included, left_behind, certified,
            is_last=self._is_last,
        )  # fmt: skip

    def _has_nothing_to_stay_for(self) -> bool:
        """Whether we assist where nobody trains any more, or have left such a state: then strangers lead us as they lead a newcomer. Two that had gone
        on from a helper's state, and two that had not, were no majority to it, for ever."""
        return not self._trains() and (bool(self._left_idle) or self._idle.has_lasted(IDLE_SECONDS))

    def _left_lately(self) -> set[str]:
        return {digest for digest, since in self._left.items() if self._clock() - since < _LATELY_SECONDS}

    def _on_the_branch(self, claims: list[Claim]) -> list[Claim]:
        """Those who count on the branch that the host's server has just countersigned, as a newcomer would see it: only where ours is another one,
        and has fewer samples. Else nobody.
        """
        if not (sure := self._countersigned) or self._from_base or self._lineage.holds(sure):
            return []
        for claim in claims:  # a child of ours is elsewhere until this is known
            self._lineage.learn(claim.head)
        newer = [claim.head for claim in claims if better(claim.head, self._ours)]
        if all(self._trains() and self._lineage.descends(head, self._ours) for head in newer):
            return []
        judgement = self._evidence.judge([claim.peer for claim in claims])
        on_it = judgement.countersigned and not self._lineage.holds(judgement.countersigned)
        return [claim for claim in claims if claim.peer in judgement.peers] if on_it else []

    def _still_on_the_branch(self, met: list[Claim]) -> list[Claim]:
        """Where our state, or one before it, is countersigned: without those with fewer samples, on a branch that left ours before that one."""
        if not (sure := self._countersigned) or not self._lineage.holds(sure):
            return met
        return [claim for claim in met if better(claim.head, self._ours) or not self._lineage.left_before(claim.head, sure)]

    @property
    def _countersigned(self) -> str:
        return self._evidence.countersigned if self._evidence is not None else ""

    def _judged(self, strangers: list[Claim], leaderless: bool) -> tuple[list[Claim], bool, bool]:
        """Those of them that count, a signer also where it has just come back; whether a certificate says so; and whether its state is elsewhere
        than ours: then ours is as good as none."""
        if self._evidence is None:
            return strangers, False, False
        judgement = self._evidence.judge([claim.peer for claim in strangers])
        if not (judgement.signed or leaderless) and self._waits_for_company():
            return [claim for claim in strangers if claim.peer in self._evidence.signers], False, False
        count = [claim for claim in strangers if claim.peer in judgement.peers]
        return count, bool(judgement.states), not self._evidence.holds_us(judgement)

    def _look_for_company(self, claims: Collection[Claim]) -> None:
        """Whether anybody is live whose word we took before, or might take."""
        signers = self._evidence.signers if self._evidence is not None else ()
        if any(claim.peer in self._met or claim.peer in signers for claim in claims):
            self._company_at = self._clock()

    def _waits_for_company(self) -> bool:
        """Whether those are live, or may be back soon; only where others than we have sealed what we hold a certificate of."""
        return self._evidence is not None and bool(self._evidence.signers) and self._had_company()

    def _had_company(self) -> bool:
        return self._clock() - self._company_at < ALONE_SECONDS

    def _look_for_work(self, claims: Collection[Claim]) -> None:
        """Whether a round may begin where we stand: by us, or by one that we have met. Two helpers that were cut off together have each other, and
        waited for ever (a trainer had gone on alone)."""
        ours = self._ours.digest
        self._idle.note(
            not self._trains() and not any(claim.trains and claim.head.digest == ours and claim.peer in self._met for claim in claims)
        )

    def _look_for_a_leader(self, claims: Collection[Claim]) -> None:
        """Whether anybody could lead us without a stranger: we ourselves, or a live peer that we have met.

        Peers behind NAT whose leaders have all been replaced by strangers would wait for these to come back to them for ever.
        """
        friends = [claim for claim in claims if claim.peer in self._met]
        alone = bool(friends) and not self._leads and not any(claim.leads for claim in friends) and any(claim.leads for claim in claims)
        self._leaderless.note(alone)

    def backers(self) -> int:
        """For our record: how many live peers whom we have met stand with us, ourselves included."""
        return self._backers(self._claims.all())

    def _backers(self, claims: Collection[Claim]) -> int:
        ours, line = self._ours, self._lineage
        met = [claim.head for claim in claims if claim.votes and claim.peer in self._met]
        return 1 + sum([head.digest == ours.digest or line.descends(head, ours) or line.descends(ours, head) for head in met])

    def refusal(self, head: Head, header: Header) -> str:
        """Why what is fetched as `head`, with this header, is not to be taken over; empty: nothing is against it. Whether it comes after our state
        is known from now on."""
        self._lineage.trace(head, header)
        if header.samples != head.samples or (head.parents and header.parents != head.parents):
            return "its samples or ancestors are not those that its signers promised"
        return ""

    def _one_is_enough(self, head: Head, signers: Collection[Claim]) -> bool:
        """Whether one peer that we have met, and that trains, may have made `head` without a second one: after it called us in vain."""
        return any(claim.trains and self._ours.digest in self._let_go.get(claim.peer, ()) for claim in signers)


class Lasting:
    """For how long something has been so without a break, as far as we looked."""

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._since = clock, math.inf

    def note(self, is_so: bool) -> None:
        self._since = min(self._since, self._clock()) if is_so else math.inf

    def has_lasted(self, seconds: float) -> bool:
        return self._clock() - self._since >= seconds


def _with_a_vote(claims: list[Claim]) -> list[Claim]:
    return [claim for claim in claims if claim.votes] or claims


def most_signed(records: Collection[PeerRecord]) -> dict[Head, set[str]]:
    """What a newcomer takes that has met nobody: a head and those that stand on it; empty: none has a state."""
    claims, lineage = [Claim(record.peer_id, head_of(record)) for record in records][:_MOST_STRANGERS], Lineage()
    for claim in claims:
        lineage.learn(claim.head)
    return Ballot(Head("", 0), True, claims, claims, False, lineage, lambda head, signers: False).right()
