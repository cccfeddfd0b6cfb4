"""Whether a reducer gave others another mean than us: members whose states part after one group compare what its reducers signed for each.

Honest rounds cost no message. Where the states of two members differ, each asks the other once, and both have the proof (`swarm/proofs.py`).
"""

import contextlib
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from peer.sync.engine.net.messages import Shares, SignedShare
from peer.sync.engine.net.streams import Channel, PeerLost, Streams
from peer.sync.engine.round.rounds import Round
from peer.sync.engine.round.share_seals import SealedShare
from peer.sync.engine.round.telling import Telling, each
from swarm.proofs import Proof, Proofs
from swarm.records import PeerRecord

log = logging.getLogger(__name__)

SHARES = "distributed-diffusion.shares.1"
_SECONDS = 10.0
_KEPT = 8
"""Groups: as many as the ancestors that a record names."""
_TRIES = 3
"""How often a peer is asked about a group: a stream may break, and one that is dead or silent is not asked for ever."""


@dataclass(frozen=True)
class _Kept:
    """A group that we averaged in, the state that we made of it, and what its reducers signed for us."""

    group: str
    parent: str
    digest: str
    peers: frozenset[str]
    shares: dict[str, SealedShare]

    def parts_from(self, record: PeerRecord) -> bool:
        """Whether its owner, which was there as well, made another state of it, or of another group on the same parent."""
        line = [record.digest, *record.parents]
        return record.peer_id in self.peers and self.parent in line[1:] and line[line.index(self.parent) - 1] != self.digest

    def said(self) -> tuple[SignedShare, ...]:
        return tuple(SignedShare(reducer=peer, digest=share.digest, signature=share.signature) for peer, share in self.shares.items())


class Equivocation:
    """others: the live peers' records; rng: with whom proofs are swapped."""

    def __init__(
        self,
        streams: Streams,
        proofs: Proofs,
        others: Callable[[], Collection[PeerRecord]],
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ):
        self._streams, self._proofs, self._others = streams, proofs, others
        self._telling = Telling(others, self._swap, clock, rng)
        self._kept: deque[_Kept] = deque(maxlen=_KEPT)
        self._tries: Counter[tuple[str, str]] = Counter()
        """(peer, group) -> how often it was asked; of the groups that are kept."""

    async def serve(self) -> None:
        await self._streams.serve(SHARES, self._answer)

    def averaged(self, done: Round) -> None:
        """Keep what the reducers of a round signed for us."""
        if done.mean.shares:
            group = done.group
            self._kept.append(_Kept(group.id, group.parent, done.state.digest, frozenset(group.peers), done.mean.shares))
            kept = {each.group for each in self._kept}
            self._tries = Counter({asked: tries for asked, tries in self._tries.items() if asked[1] in kept})

    async def look(self) -> None:
        """Ask those whose states part from ours, and tell others what is proven."""
        others = self._others()
        apart = [(record.peer_id, kept) for kept in self._kept for record in others if self._differs(kept, record)]
        await each(lambda asked: self._swap(*asked), apart)
        await self._telling.look()

    def _differs(self, kept: _Kept, record: PeerRecord) -> bool:
        return kept.parts_from(record) and self._tries[record.peer_id, kept.group] < _TRIES

    async def _swap(self, peer: str, kept: _Kept | None = None) -> None:
        if kept is not None:
            self._tries[peer, kept.group] += 1
        try:
            channel = await self._streams.open(peer, SHARES)
            with contextlib.closing(channel):
                await channel.send(self._said(kept), seconds=_SECONDS)
                said, _ = await channel.receive(Shares, seconds=_SECONDS)
        except PeerLost as error:
            log.debug("%s swaps no proofs: %s", peer[-6:], error)
        else:
            if kept is not None:
                self._tries[peer, kept.group] = _TRIES
            self._hear(said, kept)

    async def _answer(self, channel: Channel) -> None:
        said, _ = await channel.receive(Shares, seconds=_SECONDS)
        kept = next((kept for kept in self._kept if kept.group == said.group), None)
        self._hear(said, kept)
        await channel.send(self._said(kept), seconds=_SECONDS)

    def _said(self, kept: _Kept | None) -> Shares:
        """Either: what 512 reducers signed takes as much room as a message has."""
        return Shares(group=kept.group, shares=kept.said()) if kept else Shares(proofs=self._proofs.of_two_means)

    def _hear(self, said: Shares, kept: _Kept | None) -> None:
        mine = self._compared(kept, said.shares) if kept is not None and said.group == kept.group else ()
        if self._proofs.hear([*mine, *said.proofs]):
            self._telling.all()

    @staticmethod
    def _compared(kept: _Kept, theirs: Iterable[SignedShare]) -> Iterable[Proof]:
        """A proof for each reducer that is said to have signed another mean; whether it holds, `Proofs` finds out."""
        for their in theirs:
            ours = kept.shares.get(their.reducer)
            if ours is not None and ours.digest != their.digest:
                yield Proof(
                    accused=their.reducer, key=ours.key, group=kept.group, digests=(ours.digest, their.digest),
                    signatures=(ours.signature, their.signature),
                )  # fmt: skip
