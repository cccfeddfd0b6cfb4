"""Which contributions are in the head and its ancestors, and what follows from that for those that are not."""

from collections.abc import Iterable

from datasetserver.tree import Contribution, State, StateTree


class Lineage:
    """included: all contributions of the head's chain. last: the number of each peer's last one, as far back as every state of the chain was
    reported. Read again by `read`, or made longer by `extend` when a child follows the head."""

    def __init__(self, tree: StateTree):
        self._tree = tree
        self.read()

    def read(self) -> None:
        self.included: set[Contribution] = set()
        self.last: dict[str, int] = {}
        self._whole, known = True, ""
        for state in self._tree.chain():
            if state.parent != known if known else state.round != 1:
                self.last, self._whole = {}, False
            self.included |= set(state.contributions())
            self.last |= dict(state.contributions())
            known = state.digest

    def extend(self, head: State) -> None:
        """The head has a child, which is the new head."""
        self.last |= dict(head.contributions())
        self.included |= set(head.contributions())

    def passed(self, head: State, pending: Iterable[Contribution]) -> list[Contribution]:
        """Of what is pending, what members of `head`, a child of the head, registered between their last part in its chain and this one.

        No state takes an earlier contribution after a later one: its peer died, and another process of it goes on. One that may be in a
        state whose report was lost is not among them.
        """
        now = dict(head.contributions())
        earlier = sorted(pair for pair in pending if pair[1] < now.get(pair[0], 0))
        return [(peer, number) for peer, number in earlier if self.last.get(peer, 0 if self._whole else number) < number]
