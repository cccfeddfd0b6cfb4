"""Which contributions are in the head and its ancestors, and what follows from that for those that are not."""

from collections.abc import Callable, Iterable

from datasetserver.tree import ContributionId, State, StateTree


class Lineage:
    """included: all contributions of the head's chain. last: the number of each peer's last one that it has registered, as far back as every
    state of the chain was reported. Read again by `read`, or made longer by `extend` when a child follows the head.

    registered: the samples of a contribution, 0 for one that its peer has not told of. A report alone may name any number: by it a liar could
    have all that others have pending withdrawn.
    """

    def __init__(self, tree: StateTree, registered: Callable[[ContributionId], int]):
        self._tree, self._registered = tree, registered
        self.read()

    def read(self) -> None:
        self.included: set[ContributionId] = set()
        self.last: dict[str, int] = {}
        self._whole, known = True, ""
        since: set[ContributionId] = set()
        for state in self._tree.chain():
            if state.parent != known if known else state.round != 1:
                self.last, self._whole, since = {}, False, set()
            here = set(state.contributions())
            self.included |= here
            since |= here
            self.last |= self._numbers(state)
            known = state.digest
        self._before_gap = self.included - since
        """What is in the chain before the last state that was not reported."""

    def extend(self, head: State) -> None:
        """The head has a child, which is the new head."""
        self.last |= self._numbers(head)
        self.included |= set(head.contributions())

    def _numbers(self, state: State) -> dict[str, int]:
        return {peer: number for peer, number in state.contributions() if self._registered((peer, number))}

    def passed(self, head: State, pending: Iterable[ContributionId]) -> list[ContributionId]:
        """Of what is pending, what members of `head`, a child of the head, registered between their last part in its chain and this one.

        No state takes an earlier contribution after a later one: its peer died, and another process of it goes on. One that may be in a
        state whose report was lost is not among them.
        """
        now = self._numbers(head)
        earlier = sorted(pair for pair in pending if pair[1] < now.get(pair[0], 0))
        return [(peer, number) for peer, number in earlier if self._before(peer, number) < number]

    def came(self, peer: str, number: int, pending: Iterable[ContributionId]) -> list[ContributionId]:
        """As `passed`, of a contribution of the chain that is registered only now."""
        before = self._before(peer, number)
        if (peer, number) not in self._before_gap:  # later ones may be in the state that was not reported
            self.last[peer] = max(before, number)
        return sorted(pair for pair in pending if pair[0] == peer and before < pair[1] < number)

    def _before(self, peer: str, number: int) -> int:
        """The peer's last one in the chain, `number` where none is known for certain."""
        return self.last.get(peer, 0 if self._whole else number)
