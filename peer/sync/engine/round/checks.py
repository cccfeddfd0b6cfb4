"""Spot checks: some members average a slice of a round's mean once more, from what all members sent, signed by each (docs/decisions/0030).

Who checks draws itself, by the one signature that its key makes of the state. So nobody knows beforehand who will look, and nobody can draw
twice. A check asks each member of the group once. What comes of it is laid together as a proof, and is one if it holds (`swarm/wrong_means.py`).
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from peer.sync.engine.certificate import Signs
from peer.sync.engine.codec import Part, Wire
from peer.sync.engine.net.messages import MOST_LOOKS, Look, Looked, Sought, WrongMeans
from peer.sync.engine.net.streams import Channel, PeerLost, Streams
from peer.sync.engine.round.groups import Group
from peer.sync.engine.round.rounds import Round
from peer.sync.engine.round.share_seals import SealedShare, part_hash
from peer.sync.engine.round.telling import Telling, each
from swarm.digest import seed_of
from swarm.proofs import Proofs
from swarm.records import PeerRecord
from swarm.run_config import RunConfig
from swarm.slices import tree_digest
from swarm.statements import lot_statement
from swarm.wrong_means import MOST_GROUP_BYTES, Place, Slice, WrongMean, is_checked

log = logging.getLogger(__name__)

INPUTS, WRONG = "distributed-diffusion.inputs.1", "distributed-diffusion.wrong-means.1"
CHECKERS = 3
"""Of a group, on average: with three, nobody looks at one round in twenty."""
_SECONDS = 10.0
_TRIES = 3
"""How often a peer is asked in one check, and answers one checker: it may commit some seconds after us, and a stream may break."""
_AGAIN_SECONDS = 3.0
_KEPT = 2
"""Groups: a check follows its round at once."""
_COPIED_BYTES = 64 << 20
"""Of a contribution: 20 ms. Where rounds follow at once, the trainer freezes the next one in that memory before anybody has asked. What is
longer is on its way for longer than a check takes."""


def is_drawn(lot: str, peers: int) -> bool:
    """Whether who drew this checks a round. peers: of its group."""
    return seed_of(lot) / 2**60 < CHECKERS / peers


@dataclass(frozen=True)
class _Kept:
    """A round that we averaged in. mine: what we brought; if that is long, in the trainer's memory, which it uses again."""

    group: Group
    state: str
    mine: Tensor | None
    sent: dict[str, tuple[bytes, ...]]
    asked: Counter[str] = field(default_factory=Counter)
    """Peer -> how often it was answered."""


@dataclass(frozen=True)
class _Seek:
    """One slice of the mean of a reducer's share."""

    reducer: str
    place: Place
    sealed: SealedShare
    mean: Slice


@dataclass
class _Check:
    """One round that we look at. said: what each peer has answered so far."""

    kept: _Kept
    lot: str
    seeks: tuple[_Seek, ...]
    said: dict[str, Looked] = field(default_factory=dict)

    @property
    def others(self) -> set[str]:
        """Who has to answer: the members. What a reducer took came with its mean."""
        return {member.peer for member in self.kept.group.members}

    def proofs(self) -> Iterable[WrongMean]:
        """Of each reducer about which all is known: a proof if it lied, and one that does not hold if it did not."""
        members = [member.peer for member in self.kept.group.members]
        for index, seek in enumerate(self.seeks):
            shown = [self.said[peer].slices for peer in members if peer in self.said]
            all_there = len(shown) == len(members) and all(len(slices) == len(self.seeks) for slices in shown)
            seen = {"place": seek.place, "mean": seek.mean, "sent": tuple(slices[index] for slices in shown)} if all_there else {}
            yield WrongMean(
                accused=seek.reducer, key=seek.sealed.key, signature=seek.sealed.signature, group=self.kept.group.described,
                means=tree_digest(seek.sealed.hashes), squares=seek.sealed.squares, inputs=seek.sealed.made_of, **seen,
            )  # fmt: skip


