"""What peers report of final states: which word is taken, which is discarded or forgotten, and what the host's server answers for.

Changes are written to SQLite by `Store.flush`. What follows from them for samples is the `Book`'s: each method says what has changed.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from enum import Enum, auto

from datasetserver.holdings import Holdings
from datasetserver.owners import NOBODY, Owners
from datasetserver.refused import Refused
from datasetserver.store import Store
from datasetserver.tree import ContributionId, State, StateTree, spare

_MOST_REPORTERS = 64
_MOST_UNTAKEN = 64
"""Other stories of one owner: of a round that is new all peers tell within seconds, after an outage of many. No liar tells more at once."""
_MOST_SPARE_MEMBERS = 1 << 16
"""In all states that one owner's peers were the first to report and that are not on the head's chain: about 10 MB, or 1,000 rounds of 64 peers."""
_SPARE_EVERY = 32
"""Such reports of one owner, after which all states are looked at for what is spare: 60 ms in a run of 10,000 rounds."""
_MOST_DISCARDED = 10_000


class News(Enum):
    """What a report has changed."""

    NOTHING = auto()
    BACKED = auto()
    """A second owner's peer stands behind a state that is known."""
    ADDED = auto()
    """There is one state more, that nothing follows: the head may have moved to it."""
    REDRAWN = auto()
    """The head's chain may be another though the head is not."""


