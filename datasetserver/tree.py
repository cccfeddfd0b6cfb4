"""The final states of a run as a tree, what the ledger itself counts for each, and which of them is the head.

A report is somebody's word. Of each member a state counts at most what that member registered, and no contribution twice in a lineage.
A state whose parent we do not know is kept, and says nothing by itself; so is one whose figures do not follow from its parent's, for either may
be a lie. Of two stories of one state the one that counts more is kept. Not promised: that a state exists, or is any good.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.digest import ELDER_CHARACTERS

ContributionId = tuple[str, int]
"""A peer and the number of its contribution."""
_FEWEST_COUNTED = 64
_STEPS_OF_AN_ANCESTOR = 16
"""1.8 us, and 0.1 for one state of a list."""
_MOST_LATE = 1024
"""Rounds after which a report is late for sure: a header names 512. Else one report of round 1 would walk through all of a run's."""


@dataclass
class State:
    """A final state; `members` are (peer, number, samples) of the contributions averaged into it, `reporters` who told us.

    bridge: the ancestor we take it to have while its parent is unknown to us; '': none; None: not decided, or not needed. owners: how many the reporters
    have. own: the samples that its members add, as the ledger counts them; counted: its own and those of its ancestors. gaps: how many of these have
    an unknown parent.
    standing: who stands on it, by the last that each told us; each is in one state only.
    """

    digest: str
    parent: str
    round: int
    samples: int
    members: tuple[tuple[str, int, int], ...]
    reporters: list[str] = field(default_factory=list)
    bridge: str | None = None
    standing: set[str] = field(default_factory=set)
    owners: int = 1
    own: int = 0
    counted: int = 0
    gaps: int = 0

    @property
    def own_samples(self) -> int:
        return sum(samples for _, _, samples in self.members)

    def equals(self, other: "State") -> bool:
        """Whether both say the same, whoever reported them."""
        mine, its = ((s.digest, s.parent, s.round, s.samples, sorted(s.members)) for s in (self, other))
        return mine == its

    def contributions(self) -> Iterator[ContributionId]:
        return ((peer, number) for peer, number, _ in self.members)


