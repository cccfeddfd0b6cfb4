"""Members that assist, and sign each mean that they give: a wrong one to all (`wrong_mean.py`), or here to one member of each group (docs/decisions/0028).

This one also frames: it makes proofs of what honest reducers signed for it. None of them holds.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peer.contracts import Member
from peer.sync.engine.codec import Part, square_norm
from peer.sync.engine.net.streams import PeerLost
from peer.sync.engine.round.clipping import Clipping
from peer.sync.engine.round.equivocation import SHARES
from peer.sync.engine.round.groups import Group
from peer.sync.engine.round.reduction import Reduction, Run
from peer.sync.engine.round.share_seals import Given, part_hash
from scripts.attacks.band import Band
from scripts.attacks.rounds import Guest, Reducer
from scripts.attacks.wire import REDUCE, Frames, Gone, Key, Record, Stranger
from swarm.slices import tree_digest
from swarm.statements import Input, inputs_digest, statement

_KEPT = 8
"""Groups, of which members may still fetch a mean."""
_KNOWN_SOON_SECONDS, _FRAME_SECONDS = 15.0, 5.0


@dataclass
class _Round:
    """victim: the member that is lied to; '' where there is nobody else who would hear the truth."""

    group: Group
    reduction: Reduction
    victim: str
    given: dict[str, Given] = field(default_factory=dict)
    """To each, so far."""


class Signing(Reducer):
    """Reduces its share as it should, signs what it gives, and turns the mean round for those that `_is_lied_to` names: here for all."""

    def __init__(self, band: Band):
        super().__init__(band, lambda part, sent: (sent, 0.0))
        self._rounds: dict[str, _Round] = {}
        self._news = asyncio.Condition()

    def _is_lied_to(self, known: _Round, peer: str) -> bool:
        return True

    async def _goes_on(self, guest: Guest, group: Group) -> None:
        """Once it is in a group."""

    async def _take_part(self, guest: Guest) -> None:
        self._key = guest.stranger.key
        parent, draw = guest.onto, f"{self.band.rng.getrandbits(64):016x}"
        ticket = {"parent": parent, "number": 0, "samples": 0, "norm": 0.0, "reduces": True, "draw": draw}
        group = _group(parent, await guest.join(ticket))
        share = group.shares(guest.wire.parts)[guest.stranger.peer_id]
        if not share:
            return
        reduction = self._reduction(guest, group, share)
        senders = sorted(reduction.senders)
        self._rounds[group.id] = _Round(group, reduction, self.band.rng.choice(senders) if len(senders) > 1 else "")
        while len(self._rounds) > _KEPT:
            del self._rounds[next(iter(self._rounds))]
        async with self._news:
            self._news.notify_all()
        await self._goes_on(guest, group)

    def _reduction(self, guest: Guest, group: Group, share: Sequence[int]) -> Reduction:
        """As an honest reducer has it."""
        config, wire = self.band.config, guest.wire
        clipping = Clipping(config.clip_members, per_sample=config.sync != "gradients", centered=config.averaging == "centered")
        run = Run(group, None, torch.empty(wire.num_bytes, dtype=torch.uint8), [0.0] * len(wire.parts))
        return Reduction(run, [wire.parts[index] for index in share], share, wire, clipping)

    async def _reduce(self, frames: Frames) -> None:
        name = (await frames.receive(15))[0].get("group")
        try:
            async with self._news:  # the leader's word may come after a member's
                await asyncio.wait_for(self._news.wait_for(lambda: name in self._rounds), _KNOWN_SOON_SECONDS)
        except asyncio.TimeoutError:
            raise Gone("a group that we are not in") from None
        known = self._rounds[name]
        taking = asyncio.create_task(_take(known.reduction, frames))
        try:
            with contextlib.suppress(PeerLost):
                await self._give(known, frames)
        finally:
            taking.cancel()

    async def _give(self, known: _Round, frames: Frames) -> None:
        reduction, given = known.reduction, known.given.setdefault(frames.peer, Given())
        for index, part in enumerate(reduction.parts):
            data, square = await reduction.mean(index)
            if self._is_lied_to(known, frames.peer):
                data, square = _turned_round(part, data)
            given.add(part, data, square)
            said = {"square": square}
            if index == len(reduction.parts) - 1:
                said |= self._signed(known, frames.peer, given)
            await frames.send(said, bytes(data.numpy()))

    @property
    def _to_all_by(self) -> str:
        """Ours, if we give all the same wrong mean."""
        return ""

    def _signed(self, known: _Round, peer: str, given: Given) -> Record:
        inputs = inputs_digest(known.reduction.signed_inputs)
        if self._is_lied_to(known, peer):
            members = [[member.peer, member.number, member.samples] for member in known.group.members]
            self.band.say(event="lied", time=time.time(), parent=known.group.parent, members=members, to_all_by=self._to_all_by)
        signature = self._key.sign(statement(self.band.config.digest, known.group.id, given.digest(inputs)))
        # Who keeps these back has its mean refused, and who gives others is proven to: nothing serves a liar better than the truth about them.
        made_of = [vars(each) for each in known.reduction.shown_inputs]
        return {"inputs": inputs, "made_of": made_of, "signature": signature, "key": self._key.public}


class TwoFaced(Signing):
    def __init__(self, band: Band):
        super().__init__(band)
        self._framing = Framing(band)

    async def run(self) -> None:
        framing = asyncio.create_task(self._framing.frame_forever())
        try:
            await super().run()
        finally:
            framing.cancel()

    def _is_lied_to(self, known: _Round, peer: str) -> bool:
        return peer == known.victim

    async def _goes_on(self, guest: Guest, group: Group) -> None:
        others = [peer for peer in group.reducers if peer != guest.stranger.peer_id]
        await asyncio.gather(*(self._framing.listen(guest, peer, group) for peer in others))


@dataclass(frozen=True)
class _Signed:
    """By an honest reducer, of its share of a group."""

    accused: str
    key: str
    group: str
    digest: str
    signature: str


class Framing:
    """Made of what honest reducers have signed: a mean twice, means of two groups, and our own signature in another's name."""

    def __init__(self, band: Band):
        self._band = band
        self._signed: list[_Signed] = []

    async def listen(self, guest: Guest, reducer: str, group: Group) -> None:
        """Take a share's mean, as who assists does."""
        share = group.shares(guest.wire.parts)[reducer]
        with contextlib.suppress(Gone):
            frames, given, said = await guest.stranger.open(reducer, REDUCE), Given(), {}
            with contextlib.closing(frames):
                await frames.send({"group": group.id})
                for index in share:
                    said, data = await frames.receive(40)
                    given.add(guest.wire.parts[index], torch.frombuffer(bytearray(data), dtype=torch.uint8), said["square"])
            if said.get("signature"):
                self._signed.append(_Signed(reducer, said["key"], group.id, given.digest(said["inputs"]), said["signature"]))
                del self._signed[:-_KEPT]

    async def frame_forever(self) -> None:
        while True:
            await asyncio.sleep(_FRAME_SECONDS)
            if self._signed:
                with contextlib.suppress(Gone):
                    # By the first identity, which looked around: the one that lies is banned soon.
                    await self._frame(self._band.strangers[0], self._band.rng.choice(sorted(await self._band.honest())))

    async def _frame(self, stranger: Stranger, peer: str) -> None:
        for proof in self._proofs(stranger.key):
            await stranger.ask(peer, SHARES, {"group": proof["group"], "shares": [], "proofs": [proof]})

    def _proofs(self, ours: Key) -> Iterator[Record]:
        """Each by itself: of several against one peer, the first is looked at."""
        one, rng = self._signed[-1], self._band.rng
        other = rng.choice([each for each in self._signed if each.accused == one.accused])
        made_up = rng.randbytes(32).hex()
        forged = ours.sign(statement(self._band.config.digest, one.group, made_up))
        for digest, signature in ((one.digest, one.signature), (other.digest, other.signature), (made_up, forged)):
            yield {
                "accused": one.accused, "key": one.key, "group": one.group, "digests": [one.digest, digest], "signatures": [one.signature, signature]
            }  # fmt: skip


