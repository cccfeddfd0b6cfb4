"""Reducers that sign two means of one share (`scripts/attacks/two_faced.py`): what they say that they did, and who is banned for it.

Where one has lied to a member, that member's state is another one than the others'. That alone breaks no promise; that an honest peer is
banned does, and that nobody has a proof after many such rounds.
"""

from collections.abc import Collection, Iterable

MOST_PARTED = 20
"""Rounds in which a lie makes two states, until somebody has proven it. Two may fall silent at once, or die, and compare nothing."""
Made = tuple[str, tuple[tuple[str, int, int], ...]]
"""A round: the parent of its state, and its members."""


class Lies:
    def __init__(self) -> None:
        self._told: set[Made] = set()
        self.parted: set[Made] = set()
        """Rounds of which a lie has made two states."""
        self.proven: dict[str, int] = {}
        """Peers that are proven to have lied, and in how many rounds they had parted others when it was first heard."""

    def told(self, parent: str, members: Iterable[tuple[str, int, int]]) -> None:
        """A liar has given one member of that round another mean than the others."""
        self._told.add((parent, tuple(tuple(member) for member in members)))

    def may_differ(self, made: Made) -> bool:
        return made in self._told

    def parts(self, made: Made) -> str:
        """A round of a liar has made a second state: what is wrong with that; '' when nothing is."""
        self.parted.add(made)
        return f"lies have parted members {MOST_PARTED} times, and nobody has a proof" if len(self.parted) >= MOST_PARTED and not self.proven else ""

    def proves(self, accused: str, liars: Collection[str]) -> str:
        """Somebody has a proof against `accused`: what is wrong with that; '' when nothing is."""
        self.proven.setdefault(accused, len(self.parted))
        return "" if accused in liars else f"the honest peer {accused[-6:]} is banned by a proof"
