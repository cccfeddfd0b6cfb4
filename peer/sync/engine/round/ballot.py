"""Which state is right, by what live peers claim at one moment: the rules of docs/internals.md, "Which state is right"."""

from collections import Counter
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass

from peer.sync.engine.round.claims import Claim
from peer.sync.engine.round.lineage import Lineage
from peer.sync.engine.state import Head, better

SIGNERS_NEEDED = 2
"""Of a descendant of our state that was not made with us: one peer that we have met may lie."""


@dataclass(frozen=True)
class Ballot:
    """One look at what live peers claim. claims: of all others; voters: of those that we have met or, if none of them is live, of everybody."""

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
    left_lately: Container[str] = ()
    """States on which we stood a moment ago, or that came before ours then: who stands there still may not know yet what came of it."""
    we_lead: bool = True
    backers: int = 1
    """What our own record says: the others compare with that number."""
    included: Container[str] = ()
    """Those whose work is in our state; nobody where all have a say. Whoever made our state wrote that list: who believed the one believes the other."""
    left_behind: bool = False
    """Whether our state has been `deserted` for DESERTED_SECONDS: no more of them will agree on what comes after it."""
    certified: bool = False
    """Whether the voters are those whose state has a certificate (certificate.py): whom we have not met, and nobody outvotes by being live."""
    needs_more: bool = False
    """Whether no state is right that has fewer samples than ours."""
    is_last: Callable[[Head], bool] = lambda head: False
    """Whether the run ends with it. Whoever stands on such a state has no more rounds before it, and leaves it for none from which some would be due."""

    def right(self) -> dict[Head, set[str]]:
        """The states to take over in place of ours, the best first, and who stands on each; empty while ours is right."""
        right = sorted((head for head in self._candidates() if self.is_right(head)), key=self._rank)
        if not right:
            return {}
        # Of a lineage in motion most have signed what is older: what most sign comes first, then the newest that descends from it.
        enough = min(SIGNERS_NEEDED, len(self._signers(right[0]))) if self.met else 1  # the newest of all may be one liar's
        after = [head for head in right if self.lineage.descends(head, right[0]) and len(self._signers(head)) >= enough]
        best = min(after, key=self._newest, default=right[0])
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
        if (self.needs_more and not better(head, self.ours)) or (self.is_last(self.ours) and not self.is_last(head)):
            return False
        if self.from_base or self.lineage.descends(head, self.ours):
            return self._is_a_right_descendant(head)
        return (self._may_be_ahead(head) and self._is_a_right_descendant(head)) or self._is_on_a_right_branch(head)

    def _is_on_a_right_branch(self, head: Head) -> bool:
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

    def may_descend(self, head: Head) -> bool:
        """Whether it is known to come after ours, or may be so far ahead that its record does not show it."""
        return self.lineage.descends(head, self.ours) or self._may_be_ahead(head)

    def _may_be_ahead(self, head: Head) -> bool:
        """Whether nobody knows where a stranger's line met ours: a record names eight ancestors. A liar could name ours, so this gives it nothing."""
        return not self.met and better(head, self.ours) and not self.lineage.meets(head)

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
        if signers and len(signers) == len(others) and not any(claim.stays or self.may_descend(claim.head) for claim in others):
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
        after = [self.may_descend(claim.head) for claim in self.voters if claim not in here]
        stays = bool(here) and (self.we_lead or any(claim.leads for claim in here))
        return not stays and (any(after) if self.met else bool(after) and all(after))

    def is_shared(self, head: Head) -> bool:
        """Whether a voter is on our branch, and not on that of `head`."""
        return any(self._stands_on(claim.head, self.ours, head) for claim in self.voters)

    def _undecided(self, head: Head) -> int:
        """How many stand where neither branch had begun, after a round at least.

        Strangers may have met some of us, and followed nobody. Of those that we have met, only who stands where we stood a moment ago: just after
        a round nobody else is where we are yet, and one that lies would be as many as we.
        """
        before = [claim.head for claim in self.voters if claim.head.samples and (not self.met or claim.head.digest in self.left_lately)]
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