class Reports:
    """The final states that were reported, as a tree, read from `store`.

    registered, most: see `StateTree`. owners: who answers for the peers that report.
    """

    def __init__(self, store: Store, owners: Owners, registered: Callable[[ContributionId], int], most: int = 0):
        self._store, self._owners = store, owners
        self._countersigned, self._discarded = store.countersigned(), store.discarded()
        self._said_to_follow = store.after_discarded()
        """Digests of states that somebody has reported to follow a discarded one. Only a report says so, so another may say otherwise."""
        self._untaken: defaultdict[str, dict[str, State]] = defaultdict(dict)
        """By owner and digest, stories of known states that were not taken, or are not any more: another owner may tell the same."""
        self._unlooked: Counter[str] = Counter()
        """By owner, reports since we looked for what is spare."""
        self._sure = ""
        """The newest state of the head's chain that we know peers of two owners to stand behind; '': none."""
        self.tree = StateTree(registered, most)
        for state in store.states():
            state.owners = len(self._witnesses(state))
            self.tree.add(state)
        self.tree.stood(store.places())

    def add(self, state: State, reporter: str) -> News:
        """Take note of a final state. Refused with 409 when it contradicts itself, or what is known of that state, or was discarded."""
        known = self.tree.get(state.digest)
        if known and known.equals(state):
            return self._add_reporter(known, reporter)
        if known:
            return self._add_another_story(state, reporter)
        if wrong := self.tree.contradiction(state):
            raise Refused(409, "contradiction", f"State {state.digest[:16]} cannot be: {wrong}.", "Catch up with the swarm.")
        self._refuse_discarded(state)
        state.reporters, before = self._tellers(state, reporter), self.tree.head
        state.owners = len(self._witnesses(state))
        self.tree.add(state)
        self._store.set_state(state)
        self._keep_places()
        if before is None or state is not self.tree.head or state.parent != before.digest:  # else it is as ever, and nothing is left over
            self._forget_spare(state)
        return News.REDRAWN if self.tree.is_followed(state) else News.ADDED

    def _add_reporter(self, known: State, reporter: str) -> News:
        witnesses, listed = self._witnesses(known), reporter in known.reporters
        another = len(witnesses) == 1 and self._owners.of(reporter) not in witnesses
        if not listed and (another or len(known.reporters) < _MOST_REPORTERS):
            known.reporters.append(reporter)
            known.owners = len(self._witnesses(known))
            self._store.set_state(known)
        # Where one stands that no state lists is not kept: anybody may invent any number of these.
        elif not (self.tree.stands_somewhere(reporter) and self.tree.has_moved(reporter, known)):
            return News.NOTHING
        redrawn = self.tree.heard_again(known, reporter)
        self._keep_places()
        return News.REDRAWN if redrawn else News.BACKED if another else News.NOTHING

    def _keep_places(self) -> None:
        for reporter, digest in self.tree.moves.items():
            self._store.set_place(reporter, digest)
        self.tree.moves.clear()

    def _add_another_story(self, state: State, reporter: str) -> News:
        """A known state was reported with other figures. Refused with 409 where more owners tell those before, or as many and they count as much.

        Who lies may be the first to report a state, and say of it that it holds nothing of the others. And who lies may be the last: that the state of
        an honest peer follows one of his own.
        """
        known = self.tree.get(state.digest)
        known.owners = len(self._witnesses(known))  # a token may be another's by now
        state.reporters = self._tellers(state, reporter)
        state.owners = len(self._witnesses(state))
        wrong = self.tree.contradiction(state) or state.parent in self._discarded
        if wrong or not self.tree.outweighs(state):
            if not wrong:
                self._keep_untaken(state, reporter)
            raise Refused(409, "contradiction", f"State {state.digest[:16]} was reported with other figures before.", "Catch up with the swarm.")
        for before in known.reporters:
            self._keep_untaken(known, before)
        for told in (state, *self.tree.replace(state)):
            self._store.set_state(told)
        self._keep_places()
        return News.REDRAWN

    def _tellers(self, state: State, reporter: str) -> list[str]:
        """`reporter`, and of the other owners those peers that told the same before."""
        told = (stories.get(state.digest) for other, stories in self._untaken.items() if other != self._owners.of(reporter))
        return [*(one.reporters[0] for one in told if one is not None and one.equals(state)), reporter]

    def _keep_untaken(self, state: State, reporter: str) -> None:
        stories = self._untaken[self._owners.of(reporter)]
        stories.pop(state.digest, None)
        stories[state.digest] = replace(state, reporters=[reporter], standing=set())
        if len(stories) > _MOST_UNTAKEN:
            del stories[next(iter(stories))]

    def _refuse_discarded(self, state: State) -> None:
        if self._discarded.isdisjoint((state.digest, state.parent)) and state.parent not in self._said_to_follow:
            if state.digest in self._said_to_follow:
                self._said_to_follow.remove(state.digest)
                self._store.clear_after_discarded(state.digest)
            return
        if len(self._said_to_follow) < _MOST_DISCARDED:
            self._store.set_after_discarded(state.digest)
            self._said_to_follow.add(state.digest)  # so that what follows it is refused, too, until somebody says that it follows another state
        message = f"The host has discarded state {state.digest[:16]}, or one before it."
        raise Refused(409, "discarded", message, "Start again: dd-peer goes on from what was before it.")

    def _forget_spare(self, new: State) -> None:
        """Reports that are on no chain of ours take room; the least of those that the same owner's peers brought make way."""
        owner = self._owners.of(new.reporters[0])
        self._unlooked[owner] += 1
        if self._unlooked[owner] >= _SPARE_EVERY:
            del self._unlooked[owner]
            self._remove(*spare(self.tree, [s for s in self.tree if self._owners.of(s.reporters[0]) == owner], _MOST_SPARE_MEMBERS))

    # -- what the host has discarded

    def are_new(self, digests: Collection[str]) -> set[str]:
        """Those of them that are not discarded yet."""
        return set(digests) - self._discarded

    def discard(self, digests: Collection[str]) -> None:
        """Forget these states for good, and all that are said to descend from them until somebody says otherwise. The head's chain may be another then."""
        for digest in sorted(digests):
            gone = {state.digest for state in self._remove(digest)}
            for follower in sorted(gone - {digest}):
                self._said_to_follow.add(follower)
                self._store.set_after_discarded(follower)
            self._discarded.add(digest)
            self._store.discard(digest)
            if self._countersigned in gone:
                self._countersigned = ""
                self._store.set_countersigned("")

    def _remove(self, *digests: str) -> list[State]:
        gone, moved = self.tree.remove(*digests)
        for state in gone:
            self._store.remove_state(state.digest)
        for state in moved:
            self._store.set_state(state)
        self._keep_places()
        return gone

    # -- who stands behind a state

    def settle(self, holdings: Holdings, *, anew: bool = False) -> None:
        """Make room for receipts again, by what the head's chain holds, and by who reported that. anew: by all of the chain, which is another one.

        A report of a state speaks for all before it. So this goes back from the head to the newest state that had two owners behind it before.
        A lost report changes nothing: what a state holds, and what came before that of the same peer, is in no later one.
        """
        if anew:
            self._sure = ""
        witnesses = {NOBODY} if self._owners.one else set()
        numbers: dict[str, int] = {}  # each peer's last, of the states with these witnesses
        sure = ""
        for state in self.tree.back():
            if state.digest == self._sure:
                break
            if not self._witnesses(state) <= witnesses:
                holdings.settle(numbers.items(), witnesses)
                witnesses, numbers = witnesses | self._witnesses(state), {}
            sure = sure or (state.digest if len(witnesses) > 1 else "")
            for peer, number in state.contributions():
                numbers.setdefault(peer, number)
        holdings.settle(numbers.items(), witnesses)
        self._sure = sure or self._sure

    def countersign(self) -> str:
        """The state that the host's server answers for: of the head's chain the newest that peers of two owners stand behind; '' for none.

        It descends from the one before, unless the host has discarded that: so of two branches only one ever has any. While the head is on
        another branch there is none: peers take over what is countersigned, and nobody is to go back to a branch that the run has left.
        """
        last, sure = "" if self._countersigned in self._discarded else self._countersigned, self.sure
        if sure is not None and (not last or any(state.digest == last for state in self.tree.back(sure))):
            last = sure.digest
        if last != self._countersigned:
            self._countersigned = last
            self._store.set_countersigned(last)
        return last if last and any(state.digest == last for state in self.tree.back()) else ""

    @property
    def sure(self) -> State | None:
        """The newest state of the head's chain that we know peers of two owners to stand behind. A head may be one peer's word."""
        return self.tree.get(self._sure)

    def _witnesses(self, state: State) -> set[str]:
        return {self._owners.of(reporter) for reporter in state.reporters}
