"""The rounds before those that a state's header names: whoever fetches a state asks for them, reports them, and hands them on.

A header names the members of its last rounds. A dataset server may be away for longer than these take, and all who were in a round may leave
for good meanwhile. Then nobody would tell it whose samples are in that round, and it would have them trained again.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from peer.contracts import CommittedRound
from peer.sync.engine.cell import Cell
from peer.sync.engine.net.messages import MOST_PAST_ROUNDS, Fetch, PastRounds
from peer.sync.engine.net.streams import Channel, PeerLost, Streams
from peer.sync.engine.state import ANCESTORS_KEPT, ELDER_CHARACTERS, ELDERS_KEPT, MOST_MEMBERS, State

PAST = "distributed-diffusion.past.1"
_KEPT = 2 * (ANCESTORS_KEPT + ELDERS_KEPT)
"""Rounds; some are of branches that lost."""
_MOST_EARLIER = 48
"""With those that a header names fewer than the 64 final rounds that the trainer remembers."""
_MOST_MEMBERS = 4 * MOST_MEMBERS
"""Of the rounds in one answer, for which a message has room."""
_SECONDS = 10.0
_PAUSE_SECONDS, _FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 1.0, 15.0, 3600.0
"""After an answer: the trainer remembers the last 64 final rounds, and those that come now are to be among them. After none: doubled each time."""


class Past:
    """known: from our own disk. learned: told of rounds of our lineage that we did not know, all of them final."""

    def __init__(
        self,
        streams: Streams,
        state: Cell[State],
        others: Callable[[], Collection[str]],
        learned: Callable[[list[CommittedRound]], None],
        known: Iterable[CommittedRound] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._streams, self._state, self._others, self._learned, self._clock = streams, state, others, learned, clock
        self._known = {each.digest: each for each in known}
        self._failures, self._next = 0, 0.0
        self._oldest: CommittedRound | None = None
        self._digest = ""
        self.moved(state.value)
        self._told = {each.digest for each in self.earlier()}
        """From the start on, by `Finality`."""

    async def serve(self) -> None:
        await self._streams.serve(PAST, self._answer)

    def moved(self, state: State) -> None:
        """Our state is `state`, and its header names the last rounds."""
        named = [*reversed(state.header.ancestors), *([state.header.committed_round(state.digest)] if state.header.round else [])]
        self._keep(named)
        if self._digest not in state.header.parents:
            self._oldest = named[0] if named else None
        self._digest = state.digest

    def _keep(self, rounds: Iterable[CommittedRound]) -> None:
        for each in rounds:
            self._known.setdefault(each.digest, each)
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]

    def _from(self, digest: str) -> Iterator[CommittedRound]:
        """The round that made the state `digest`, and those before it, as far as they are known. Each is one before the other: what was told may
        lead in a circle."""
        newer = None
        while (each := self._known.get(digest)) is not None and (newer is None or each.round == newer.round - 1):
            yield each
            newer, digest = each, each.parent

    def earlier(self) -> list[CommittedRound]:
        """The last rounds of our lineage before those whose members our header names, as far as our disk knows them, oldest first.

        A peer that was cut off made eleven rounds alone, and lost power before they were final: its header names eight. There may be a gap:
        it made twelve, and fetched round 30 of others who had gone on from there.
        """
        header = self._state.value.header
        older = (each for each in self._known.values() if each.round < header.round - len(header.ancestors))
        ours = [each for each in older if (name := self._name(each.round)) and each.digest.startswith(name)]
        return sorted(ours, key=lambda each: each.round)[-_MOST_EARLIER:]

    # ---------------------------------------------------------------- what we do not know

    def missing(self) -> CommittedRound | None:
        """The oldest round of our lineage that we know without a gap, where our header proves who was before it."""
        for each in self._from(self._oldest.parent) if self._oldest else ():
            self._oldest = each
        is_missing = self._oldest is not None and self._oldest.round > 1 and self._name(self._oldest.round - 2)
        return self._oldest if is_missing else None

    def _name(self, round: int) -> str:
        """What the digest of our ancestor of that round begins with, by our header; '' where it does not say."""
        header = self._state.value.header
        back = header.round - round - 1
        if back < 0:
            return ""
        if back < len(header.parents):
            return header.parents[back]
        at = (back - len(header.parents)) * ELDER_CHARACTERS
        return header.elders[at : at + ELDER_CHARACTERS]

    async def ask_forever(self, bell_until: Callable) -> None:
        while True:
            await bell_until(lambda: self._clock() >= self._next and self.missing())
            self._failures = 0 if await self._ask() else self._failures + 1
            pause = min(_FIRST_RETRY_SECONDS * 2 ** (self._failures - 1), _LONGEST_RETRY_SECONDS) if self._failures else _PAUSE_SECONDS
            self._next = self._clock() + pause

    async def _ask(self) -> bool:
        """Whether one of the others knew more than we."""
        state = self._state.value
        for peer in self._others():
            with contextlib.suppress(PeerLost):
                before = self.missing()
                if before is None:
                    return True  # our own state is another one meanwhile
                told = await self._asked(peer, before.parent)
                if self._state.value is not state and state.digest not in self._state.value.header.parents:
                    return True  # we ask anew, once our disk has this one: only then is what was before it final
                if rounds := self._proven(before, told):
                    self._keep(rounds)
                    self._learned([each for each in rounds[::-1] if each.digest not in self._told])
                    return True
        return False

    async def _asked(self, peer: str, digest: str) -> tuple[CommittedRound, ...]:
        with contextlib.closing(await self._streams.open(peer, PAST)) as channel:
            await channel.send(Fetch(digest=digest), seconds=_SECONDS)
            return (await channel.receive(PastRounds, seconds=_SECONDS))[0].rounds

    def _proven(self, newer: CommittedRound, rounds: Iterable[CommittedRound]) -> list[CommittedRound]:
        """Those that lead from `newer` backwards. Our header proves their digests; of the members only how many samples they had together.

        So what we know already stays. A peer that lies may name other members, and only whoever made a round alone knows better.
        """
        proven = []
        for told in rounds:
            each = self._known.get(told.digest, told)
            samples = newer.samples - sum(member.samples for member in newer.members)
            follows = (each.digest, each.round, each.samples) == (newer.parent, newer.round - 1, samples)
            names = self._name(each.round), self._name(each.round - 1)
            named = all(names) and each.digest.startswith(names[0]) and each.parent.startswith(names[1])
            whole = each.members and all(member.samples and member.number for member in each.members)
            if not (follows and named and whole):
                break
            proven.append(newer := each)
        return proven

    # ---------------------------------------------------------------- what others ask us

    async def _answer(self, channel: Channel) -> None:
        wanted, _ = await channel.receive(Fetch, seconds=_SECONDS)
        rounds, room = [], _MOST_MEMBERS
        for each in itertools.islice(self._from(wanted.digest), MOST_PAST_ROUNDS):
            room -= len(each.members)
            if room < 0:
                break
            rounds.append(each)
        await channel.send(PastRounds(rounds=tuple(rounds)), seconds=_SECONDS)
