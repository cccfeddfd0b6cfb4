"""The settled states of a run as a tree, and which of them is right."""

from collections.abc import Iterator
from dataclasses import dataclass, field

Contribution = tuple[str, int]
"""A peer and the number of its contribution."""


@dataclass
class State:
    """A settled state; `members` are (peer, number, samples) of the contributions averaged into it, `reporters` who told us."""

    digest: str
    parent: str
    round: int
    samples: int
    members: tuple[tuple[str, int, int], ...]
    reporters: list[str] = field(default_factory=list)

    @property
    def own_samples(self) -> int:
        return sum(samples for _, _, samples in self.members)

    def equals(self, other: "State") -> bool:
        """Whether both say the same, whoever reported them."""
        mine, its = ((s.digest, s.parent, s.round, s.samples, sorted(s.members)) for s in (self, other))
        return mine == its

    def contributions(self) -> Iterator[Contribution]:
        return ((peer, number) for peer, number, _ in self.members)


class StateTree:
    """States by digest. The head: a descendant beats its ancestor; else more samples; else the smaller digest.

    A descendant always has more samples (`contradiction` refuses others), so the best by samples is the head.
    """

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._children: dict[str, list[str]] = {}
        self.head: State | None = None

    def get(self, digest: str) -> State | None:
        return self._states.get(digest)

    def add(self, state: State) -> None:
        self._states[state.digest] = state
        self._children.setdefault(state.parent, []).append(state.digest)
        if self.head is None or _rank(state) > _rank(self.head):
            self.head = state

    def contradiction(self, state: State) -> str | None:
        """Why a state cannot be true beside those known, or None. Sums and rounds must follow from parent to child."""
        if state.digest == state.parent:
            return "it is its own parent"
        if len({peer for peer, _, _ in state.members}) != len(state.members):
            return "a peer is in it twice"
        if state.round == 1 and state.samples != state.own_samples:
            return f"it is the first round, has {state.samples} samples, and its members {state.own_samples}"
        if state.samples < state.own_samples:
            return f"it has {state.samples} samples, and its members alone {state.own_samples}"
        parent = self._states.get(state.parent)
        children = [self._states[digest] for digest in self._children.get(state.digest, [])]
        for older, newer in [(parent, state)] * (parent is not None) + [(state, child) for child in children]:
            if newer.round != older.round + 1:
                return f"round {newer.round} cannot follow round {older.round}"
            if newer.samples != older.samples + newer.own_samples:
                return f"{older.samples} samples before and {newer.own_samples} of the members make not {newer.samples}"
        return None

    def chain(self) -> list[State]:
        """The head and its ancestors, the oldest first."""
        states, state = [], self.head
        while state is not None:
            states.append(state)
            state = self._states.get(state.parent) or self._bridge(state)
        return states[::-1]

    def _bridge(self, state: State) -> State | None:
        """The likely ancestor across a report that never came: the best known state of an earlier round with no more samples than ours had before its members.

        Without it one lost report would make all work before it leasable again.
        """
        older = [
            other for other in self._states.values() if other.round < state.round - 1 and other.samples <= state.samples - state.own_samples
        ]
        return max(older, key=_rank, default=None)


def _rank(state: State) -> tuple[int, int]:
    return state.samples, -int(state.digest, 16)
