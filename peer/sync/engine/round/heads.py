"""Which state is right, when others sign another one than ours: decided by those whom we have met, not by what a state says of itself.

A state is numbers that anybody can make up, and naming ours as its ancestor proves nothing. So a state that we did not make counts by
who stands behind it: live peers that averaged with us before (met.py). docs/internals.md, "Which state is right", says why all honest
peers come to one answer, and what a stranger, or one whom we have met, can still do.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, replace

from peer.sync.engine.round.evidence import Evidence
from peer.sync.engine.round.groups import Group
from peer.sync.engine.round.lineage import Lineage
from peer.sync.engine.round.met import Met
from peer.sync.engine.state import Head, Header, State, better
from swarm.records import AVERAGING, JOINING, RENEW_SECONDS, PeerRecord

SIGNERS_NEEDED = 2
"""Of a descendant of our state that was not made with us: one peer that we have met may lie."""
DESERTED_SECONDS = 30.0
"""Once nobody that we have met has stood where we stand for this long, one signer of a descendant is enough: a second may never come. And once
nobody that we have met can lead us for this long, nor we ourselves, strangers have a vote: without them there is no round any more."""
ALONE_SECONDS = 300.0
"""In a run for members, once nobody that we have met is live, nor another one who sealed what our certificate is of, nobody leads us for this
long. A restart, or a link that broke, is over by then; and strangers that we do follow cost the rounds that we made alone meanwhile."""
_CALLS_KEPT, _GROUPS_KEPT, _LED_KEPT = 16, 4, 64
_MOST_STRANGERS = 32
"""The longest seen, of those that vote where nobody that we have met is live: a look compares all of them with each other."""


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


@dataclass(frozen=True)
class Ballot:
    """One look at what live peers sign. claims: of all others; voters: of those that we have met or, if none of them is live, of everybody."""

    ours: Head
    from_base: bool
    """Whether ours is the run's first state, from which every other one descends."""
    claims: Collection[Claim]
    voters: Collection[Claim]
    met: bool
    """Whether we have met the voters."""
    lineage: Lineage
    one_is_enough: Callable[[Head, Collection[Claim]], bool]
    """Whether these few signers, met, are enough for a descendant of ours."""
    we_lead: bool = True
    backers: int = 1
    """What our own record says: the others compare with that number."""
    included: Container[str] = ()
    """Those whose work is in our state; nobody where all have a say. Whoever made our state wrote that list: who believed the one believes the other."""
    left_behind: bool = False
    """Whether our state has been `deserted` for DESERTED_SECONDS: no more of them will agree on what comes after it."""
    certified: bool = False
    """Whether the voters are those whose state has a certificate (certificate.py): whom we have not met, and nobody outvotes by being live."""

    def right(self) -> dict[Head, set[str]]:
        """The states to take over in place of ours, the best first, and who stands on each; empty while ours is right."""
        right = sorted((head for head in self._candidates() if self.is_right(head)), key=self._rank)
        if not right:
            return {}
        # Of a lineage in motion most have signed what is older: what most sign comes first, then the newest that descends from it.
        best = min((head for head in right if self.lineage.descends(head, right[0])), key=self._newest, default=right[0])
        ordered = [best, *(head for head in right if head != best)]
        return {head: {claim.peer for claim in self.claims if claim.head == head} for head in ordered}

    def _candidates(self) -> list[Head]:
        """What voters stand on, and is no ancestor of ours. Of one state of which several tell different things, what most say."""
        said: dict[str, Head] = {}
        for head, _ in Counter(claim.head for claim in self.voters).most_common():
            said.setdefault(head.digest, head)
        # Nobody goes back to the base model, however many have just come and stand there; who has nothing takes that, too.
        others = [head for head in said.values() if head.digest != self.ours.digest and (head.samples or not self.ours.digest)]
        return [head for head in others if not self.lineage.descends(self.ours, head)]

    def is_right(self, head: Head) -> bool:
        """Whether `head`, which is not an ancestor of ours, is to be preferred to ours."""
        if self.from_base or self.lineage.descends(head, self.ours):
            return self._is_a_right_descendant(head)
        if self.met and not self._anybody_votes:
            return better(head, self.ours)
        theirs, us = self._weight(head, self.ours, 0), self._weight(self.ours, head, 1)
        if undecided := self._undecided(head):
            return theirs > us + undecided
        if theirs != us or not us:
            return theirs > us
        # Of three that met in pairs only, two would else stay here and one there for ever.
        theirs, us = self._company(head, self.ours, 0), self._company(self.ours, head, 1)
        return theirs > us or (theirs == us and better(head, self.ours))

    @property
    def _anybody_votes(self) -> bool:
        """False after a power cut: all have just come back, and what one of them has is better than nothing."""
        return any(claim.votes for claim in self.voters)

    def _is_a_right_descendant(self, head: Head) -> bool:
        signers = self._signers(head)
        if self.met:
            return bool(signers) and (len(signers) >= self._needed(signers) or self.one_is_enough(head, signers))
        # Six newcomers on the state of three that go on are twice as many, and know nothing that these do not know better.
        voters = [claim for claim in self.voters if claim.peer in self.included] or self.voters
        signers, others = [claim for claim in voters if claim in signers], [claim for claim in voters if claim not in signers]
        if len(signers) > len(others):
            return True
        # A newcomer beside one that committed and one that still averages, however long: no third word would ever come.
        if len(signers) == len(others) and not any(claim.stays or self.lineage.descends(claim.head, self.ours) for claim in others):
            return True
        # Whoever begins must begin somewhere, also while the others are of several minds; so must who was left behind by all of them.
        return (self.from_base or self.left_behind) and head == min(self._candidates(), key=self._rank, default=None)

    def _needed(self, signers: Collection[Claim]) -> int:
        """Where no round can be led but by those that sign, a second signer cannot come: they reduce every part of a round anyway."""
        others_lead = self.we_lead or any(claim.leads for claim in self.voters if claim not in signers)
        return min(SIGNERS_NEEDED, len(self.voters)) if others_lead and self._anybody_votes else 1

    def _rank(self, head: Head) -> tuple:
        """The smaller, the better."""
        return -len(self._signers(head)), *self._newest(head)

    def _newest(self, head: Head) -> tuple:
        """The smaller, the better."""
        return -head.samples, head.digest

    def _signers(self, head: Head) -> list[Claim]:
        """The voters that stand on it, or on a state after it."""
        return [claim for claim in self.voters if self._on_or_after(claim.head, head)]

    def _on_or_after(self, head: Head, tip: Head) -> bool:
        return head.digest == tip.digest or self.lineage.descends(head, tip)

    def _stands_on(self, head: Head, tip: Head, other: Head) -> bool:
        """Whether `head` is on the branch of `tip`: after it, or before it but after the branch of `other` parted from it."""
        return self._on_or_after(head, tip) or (self.lineage.descends(tip, head) and not self._on_or_after(other, head))

    @property
    def deserted(self) -> bool:
        """Whether the voters have all left our state: one of them for what descends from it; where we have met none of them, each.

        Who stays where nobody can be dialled stays in vain: there will be no round.
        """
        here = [claim for claim in self.voters if claim.head.digest == self.ours.digest]
        after = [self.lineage.descends(claim.head, self.ours) for claim in self.voters if claim not in here]
        stays = bool(here) and (self.we_lead or any(claim.leads for claim in here))
        return not stays and (any(after) if self.met else bool(after) and all(after))

    def is_shared(self, head: Head) -> bool:
        """Whether a voter is on our branch, and not on that of `head`."""
        return any(self._stands_on(claim.head, self.ours, head) for claim in self.voters)

    def _undecided(self, head: Head) -> int:
        """How many strangers stand where neither branch had begun, after a round at least: they may have met some of us, and followed nobody."""
        if self.met:
            return 0
        before = [claim.head for claim in self.voters if claim.head.samples]
        return sum(self.lineage.descends(head, fork) and self.lineage.descends(self.ours, fork) for fork in before)

    def _weight(self, tip: Head, other: Head, ourselves: int) -> int:
        """How many voters stand on the branch of `tip`. Two of them speak for those whom they have met since the branches parted.

        Else two halves that each found company meanwhile would both be sure that they are more.
        """
        votes = [claim for claim in self.voters if self._stands_on(claim.head, tip, other)]
        if not self.met or len(votes) < SIGNERS_NEEDED:
            return len(votes) + ourselves
        vouched = sorted(claim.backers for claim in votes)[-SIGNERS_NEEDED]
        return max(len(votes) + ourselves, min(vouched, self._live(tip, other) + ourselves))

    def _company(self, tip: Head, other: Head, ourselves: int) -> int:
        """How many stand on the branch of `tip` by the word of a single voter. Between equals it may decide: samples, which do else, are its word, too."""
        votes = [claim for claim in self.voters if self._stands_on(claim.head, tip, other)]
        vouched = max([claim.backers for claim in votes] + [self.backers] * ourselves, default=0) if self.met else 0
        return max(len(votes) + ourselves, min(vouched, self._live(tip, other) + ourselves))

    def _live(self, tip: Head, other: Head) -> int:
        return sum(self._stands_on(claim.head, tip, other) for claim in self.claims)


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
        evidence: Evidence | None = None,
    ):
        """evidence: what those whom we have not met can show; None: nothing is asked of them."""
        self._evidence = evidence
        self._met, self._others, self._broken, self._clock, self._leads = met, others, broken, clock, leads
        self._heard: dict[str, tuple[Head, float]] = {}
        self._let_go: dict[str, deque[str]] = {}
        self._groups: deque[Group] = deque(maxlen=_GROUPS_KEPT)
        self._as_ours: deque[str] = deque(maxlen=_CALLS_KEPT)
        """States that one signer was enough for, since they may be what came of one of our last groups."""
        self._not_ours: deque[str] = deque(maxlen=_CALLS_KEPT)
        """Of these, those whose header has shown that they did not."""
        self._lineage = Lineage()
        self._told: dict[str, tuple[PeerRecord, Claim]] = {}
        """Of each live peer its record, and what that claims: a look comes some thirty times as often as a record."""
        self._claimed: tuple[Collection[PeerRecord], dict[str, tuple[Head, float]], float, list[Claim]] = (), {}, 0.0, []
        """All claims, of which records and words, and until when; in place only words are ever changed that are no news."""
        self._with_us: tuple[Collection[PeerRecord], float] = (), 0.0
        """The others as they were when nobody stood but on our state or before it, and until when that is known to last."""
        self._deserted_since: float | None = None
        self._leaderless_since: float | None = None
        self._company_at = clock()
        """When somebody was live whom we have met, or who sealed what our certificate is of."""
        self._led: dict[str, bool] = {}
        """States that were right, and whether those said so that we have met."""
        self.moved(state)

    def moved(self, state: State, *, fetched: bool = False) -> None:
        """Our state is `state` from now on. fetched: others made it, without us; who led us there may be a round ahead by now."""
        if fetched:
            for digests in self._let_go.values():
                if self._ours.digest in digests:
                    digests.append(state.digest)
        self._ours, self._from_base = Head.of(state), not state.header.round
        self._lineage.stand(self._ours, state.header)
        self._included = state.header.included
        self._with_us = (), 0.0
        self._deserted_since = None
        if state.digest in self._not_ours:
            self._not_ours.remove(state.digest)  # ours now, however it came about: what we average onto it may come by one signer

    def heard(self, peer: str, head: Head) -> None:
        """`peer` itself has just told us where it stands; its record may be seconds old."""
        now, (others, until) = self._clock(), self._with_us
        # What we know already, or what is before it, leaves nobody elsewhere: that was counted when the others' records came.
        self._with_us = (others, min(until, now + RENEW_SECONDS)) if self._is_ours_or_before(head) else ((), 0.0)
        before = self._heard.get(peer, (head,))[0]
        if self._is_news(peer, head) or self._is_news(peer, before):
            self._heard = {**self._heard, peer: (head, now)}
        else:
            self._heard[peer] = head, now

    def _is_news(self, peer: str, head: Head) -> bool:
        """Whether its word that it stands at `head` counts in place of its record: of a hundred callers in a round few bring any."""
        known = self._told.get(peer)
        return known is None or head.samples > known[1].head.samples

    def let_go(self, peer: str, digest: str) -> None:
        """`peer` called us to a round on the state `digest`, and we had nothing to bring in time: it may go on without us."""
        self._let_go.setdefault(peer, deque(maxlen=_CALLS_KEPT)).append(digest)
        self._let_go = {peer: digests for peer, digests in self._let_go.items() if peer in self._met}

    def averages_in(self, group: Group) -> None:
        """We average in `group`: what fails here may be there at the others, with our contribution in it."""
        self._groups.append(group)

    def right(self) -> dict[Head, set[str]]:
        """The states to take over in place of ours, the best first, and who stands on each; empty while ours is right."""
        others, now = self._others(), self._clock()
        if others is self._with_us[0] and now < self._with_us[1]:
            return {}
        claims = self._claims()
        self._look_for_a_leader(claims)
        self._look_for_company(claims)
        if all([self._is_ours_or_before(claim.head) for claim in claims]):  # between two rounds; spares the count
            self._deserted_since = None
            self._with_us = others, self._words_last_until(now)
            return {}
        ballot = self._ballot(self._one_is_enough, claims)
        right = ballot.right()
        if right or not ballot.deserted:
            self._deserted_since = None
            return self._noted(right, ballot)
        if self._deserted_since is None:
            self._deserted_since = self._clock()
        if self._clock() - self._deserted_since < DESERTED_SECONDS:
            return {}
        ballot = self._ballot(lambda head, signers: True, left_behind=True)
        return self._noted(ballot.right(), ballot)

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
        ballot = self._ballot(self._one_is_enough)
        if not self._led.get(head.digest, True) and (ballot.met or self._waits_for_company()):
            return True
        descends = self._from_base or self._lineage.descends(head, self._ours)
        return ballot.certified or (not descends and ballot.is_shared(head))

    def _ballot(
        self, one_is_enough: Callable[[Head, Collection[Claim]], bool], claims: Collection[Claim] | None = None, *, left_behind: bool = False
    ) -> Ballot:
        everybody = self._claims() if claims is None else claims
        claims = [claim for claim in everybody if claim.peer in self._met or not self._broken(claim.peer)]
        leaderless = self._leaderless()
        met = [] if leaderless else [claim for claim in claims if claim.peer in self._met]
        counted, certified, elsewhere = self._still_on_the_branch(met), False, False
        if sure := self._on_the_branch(claims):
            met, counted, certified, elsewhere = [], sure, True, True
        elif not met:
            counted, certified, elsewhere = self._judged(claims, leaderless)
        voters = [claim for claim in counted if claim.votes] or counted
        voters = voters if met else voters[:_MOST_STRANGERS]
        for claim in voters:
            self._lineage.learn(claim.head)
        return Ballot(
            self._ours, self._from_base or elsewhere, claims, voters, bool(met), self._lineage, one_is_enough, self._leads,
            self._backers(everybody), () if leaderless or elsewhere else self._included, left_behind, certified,
        )  # fmt: skip

    def _on_the_branch(self, claims: list[Claim]) -> list[Claim]:
        """Those who count on the branch that the host's server has just countersigned, as a newcomer would see it: only where ours is another one,
        and has fewer samples. Else nobody.
        """
        if not (sure := self._countersigned) or self._from_base or self._lineage.holds(sure):
            return []
        if not any(better(claim.head, self._ours) and not self._lineage.descends(claim.head, self._ours) for claim in claims):
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
        return self._evidence is not None and bool(self._evidence.signers) and self._clock() - self._company_at < ALONE_SECONDS

    def _look_for_a_leader(self, claims: Collection[Claim]) -> None:
        """Whether anybody could lead us without a stranger: we ourselves, or a live peer that we have met."""
        friends = [claim for claim in claims if claim.peer in self._met]
        alone = bool(friends) and not self._leads and not any(claim.leads for claim in friends) and any(claim.leads for claim in claims)
        if not alone:
            self._leaderless_since = None
        elif self._leaderless_since is None:
            self._leaderless_since = self._clock()

    def _leaderless(self) -> bool:
        """Peers behind NAT whose leaders have all been replaced by strangers would wait for these to come back to them for ever."""
        return self._leaderless_since is not None and self._clock() - self._leaderless_since >= DESERTED_SECONDS

    def backers(self) -> int:
        """For our record: how many live peers whom we have met stand with us, ourselves included."""
        return self._backers(self._claims())

    def _backers(self, claims: Collection[Claim]) -> int:
        ours, line = self._ours, self._lineage
        met = [claim.head for claim in claims if claim.votes and claim.peer in self._met]
        return 1 + sum([head.digest == ours.digest or line.descends(head, ours) or line.descends(ours, head) for head in met])

    def refusal(self, head: Head, header: Header) -> str:
        """Why what was fetched as `head` is not to be taken over; empty: nothing is against it."""
        if header.samples != head.samples or (head.parents and header.parents != head.parents):
            return "its samples or ancestors are not those that its signers promised"
        if head.digest not in self._as_ours or self._our_group_in(header):
            return ""
        if self._ballot(self._went_on_without_us).is_right(head):
            return ""
        self._as_ours.remove(head.digest)
        self._not_ours.append(head.digest)
        return "it is not what came of the round that we took part in"

    def _our_group_in(self, header: Header) -> bool:
        """Whether one of our groups made this state, or one of its ancestors."""
        made = {committed_round.parent: committed_round.members for committed_round in header.ancestors} | {header.parents[0]: header.members}
        return any(made.get(group.parent) == group.members for group in self._groups)

    def _claims(self) -> list[Claim]:
        """Where each live peer stands, by its record, or by what it told us since."""
        now, others = self._clock(), self._others()
        known, heard, until, claims = self._claimed
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
        self._claimed = others, self._heard, self._words_last_until(now), claims
        return claims

    def _words_last_until(self, now: float) -> float:
        return min([since + RENEW_SECONDS for _, since in self._heard.values() if now - since < RENEW_SECONDS], default=math.inf)

    def _one_is_enough(self, head: Head, signers: Collection[Claim]) -> bool:
        """Whether one peer that we have met may have made `head` without a second one: after it called us in vain, or with us."""
        if self._went_on_without_us(head, signers):
            return True
        theirs = {claim.peer for claim in signers}
        if not any(group.parent in head.parents and not theirs.isdisjoint(group.peers) for group in self._groups):
            return False
        if not {head.digest, *head.parents}.isdisjoint(self._not_ours):
            return False
        if head.digest not in self._as_ours:
            self._as_ours.append(head.digest)  # its header must name the group: `refusal`
        return True

    def _went_on_without_us(self, head: Head, signers: Collection[Claim]) -> bool:
        return any(self._ours.digest in self._let_go.get(claim.peer, ()) for claim in signers)


def most_signed(records: Collection[PeerRecord]) -> dict[Head, set[str]]:
    """What a newcomer takes that has met nobody: a head and those that stand on it; empty: none has a state."""
    claims, lineage = [Claim(record.peer_id, head_of(record)) for record in records][:_MOST_STRANGERS], Lineage()
    for claim in claims:
        lineage.learn(claim.head)
    return Ballot(Head("", 0), True, claims, claims, False, lineage, lambda head, signers: False).right()


def _claim_of(record: PeerRecord) -> Claim:
    phase = record.phase
    return Claim(record.peer_id, head_of(record), phase != JOINING, record.backers, not record.client_mode, phase != AVERAGING)


def head_of(record: PeerRecord) -> Head:
    return Head(record.digest, record.samples, tuple(record.parents))