class StateTree:
    """States by digest. The head is the one with the most counted samples, of those that peers have not left; see `_rank`.

    registered: the samples that a contribution was registered with, those that count as another's included; 0 for an unknown one.
    most: samples of one member; 0: no limit.
    """

    def __init__(self, registered: Callable[[ContributionId], int], most: int = 0) -> None:
        self._registered, self._most = registered, most
        self._states: dict[str, State] = {}
        self._children: defaultdict[str, list[str]] = defaultdict(list)
        self._bridged: defaultdict[str, list[str]] = defaultdict(list)
        self._having: defaultdict[ContributionId, list[str]] = defaultdict(list)
        self._stands: dict[str, str] = {}
        """By reporter, the state on which it stands."""
        self.moves: dict[str, str] = {}
        """What has changed in that, for whoever keeps it; '': it stands nowhere any more."""
        self.head: State | None = None
        self.steps = 0
        """How many states were looked at for what counts in an earlier one already. Of what the honest report that is none."""

    def get(self, digest: str) -> State | None:
        return self._states.get(digest)

    def __iter__(self) -> Iterator[State]:
        return iter(list(self._states.values()))

    def add(self, state: State) -> None:
        """Take a state that `contradiction` has nothing against."""
        self._states[state.digest] = state
        for reporter in state.reporters:
            self._hear(state, reporter)
        self._children[state.parent].append(state.digest)
        for pair in state.contributions():
            self._having[pair].append(state.digest)
        if self.has_gap(state):
            decided = state.bridge == "" or state.bridge in self._states
            self._set_bridge(state, state.bridge if decided else self._likely_ancestor(state))
        else:
            state.bridge = None  # the store may still have the one from before its parent was reported
        for child in self.children(state.digest):
            if not self.has_gap(child):
                self._set_bridge(child, None)
            elif child.bridge is None:
                self._set_bridge(child, self._likely_ancestor(child))
                self._count_from(child)
        self._count_from(state)
        self._leave_what_all_have_left()

    def outweighs(self, state: State) -> bool:
        """Whether more owners tell `state`, another story of a digest that is known, than the one that we have, or as many and it counts more."""
        known = self._states[state.digest]
        likely = self._likely_ancestor(state) if self.has_gap(state) else ""
        ancestor = self._parent(state) or self._states.get(likely)
        counted, gaps = self._weigh(state, ancestor, self._own_count(state, ancestor))
        return (state.owners, counted, -gaps) > (known.owners, known.counted, -known.gaps)

    def replace(self, state: State) -> list[State]:
        """Take this story of a state in place of the one before; returns the states whose ancestor may be another by that."""
        orphans = self._bridged.get(state.digest, [])[:]  # they were taken to come after what it was said to be before
        self._forget(self._states[state.digest])
        self.head = None  # it may have been the story before, of which nothing is known any more
        self.add(state)
        moved = self._bridge_anew(orphans)
        self.head = self._best()  # what followed the story before may have a gap now
        return [*self.children(state.digest), *moved]

    def count_again(self, pair: ContributionId) -> None:
        """A contribution was registered after states that have it were reported: it counts in the first of each lineage.

        Nothing else is counted anew: a liar may name another's next contribution in a thousand states.
        """
        having = set(self._having.get(pair, ()))
        order = self._descendants(self._states[digest] for digest in having)
        live = self._live_of(order)
        after: set[str] = set()
        for one in order:
            ancestor = self._ancestor(one)
            earlier = ancestor is not None and ancestor.digest in after
            if one.digest in having and not earlier:
                one.own += next(self._count_of((peer, number), samples) for peer, number, samples in one.members if (peer, number) == pair)
            if one.digest in having or earlier:
                after.add(one.digest)
            one.counted, _ = self._weigh(one, ancestor, one.own)
            if one.digest in live and (self.head is None or _rank(one) > _rank(self.head)):
                self.head = one

    def is_told(self, pair: ContributionId) -> bool:
        """Whether a state that we know has this contribution."""
        return pair in self._having

    def stood(self, places: Iterable[tuple[str, str]]) -> None:
        """Where each reporter stood, as it was kept: the states alone do not say in which order they were told."""
        for reporter, digest in places:
            if digest in self._states:
                self._stand(reporter, self._states[digest])
        self.moves.clear()
        self.head = self._best()

    def stands_somewhere(self, reporter: str) -> bool:
        return reporter in self._stands

    def has_moved(self, reporter: str, state: State) -> bool:
        """Whether `reporter`, which tells us of `state` now, stands there. Of what came before the state where it stands it tells late, as of a round that
        was lost; whether that came before is in doubt while a parent is unknown."""
        stands = self._states.get(self._stands.get(reporter, ""))
        if stands is not None and stands.round - state.round > _MOST_LATE:
            return False
        while stands is not None and stands.round > state.round:
            if (stands := self._parent(stands)) is None:
                return False
        return stands is not state

    def heard_again(self, state: State, reporter: str) -> bool:
        """`reporter` has told us of `state`, too; returns whether the head is another by that."""
        before = self.head
        self._hear(state, reporter)
        if self._is_live(state):
            self._prefer(state)
        self._leave_what_all_have_left()
        return self.head is not before

    def children(self, digest: str) -> list[State]:
        """Those that are said to follow it."""
        return [self._states[child] for child in self._children.get(digest, ())]

    def following(self, digest: str) -> list[State]:
        """The state, and all that are said to descend from it; none where it is unknown."""
        found, seen = [self._states[digest]] if digest in self._states else [], {digest}
        for one in found:
            new = [child for child in self.children(one.digest) if child.digest not in seen]  # reports may lead in a circle
            found += new
            seen |= {child.digest for child in new}
        return found

    def twin(self, digest: str) -> State | None:
        """Another state whose digest begins as this one does: of its ancestors of long ago a state has the first ELDER_CHARACTERS only, so peers
        take one for the other. A report may name any digest: what one owner tells, beside a state that two do, is none, or one member could keep the
        host from discarding whatever it likes."""
        known = self._states.get(digest)
        fewest = 2 if known is not None and known.owners > 1 else 1
        alike = (state for state in self._states.values() if state.digest != digest and state.digest.startswith(digest[:ELDER_CHARACTERS]))
        return next((state for state in alike if state.owners >= fewest), None)

    def remove(self, *digests: str) -> tuple[list[State], list[State]]:
        """Forget states and all that descend from them; returns them, and those that were only taken to descend from them."""
        gone = list({state.digest: state for digest in digests for state in self.following(digest)}.values())
        orphans = [orphan for state in gone for orphan in self._bridged.get(state.digest, ())]
        for state in gone:
            self._forget(state)
        self.head = self._best()
        return gone, self._bridge_anew(orphans)

    def _bridge_anew(self, digests: Iterable[str]) -> list[State]:
        """Decide anew what these come after, of which we know no parent; returns those that are still there."""
        states = [self._states[digest] for digest in digests if digest in self._states]
        for state in states:
            self._set_bridge(state, self._likely_ancestor(state) if self.has_gap(state) else None)
            self._count_from(state)
        return states

    def since(self, ancestor: State | None) -> list[State] | None:
        """The head and its ancestors after `ancestor`, the oldest first; None where a parent is unknown, or it is on another branch."""
        states, state = [], self.head
        while state is not None and ancestor is not None and state.round > ancestor.round:
            states.append(state)
            state = self._parent(state)
        return states[::-1] if state is not None and state is ancestor else None

    def contradiction(self, state: State) -> str | None:
        """Why a state cannot be true, or None."""
        if state.digest == state.parent:
            return "it is its own parent"
        if len({peer for peer, _, _ in state.members}) != len(state.members):
            return "a peer is in it twice"
        largest = max(samples for _, _, samples in state.members)
        if self._most and largest > self._most:
            return f"a member has {largest} samples in it, and two rounds have {self._most}"
        if state.round == 1 and state.samples != state.own_samples:
            return f"it is the first round, has {state.samples} samples, and its members {state.own_samples}"
        if state.samples < state.own_samples:
            return f"it has {state.samples} samples, and its members alone {state.own_samples}"
        return None

    def chain(self, state: State | None = None) -> list[State]:
        """A state (the head) and its ancestors, the oldest first."""
        return list(self.back(state))[::-1]

    def back(self, state: State | None = None) -> Iterator[State]:
        """A state (the head) and its ancestors, the newest first."""
        state = state or self.head
        while state is not None:
            yield state
            state = self._ancestor(state)

    def is_followed(self, state: State) -> bool:
        """Whether another state descends from it."""
        return bool(self._children.get(state.digest) or self._bridged.get(state.digest))

    def has_gap(self, state: State) -> bool:
        """Whether we do not know what it follows: then all states are looked at for what it may come after."""
        return state.round != 1 and self._parent(state) is None

    def follows(self, state: State) -> set[str]:
        """What it is said to follow, or taken to come after."""
        return {state.parent, state.bridge or ""} - {""}

    def followers(self, state: State) -> set[str]:
        return {*self._children.get(state.digest, ()), *self._bridged.get(state.digest, ())}

    def tips(self) -> list[State]:
        """The states that no other descends from, the best first."""
        tips = [state for state in self._states.values() if not self.is_followed(state)]
        return sorted(tips, key=_rank, reverse=True)

    # -- ancestors

    def _ancestor(self, state: State) -> State | None:
        """Of an earlier round: so no story of a state, told later, can lead in a circle."""
        found = self._parent(state) or self._states.get(state.bridge or "")
        return found if found is not None and found.round < state.round else None

    def _parent(self, state: State) -> State | None:
        """If it is known, and sums and rounds follow from it."""
        parent = self._states.get(state.parent)
        follows = parent is not None and (state.round, state.samples) == (parent.round + 1, parent.samples + state.own_samples)
        return parent if follows else None

    def _likely_ancestor(self, state: State) -> str:
        """The best state of an earlier round that has no more samples than `state` had before its members; '' for none.

        Without it one lost report would make all work before it leasable again.
        """
        before = state.samples - state.own_samples
        others = (other for other in self._states.values() if other.digest != state.digest)
        older = (other for other in others if other.round < state.round - 1 and other.samples <= before)
        return best.digest if (best := max(older, key=_rank, default=None)) else ""

    def _set_bridge(self, state: State, ancestor: str | None) -> None:
        if state.digest in self._bridged.get(state.bridge or "", ()):
            _drop(self._bridged, state.bridge, state.digest)
        state.bridge = ancestor
        if ancestor:
            self._bridged[ancestor].append(state.digest)

    def _descendants(self, states: Iterable[State]) -> list[State]:
        """These states and all that are counted on top of them, each once, ancestors first."""
        found = {state.digest: state for state in states}
        waiting = list(found.values())
        for one in waiting:
            linked = map(self._states.__getitem__, (*self._children.get(one.digest, ()), *self._bridged.get(one.digest, ())))
            new = [child for child in linked if child.digest not in found and self._ancestor(child) is one]
            found |= {child.digest: child for child in new}
            waiting += new
        return sorted(waiting, key=lambda state: state.round)

    # -- who stands where

    def _hear(self, state: State, reporter: str) -> None:
        if self.has_moved(reporter, state):
            self._stand(reporter, state)

    def _stand(self, reporter: str, state: State | None) -> None:
        if (before := self._states.get(self._stands.pop(reporter, ""))) is not None:
            before.standing.discard(reporter)
        if state is not None:
            self._stands[reporter] = state.digest
            state.standing.add(reporter)
        self.moves[reporter] = state.digest if state is not None else ""

    def _is_live(self, state: State) -> bool:
        """Whether somebody stands on it, or on what is counted on top of it."""
        return bool(state.standing) or any(one.standing for one in self._descendants([state]))

    def _live_of(self, states: Sequence[State]) -> set[str]:
        """Those of them that are live, ancestors first, and no descendant of theirs is missing: each is looked at once."""
        live: set[str] = set()
        for one in reversed(states):
            if one.standing or one.digest in live:
                live.add(one.digest)
                if (ancestor := self._ancestor(one)) is not None:
                    live.add(ancestor.digest)
        return live

    def _prefer(self, state: State) -> None:
        """Make `state`, which is live, the head, or one before it, if that is better: one that adds nothing comes after its parent."""
        for one in self.back(state):
            if self.head is not None and one.counted < self.head.counted:
                return
            if self.head is None or _rank(one) > _rank(self.head):
                self.head = one

    def _leave_what_all_have_left(self) -> None:
        if self.head is not None and not self._is_live(self.head):
            self.head = self._best()

    def _best(self) -> State | None:
        """Of the states that somebody stands on, and those before them, the first by rank; of all where nobody stands anywhere."""
        live: dict[str, State] = {}
        for state in (one for one in self._states.values() if one.standing):
            for ancestor in self.back(state):
                if ancestor.digest in live:
                    break
                live[ancestor.digest] = ancestor
        return max((live or self._states).values(), key=_rank, default=None)

    # -- counting

    def _count_from(self, *states: State) -> None:
        """Count states anew, and with them all that descend from them; usually it is the newest one, and nothing does."""
        fell = False
        for one in self._descendants(states):
            before, ancestor = one.counted, self._ancestor(one)
            one.own = self._own_count(one, ancestor)
            one.counted, one.gaps = self._weigh(one, ancestor, one.own)
            fell = fell or one.counted < before
            self._prefer_live(one)
        if fell:
            self.head = self._best()

    def _prefer_live(self, state: State) -> None:
        if self.head is None or (state.counted >= self.head.counted and self._is_live(state)):
            self._prefer(state)

    def _weigh(self, state: State, ancestor: State | None, own: int) -> tuple[int, int]:
        """Counted samples and gaps of a state that adds `own` on top of `ancestor`."""
        counted, gaps = (ancestor.counted, ancestor.gaps) if ancestor else (0, 0)
        return counted + own, gaps + self.has_gap(state)

    def _count_of(self, pair: ContributionId, samples: int) -> int:
        """Of a member that is said to have `samples`: no more than it registered, nor than two rounds have."""
        return min(samples, self._registered(pair), self._most or samples)

    def _own_count(self, state: State, ancestor: State | None) -> int:
        """What its members add: nothing that an ancestor has."""
        counts = {(peer, number): self._count_of((peer, number), samples) for peer, number, samples in state.members}
        counts = {pair: count for pair, count in counts.items() if count}  # who reports may name 512 that nobody registered
        return sum(counts.values()) - sum(counts[pair] for pair in self._earlier(state, counts, ancestor))

    def _earlier(self, state: State, pairs: Iterable[ContributionId], ancestor: State | None) -> set[ContributionId]:
        """Those of `pairs` that `ancestor`, or one before it, has. The chain is walked once for all of them, and only as far back as one of them is."""
        others = {pair: [digest for digest in self._having.get(pair, ()) if digest != state.digest] for pair in pairs}
        self.steps += sum(map(len, others.values()))
        first = min((self._states[digest].round for some in others.values() for digest in some), default=None)
        if first is None:
            return set()
        chain: set[str] = set()
        while ancestor is not None and ancestor.round >= first:
            chain.add(ancestor.digest)
            ancestor = self._ancestor(ancestor)
        self.steps += _STEPS_OF_AN_ANCESTOR * len(chain)
        return {pair for pair, some in others.items() if not chain.isdisjoint(some)}

    def _forget(self, state: State) -> None:
        self._set_bridge(state, None)
        del self._states[state.digest]
        _drop(self._children, state.parent, state.digest)
        for reporter in list(state.standing):
            told = [other for other in self._states.values() if reporter in other.reporters]
            self._stand(reporter, max(told, key=lambda other: other.round, default=None))
        for pair in state.contributions():
            _drop(self._having, pair, state.digest)