class SpotChecks:
    """others: the live peers' records; rng: what is looked at, and with whom proofs are swapped."""

    def __init__(
        self,
        run: RunConfig,
        node: Signs,
        streams: Streams,
        wire: Wire,
        proofs: Proofs,
        others: Callable[[], Collection[PeerRecord]],
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ):
        self._run, self._node, self._streams, self._wire, self._proofs = run, node, streams, wire, proofs
        self._rng = rng or random.SystemRandom()
        self._telling = Telling(others, self._swap, clock, self._rng)
        self._kept: deque[_Kept] = deque(maxlen=_KEPT)
        self._checks: deque[_Check] = deque(maxlen=_KEPT)
        self.looked = 0
        """Shares of which we have seen all that a verdict needs."""

    async def serve(self) -> None:
        await self._streams.serve(INPUTS, self._show)
        await self._streams.serve(WRONG, self._answer)

    # ---------------------------------------------------------------- after a round

    def averaged(self, done: Round, mine: Tensor | None) -> None:
        """Keep what others may ask for, and draw whether we look. mine: our contribution, encoded; None where we brought none."""
        mean, group = done.mean, done.group
        if not mean.shares and not mean.sent:
            return
        checked = is_checked(self._run, len(group.members)) and len(group.described) <= MOST_GROUP_BYTES
        if checked and mine is not None and mine.numel() <= _COPIED_BYTES:
            mine = mine.clone()
        kept = _Kept(group, done.state.digest, mine, mean.sent)
        self._kept.append(kept)
        if not checked:
            return
        lot = self._node.lot(lot_statement(self._run.digest, kept.state))
        if mean.shares and is_drawn(lot, len(group.peers)):
            reducers = self._rng.sample(sorted(mean.shares), min(MOST_LOOKS, len(mean.shares)))
            self._checks.append(_Check(kept, lot, tuple(self._seek(kept, reducer, mean.shares[reducer], mean.encoded) for reducer in reducers)))

    def _seek(self, kept: _Kept, reducer: str, sealed: SealedShare, encoded: Tensor) -> _Seek:
        parts = self._parts(kept.group, reducer)
        position = self._rng.randrange(len(parts))
        place = _place(parts, position, self._rng.randrange(parts[position].layout.slices))
        return _Seek(reducer, place, sealed, place.show(_view(parts[position], encoded), sealed.hashes))

    def _parts(self, group: Group, reducer: str) -> list[Part]:
        return [self._wire.parts[index] for index in group.shares(self._wire.parts)[reducer]]

    # ---------------------------------------------------------------- looking

    async def look(self) -> None:
        """Do the checks for which we were drawn, and tell others what is proven."""
        while self._checks:
            await self._check(self._checks.popleft())
        await self._telling.look()

    async def _check(self, check: _Check) -> None:
        for tried in range(_TRIES):
            await each(lambda peer: self._ask(peer, check), sorted(check.others - check.said.keys()))
            if check.others <= check.said.keys():
                break
            if tried < _TRIES - 1:
                await asyncio.sleep(_AGAIN_SECONDS)
        said = list(check.proofs())
        self.looked += sum(proof.place is not None for proof in said)
        self._hear(said)

    async def _ask(self, peer: str, check: _Check) -> None:
        sought = tuple(Sought(reducer=seek.reducer, position=seek.place.position, number=seek.place.number) for seek in check.seeks)
        key = self._node.key_of(self._node.peer_id)
        try:
            if peer == self._node.peer_id:
                check.said[peer] = self._looked(check.kept, sought)
                return
            channel = await self._streams.open(peer, INPUTS)
            with contextlib.closing(channel):
                await channel.send(Look(group=check.kept.group.id, lot=check.lot, key=key, sought=sought), seconds=_SECONDS)
                check.said[peer], _ = await channel.receive(Looked, seconds=_SECONDS)
        except PeerLost as error:
            log.debug("%s shows nothing: %s", peer[-6:], error)

    # ---------------------------------------------------------------- showing

    async def _show(self, channel: Channel) -> None:
        asked, _ = await channel.receive(Look, seconds=_SECONDS)
        kept = next((kept for kept in self._kept if kept.group.id == asked.group), None)
        if kept is None or channel.peer not in kept.group.peers:
            raise PeerLost("not a round of ours")
        statement = lot_statement(self._run.digest, kept.state)
        if not self._node.is_lot(channel.peer, statement, asked.key, asked.lot) or not is_drawn(asked.lot, len(kept.group.peers)):
            raise PeerLost("you were not drawn to check this round")
        kept.asked[channel.peer] += 1
        if kept.asked[channel.peer] > _TRIES:
            raise PeerLost("you were answered")
        await channel.send(self._looked(kept, asked.sought), seconds=_SECONDS)

    def _looked(self, kept: _Kept, sought: Collection[Sought]) -> Looked:
        """What we sent, if we are a member. Raises PeerLost when we do not have that, or not any more."""
        slices = [self._slice(kept, each) for each in sought] if kept.mine is not None else []
        return Looked(slices=tuple(slices))

    def _slice(self, kept: _Kept, sought: Sought) -> Slice:
        hashes = kept.sent.get(sought.reducer, ())
        if sought.position >= len(hashes):
            raise PeerLost("no such part")
        parts = self._parts(kept.group, sought.reducer)
        part = parts[sought.position]
        if sought.number >= part.layout.slices:
            raise PeerLost("no such slice")
        if part_hash(part, part.bytes_of(kept.mine)) != hashes[sought.position]:
            raise PeerLost("its memory is in use again")
        return _place(parts, sought.position, sought.number).show(_view(part, kept.mine), hashes)

    # ---------------------------------------------------------------- telling

    def _hear(self, said: Iterable[WrongMean]) -> None:
        if self._proofs.hear(said):
            self._telling.all()

    async def _swap(self, peer: str) -> None:
        """Take one proof that we lack, and give one that the other lacks."""
        try:
            channel = await self._streams.open(peer, WRONG)
            with contextlib.closing(channel):
                await channel.send(self._said(), seconds=_SECONDS)
                theirs = await self._take(channel)
                await channel.send(self._said(theirs), seconds=_SECONDS)
                await channel.hung_up(_SECONDS)
        except PeerLost as error:
            log.debug("%s swaps no proofs: %s", peer[-6:], error)

    async def _answer(self, channel: Channel) -> None:
        theirs = await self._take(channel)
        await channel.send(self._said(theirs), seconds=_SECONDS)
        await self._take(channel)

    async def _take(self, channel: Channel) -> WrongMeans:
        said, _ = await channel.receive(WrongMeans, seconds=_SECONDS)
        if said.proof is not None:
            self._hear([said.proof])
        return said

    def _said(self, theirs: WrongMeans | None = None) -> WrongMeans:
        """One each time: it takes as much room as a message has."""
        known = self._proofs.of_wrong_means
        news = [proof for proof in known if theirs is not None and proof.accused not in theirs.known]
        return WrongMeans(known=tuple(proof.accused for proof in known), proof=news[0] if news else None)


def _place(parts: list[Part], position: int, number: int) -> Place:
    layout = parts[position].layout
    return Place(position=position, count=len(parts), number=number, format=layout.format, elements=layout.elements)


def _view(part: Part, encoded: Tensor) -> memoryview:
    return memoryview(part.bytes_of(encoded).numpy())
