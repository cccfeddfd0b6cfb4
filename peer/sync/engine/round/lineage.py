"""Which state descends from which, as far as it is known: from headers that we hold, and from what others sign of theirs."""

from peer.sync.engine.state import ELDER_CHARACTERS, Head, Header

_MOST = 4096
"""States remembered, the last learned; 0.6 MB."""
_FURTHEST = 512
"""Rounds back that are looked through."""


class Lineage:
    """A state's record names its last 8 ancestors; what is learned from many of them in turn reaches further back, and our own header does."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}
        self._learned: dict[str, tuple[str, ...]] = {}
        """State -> the ancestors that were last learned of it: most records say what we have read a moment ago."""
        self._traced: dict[str, str] = {}
        """Of each state whose header we have read: where its line was ours last, as the beginning of that ancestor's digest."""
        self._age: dict[str, int] = {}
        """Of our state and its ancestors, by the beginnings of their digests: how many rounds ago."""

    def stand(self, state: Head, header: Header) -> None:
        """We hold `state`, with this header."""
        self.learn(state, proven=True)
        line = "".join(digest[:ELDER_CHARACTERS] for digest in (state.digest, *state.parents)) + header.elders
        self._age = {line[at : at + ELDER_CHARACTERS]: at for at in reversed(range(0, len(line), ELDER_CHARACTERS))}

    def learn(self, state: Head, *, proven: bool = False) -> None:
        """`state` has the ancestors that it names. What was learned first stays, unless it is proven otherwise by a header that we hold."""
        if not proven and self.has_learned(state):
            return
        _put(self._learned, state.digest, state.parents)
        for child, parent in zip((state.digest, *state.parents), state.parents, strict=False):
            if proven or child not in self._parent:
                _put(self._parent, child, parent)

    def trace(self, state: Head, header: Header) -> None:
        """We have read the header of `state`, which names up to 512 ancestors: see where its line was ours."""
        for name in header.past():
            if name[:ELDER_CHARACTERS] in self._age:
                _put(self._traced, state.digest, name[:ELDER_CHARACTERS])
                return

    def has_learned(self, state: Head) -> bool:
        return self._learned.get(state.digest) == state.parents

    def holds(self, digest: str) -> bool:
        """Whether our state is that one, or comes after it."""
        return digest[:ELDER_CHARACTERS] in self._age

    def left_before(self, state: Head, ours: str) -> bool:
        """Whether `state` is known to be on a branch that left ours before `ours`, a state that `holds`."""
        self.learn(state)
        parted = self._met_at(state.digest)
        return parted is not None and parted > self._age[ours[:ELDER_CHARACTERS]]

    def meets(self, state: Head) -> bool:
        """Whether one of its ancestors is known to be our state, or an ancestor of ours."""
        return self._met_at(state.digest) is not None

    def _met_at(self, digest: str) -> int | None:
        """How many rounds ago its line was ours; None: that is not known."""
        for _ in range(_FURTHEST):
            if (age := self._age.get(digest[:ELDER_CHARACTERS])) is not None:
                return age
            if (parent := self._traced.get(digest) or self._parent.get(digest)) is None:
                return None
            digest = parent
        return None

    def descends(self, state: Head, ancestor: Head) -> bool:
        """Whether `state` is known to come after `ancestor`."""
        if state.samples <= ancestor.samples:  # each round adds some; spares the walk in most cases
            return False
        if (age := self._age.get(ancestor.digest[:ELDER_CHARACTERS])) is not None:
            parted = self._met_at(state.digest)
            return parted is not None and parted <= age
        digest = state.digest
        for _ in range(_FURTHEST):  # made-up ancestors may go round in a circle
            parent = self._parent.get(digest)
            if parent is None or parent == ancestor.digest:
                return parent is not None
            digest = parent
        return False


def _put(known: dict, key: str, value: object) -> None:
    known[key] = value
    while len(known) > _MOST:
        del known[next(iter(known))]