def _drop(digests: dict[Any, list[str]], key: Any, digest: str) -> None:
    digests[key].remove(digest)
    if not digests[key]:  # who reports and is forgotten again names new peers each time
        del digests[key]


def spare(tree: StateTree, states: Iterable[State], most_members: int) -> list[str]:
    """Of these states those that may be forgotten, the least first and none before what follows it, so that the others have no more than
    `most_members` together."""
    kept = {state.digest for state in tree.chain()}
    extra = {state.digest: state for state in states if state.digest not in kept}
    over = sum(map(_members_counted, extra.values())) - most_members
    if over <= 0:
        return []
    followers = {digest: tree.followers(state) for digest, state in extra.items()}
    tips, gone = [(_rank(state), digest) for digest, state in extra.items() if not followers[digest]], []
    heapq.heapify(tips)
    while over > 0 and tips:
        _, digest = heapq.heappop(tips)
        gone.append(digest)
        over -= _members_counted(extra[digest])
        for earlier in tree.follows(extra[digest]) & extra.keys():
            followers[earlier].discard(digest)
            if not followers[earlier]:
                heapq.heappush(tips, (_rank(extra[earlier]), earlier))
    return gone


def _members_counted(state: State) -> int:
    """As 64 each at least, for a report may be compared with each state: a thousand, not one for each member."""
    return max(len(state.members), _FEWEST_COUNTED)


def _rank(state: State) -> tuple[int, ...]:
    """More counted samples; then fewer gaps. Where nothing is counted (peers bring their own data): the later round, then more samples.

    Else the earlier round: a state that adds nothing the ledger knows of waits until one after it does. Of two means of one group, of which a
    reducer has told both, that which more owners stand on, then more peers.
    """
    later = -state.round if state.counted else state.round
    return state.counted, -state.gaps, later, state.samples, state.owners, len(state.reporters), -int(state.digest, 16)