async def _take(reduction: Reduction, frames: Frames) -> None:
    with contextlib.suppress(Gone, PeerLost):
        reduction.came(frames.peer)
        hashes = []
        for index, part in enumerate(reduction.parts if frames.peer in reduction.senders else ()):
            said, sent = await frames.receive(40)
            data = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
            hashes.append(part_hash(part, data))
            if index == len(reduction.parts) - 1 and "signature" in said:  # in an open run nobody signs
                reduction.inputs[frames.peer] = Input(peer=frames.peer, digest=tree_digest(hashes), signature=said["signature"], key=said["key"])
            reduction.add(frames.peer, index, data)


def _group(parent: str, said: Record) -> Group:
    """As its leader announced it."""
    members = tuple(Member(*member[:3]) for member in said["members"])
    norms = tuple(member[3] for member in said["members"])
    return Group(parent, members, tuple(said["reducers"]), said["attempt"], norms, tuple(said["receipts"]), tuple(said["draws"]))


def _turned_round(part: Part, data: Tensor) -> tuple[Tensor, float]:
    """The opposite of a part of a mean, which is as long, and its sum of squares."""
    turned = part.encode(-part.decode(data))
    return turned, square_norm(part.decode(turned))


async def two_faced(band: Band) -> None:
    await TwoFaced(band).run()
