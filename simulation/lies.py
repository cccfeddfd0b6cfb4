"""Reducers that sign two means of one share, or a wrong one (`scripts/attacks/two_faced.py`, `wrong_mean.py`). They say what they did; who is banned
for it, the honest say.

Where one has lied to a member, that member's state is another one than the others'. That alone breaks no promise; that an honest peer is
banned does, and that nobody has a proof after many such rounds.
"""

from collections.abc import Collection, Iterable

MOST_PARTED = 20
"""Rounds in which a lie makes two states, until somebody has proven it. Two may fall silent at once, or die, and compare nothing."""
MOST_TAKEN = 20
"""Rounds in which all take a wrong mean, at most, before somebody proves it."""
Made = tuple[str, tuple[tuple[str, int, int], ...]]
"""A round: the parent of its state, and its members."""


class Lies:
    def __init__(self) -> None:
        self._told: dict[Made, str] = {}
        """Rounds of liars, and who gave all the same wrong mean; '' where some got the right one."""
        self.parted: set[Made] = set()
        """Rounds of which a lie has made two states."""
        self.taken: dict[str, set[Made]] = {}
        """Of each liar that gives all a wrong mean: its rounds of which somebody has made a state."""
        self.proven: dict[str, int] = {}
        """Peers that are proven to have lied, and in how many rounds they had parted others when it was first heard."""

    def told(self, parent: str, members: Iterable[tuple[str, int, int]], to_all_by: str = "") -> None:
        """A liar has given one member of that round another mean than the others, or, if it is named, all a wrong one."""
        self._told[parent, tuple(tuple(member) for member in members)] = to_all_by

    def may_differ(self, made: Made) -> bool:
        return made in self._told

    def parts(self, made: Made) -> str:
        """A round of a liar has made a second state: what is wrong with that; '' when nothing is."""
        self.parted.add(made)
        return f"lies have parted members {MOST_PARTED} times, and nobody has a proof" if len(self.parted) >= MOST_PARTED and not self.proven else ""

    def takes(self, made: Made) -> str:
        """Somebody has made a state of that round: what is wrong with that; '' when nothing is."""
        if not (liar := self._told.get(made, "")):
            return ""
        taken = self.taken.setdefault(liar, set())
        taken.add(made)
        return f"members took a wrong mean {MOST_TAKEN} times, and nobody has a proof" if len(taken) >= MOST_TAKEN and liar not in self.proven else ""

    def made(self, made: Made) -> bool:
        """Whether a liar gave all a wrong mean in that round."""
        return bool(self._told.get(made))

    def proves(self, accused: str, liars: Collection[str]) -> str:
        """Somebody has a proof against `accused`: what is wrong with that; '' when nothing is."""
        self.proven.setdefault(accused, len(self.parted))
        return "" if accused in liars else f"the honest peer {accused[-6:]} is banned by a proof"
