"""One attempt at a round: Group, Average, and the outer step. Changes nothing at this peer: the state it returns is the caller's to adopt."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from torch import Tensor

from peer.contracts import Member
from peer.sync.engine import failpoints
from peer.sync.engine.buffers import IN_MEMORY, Buffers
from peer.sync.engine.cell import Cell, Phase
from peer.sync.engine.codec import Wire
from peer.sync.engine.net.messages import MOST_NAMED
from peer.sync.engine.net.neighbours import Neighbours
from peer.sync.engine.net.streams import Streams
from peer.sync.engine.outer import Strategy, advance
from peer.sync.engine.round.averaging import Averager, Mean, RoundFailed, longest_seconds
from peer.sync.engine.round.clipping import Clipping
from peer.sync.engine.round.company import Company
from peer.sync.engine.round.excerpts import Auditor
from peer.sync.engine.round.groups import Group, NoGroup, Ticket
from peer.sync.engine.round.matchmaking import Matchmaker
from peer.sync.engine.round.next_round import NextRound
from peer.sync.engine.round.patience import patience_seconds
from peer.sync.engine.round.reception import Reception
from peer.sync.engine.round.reduction import Strangers
from peer.sync.engine.round.share_seals import ShareSeals
from peer.sync.engine.state import State
from peer.sync.engine.trainer.trainer import Contribution
from peer.sync.engine.vectors import SharedBuffer
from swarm.dht import SwarmNode
from swarm.end import End
from swarm.receipts import Receipts
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)
T = TypeVar("T")

_NEWS_SECONDS, _BEHIND_SECONDS = 5.0, 3.0
"""A round shorter than a record's way through the DHT finds the others a state behind, each in turn: they are given time to follow."""
_STRANGER_SECONDS, _STRANGER_SHARE = 5.0, 0.25
"""How long a stranger in a group may take for each word; or this share of what the round has taken so far, if that is longer."""
_MOST_CLOSINGS = 3
"""Of one attempt. Each costs up to 15 s, and drops a member or more; then all look who has committed, as after any failure."""


@dataclass(frozen=True)
class OuterStep:
    """What a round's mean makes of a state, the same bits at every peer."""

    strategy: Strategy
    wire: Wire
    buffers: Buffers = IN_MEMORY
    """Make the memory of states and means."""

    def __call__(self, parent: State, mean: Mean, members: Collection[Member], into: SharedBuffer | None = None) -> State:
        """The state after `parent`, in the memory of `into`, which may be the parent's. Raises ValueError, UserError (disk)."""
        into = into or self.buffers.shared(parent.buffer.num_bytes)
        return advance(parent, members, mean.encoded, mean.square_norm, self.strategy, self.wire, into, mean.group)


@dataclass(frozen=True)
class Round:
    """A round that this peer has averaged: `state` is the outer step's result for the `mean` of `group`."""

    group: Group
    mean: Mean
    state: State

    @property
    def how(self) -> str:
        return "averaged" if len(self.group.peers) > 1 else "solo"


class _Led(NamedTuple):
    parent: str
    leader: str


class Rounds:
    """phase: becomes GROUP and AVERAGE as an attempt comes to them; next_round: what others promise."""

    def __init__(
        self,
        run: RunConfig,
        end: End,
        node: SwarmNode,
        streams: Streams,
        neighbours: Neighbours,
        company: Company,
        outer: OuterStep,
        phase: Cell[Phase],
        reception: Reception,
        next_round: NextRound,
        *,
        seals: ShareSeals | None = None,
        auditor: Auditor | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ):
        self._end, self._node, self._neighbours, self.company = end, node, neighbours, company
        self._outer, self._phase, self._next_round, self._clock = outer, phase, next_round, clock
        self._receipts, self._rng = Receipts.of(run), rng or random.SystemRandom()
        self._failed = reception.failed
        self._draw = self._drawn()
        self._led: _Led | None = None
        """State and leader of the last attempt; None if no group was formed in it."""
        self.matchmaker = Matchmaker(
            node.peer_id, streams, reception.standing, reception.heard, 2 * run.target_batch_size,
            leads=not node.client_mode, company=company, receipts=self._receipts, rng=self._rng,
            average_seconds=longest_seconds(outer.wire.num_bytes),
        )  # fmt: skip
        self._clipping = Clipping(run.clip_members, per_sample=outer.strategy.steps_locally, centered=run.averaging == "centered")
        self.averager = Averager(node.peer_id, streams, outer.wire, self._clipping, outer.buffers, seals, auditor)

    async def start(self) -> None:
        await self.matchmaker.start()
        await self.averager.start()

    async def attempt(self, state: State, offer: Contribution, callers: Collection[str], age_seconds: float) -> Round:
        """Average `offer` onto `state`, which is `age_seconds` old here, with all who come; callers: who just said that they are ready.

        Raises NoGroup, RoundFailed. Whoever it was that cost us the attempt is left out from then on.
        """
        before, self._led = self._led, None
        try:
            done = await self._attempt(state, offer, callers, age_seconds)
        except (NoGroup, RoundFailed) as error:
            self.company.blame(error.culprits, error.slow)
            if self._led is not None and self._led == before and self._led.leader != self._node.peer_id:
                # Twice in a row: it may have told each of us of another group, and without a round it would lead the next attempt, too.
                self.company.blame([self._led.leader], slow=[self._led.leader])
            raise
        self.company.averaged(done.group.peers - {self._node.peer_id})
        return done

    async def _attempt(self, state: State, offer: Contribution, callers: Collection[str], age_seconds: float) -> Round:
        if self._neighbours.alone():
            if offer.encoded is None:
                raise NoGroup("nobody is left to assist")
            group = Group(state.digest, (offer.member,), ())
            mean = await self._own(offer)
        else:
            group, mean = await self._average(state, offer, callers, age_seconds)
        self._neighbours.missed(group.silent)
        self._neighbours.came(group.peers)
        return await self._outer_step(state, group, mean)

    async def _average(self, state: State, offer: Contribution, callers: Collection[str], age_seconds: float) -> tuple[Group, Mean]:
        self._phase.set(Phase.GROUP)
        norm = await self._norm(offer)
        ticket = Ticket(state.digest, offer.member, not self._node.client_mode, self._without(), norm, self._receipt(offer), self._draw)
        group = await self.matchmaker.form(
            ticket,
            self._expected(state, callers),
            self._check_quorum,
            patience=patience_seconds(age_seconds, offer.failures),
            behind_seconds=_BEHIND_SECONDS if age_seconds < _NEWS_SECONDS else 0.0,
            told=self._told(state, offer, callers),
        )
        for _ in range(_MOST_CLOSINGS - 1):
            try:
                return group, await self._average_in(group, offer, age_seconds)
            except RoundFailed as error:
                if not error.void:
                    raise
                group = await self._closed_again(group, ticket, error)
        return group, await self._average_in(group, offer, age_seconds)

    def _drawn(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"

    def _without(self) -> tuple[str, ...]:
        """Whom nobody knows comes first to be passed over: strangers without a record, which are in no group, must not hide who spoiled one."""
        return tuple(sorted(self.company.all_left_out(), key=self._neighbours.knows)[-MOST_NAMED:])

    async def _closed_again(self, group: Group, ticket: Ticket, error: RoundFailed) -> Group:
        """The void `group` once more, without whoever is to blame. Raises NoGroup (docs/decisions/0027)."""
        log.info("nobody has the mean of the group of %d peers: %s", len(group.peers), error, extra={"void": group.id})
        self._phase.set(Phase.GROUP)
        self.company.blame(error.culprits, error.slow)
        gone = {peer for peer in group.peers if self.company.left_out(peer)}
        try:
            return await self.matchmaker.again(group, replace(ticket, without=self._without(), draw=self._draw), gone, self._check_quorum)
        except NoGroup as why:
            raise NoGroup(f"{error}; not closed again: {why}", why.silent, why.culprits, why.slow, at_once=error.at_once) from None

    async def _average_in(self, group: Group, offer: Contribution, age_seconds: float) -> Mean:
        """Raises RoundFailed."""
        self._draw = self._drawn()  # each is in one average: nobody can have us sign another mean under the same name (docs/decisions/0028)
        try:
            self._remember(group)
            self._led = _Led(group.parent, group.leader)
            self._phase.set(Phase.AVERAGE)
            await failpoints.reached("group_closed", self._node.peer_id)
            mean = await (self._own(offer) if len(group.peers) == 1 else self._mean(group, offer, age_seconds))
        except RoundFailed as error:
            self._doubt_leader(group, error)
            self._failed(group)
            raise
        finally:
            self.matchmaker.over()
        await failpoints.reached("mean_complete", self._node.peer_id)
        return mean

    def _receipt(self, offer: Contribution) -> str:
        """What others will take; '' for what a false server gave us on the way, which would only keep us out."""
        member = offer.member
        if not offer.receipt or self._receipts.hold(member.peer, member.number, member.samples, offer.receipt):
            return offer.receipt
        if offer.failures == 0:
            log.warning("this run's host did not sign the dataset server's receipt for contribution=%d: counting it as one without", member.number)
        return ""

    async def _norm(self, offer: Contribution) -> float:
        """Of what we bring, worked out once; 0 where nobody asks for it. Raises RoundFailed."""
        if not self._clipping.times or offer.encoded is None:
            return 0.0
        if offer.norm is None:
            offer.norm = asyncio.get_running_loop().run_in_executor(None, self._outer.wire.norm, offer.encoded)
        return await self._of_ours(asyncio.shield(offer.norm))  # an attempt that is overtaken leaves it to the next one

    def _remember(self, group: Group) -> None:
        """What was seen, by us or by its leader, while the group was formed."""
        self.company.blame(group.culprits, group.slow)
        if group.leader != self._node.peer_id and not self.company.is_stranger(group.leader):
            strangers = [peer for peer in group.late if self.company.is_stranger(peer)]
            self.company.blame(strangers, slow=strangers)

    def _doubt_leader(self, group: Group, error: RoundFailed) -> None:
        """Leave a leader out for a while if it announced a member, or a reducer, that did not come, and that nobody else has heard of.

        Who ranks first could else announce one after the other for ever: each costs 5 to 15 s, and without a round the order stays. It may
        have been a newcomer that died, so the leader counts as slow.
        """
        accused = {*error.culprits, *(error.told.culprits if error.told else ())}
        unknown = {peer for peer in group.peers & accused if not self._neighbours.knows(peer)}
        if unknown and group.leader != self._node.peer_id:
            self.company.blame([group.leader], slow=[group.leader])

    async def _mean(self, group: Group, offer: Contribution, age_seconds: float) -> Mean:
        """Raises RoundFailed."""
        strangers = frozenset(peer for peer in group.peers if self.company.is_stranger(peer)) - {self._node.peer_id}
        try:
            seconds = max(_STRANGER_SECONDS, _STRANGER_SHARE * age_seconds)
            mean = await self.averager.average(group, offer.encoded, Strangers(strangers, seconds))
        except RoundFailed as error:
            if word := error.told:
                accused = [peer for peer in word.culprits if peer in group.peers]
                error.at_once = self.company.told(word.accuser, accused, hearsay=word.hearsay)
            raise
        for member, factor in zip(group.members, self._clipping.factors(group.weighed, group.norms), strict=True):
            if factor < 1 and len(group.members) > 1:
                whose = "our" if member.peer == self._node.peer_id else f"{member.peer[-6:]}'s"
                log.info("%s contribution is clipped to %.2g of its length (--clip_members %g)", whose, factor, self._clipping.times)
        return mean

    async def _own(self, offer: Contribution) -> Mean:
        """What we have, as the mean of a group of one. Raises RoundFailed."""
        return await self._of_ours(asyncio.get_running_loop().run_in_executor(None, self._as_mean, offer.encoded))

    @staticmethod
    async def _of_ours(work: Awaitable[T]) -> T:
        """What a thread makes of our contribution. Raises RoundFailed."""
        try:
            return await work
        except ValueError as error:
            raise RoundFailed(f"our own contribution has {error}") from None

    def _as_mean(self, encoded: Tensor) -> Mean:
        # A copy: means are kept for others after the trainer has used its contribution's memory again.
        return Mean(self.averager.memory.take().copy_(encoded), self._outer.wire.square_norm(encoded))

    def _expected(self, state: State, callers: Collection[str]) -> dict[str, bool]:
        """Peers that may come, and whether each can lead: those at our state, or behind it in the records, which are a second old."""
        recent = {state.digest, *state.header.parents}
        records = [*self._neighbours.counted_upon(callers), *self._neighbours.untried()]
        return {record.peer_id: not record.client_mode for record in records if record.digest in recent}

    def _told(self, state: State, offer: Contribution, callers: Collection[str]) -> set[str]:
        """Who need not hear from us that the round has begun: where one has called us that began it, it has called them as well.

        Only those that made our state, and nobody after a failure: then each of us calls all, and finds out at once who does not answer any more.
        """
        made = {member.peer for member in state.header.members} if callers and not offer.failures else set()
        return {peer for peer in made if not self.company.is_stranger(peer)}

    def _check_quorum(self, group: Group) -> None:
        """A group must hold more than half of the samples that wait on this state, or two of them could both commit. Raises NoGroup.

        Those who stay away from several attempts are not counted any more, whatever their records promise; of strangers, those who
        stay away from one. Nor are, at once, those that do not answer or are left out, if they are fewer than the group's members:
        then at most one side of any cut goes on at once, the larger one, and the other waits for as long as ever. Where this is wrong,
        as when each of two halves has met others, both commit, and the better of two heads is taken over by all (docs/internals.md).
        """
        members = {member.peer for member in group.members}
        here = [record for record in self._neighbours.counted_upon(left_out_too=True) if record.digest == group.parent]
        # As much as makes a round due (NextRound): a record is a second old, and a founder's first one says that nothing waits.
        promised = {record.peer_id: self._next_round.promised(record) for record in here if record.peer_id not in members}
        outside = {peer: samples for peer, samples in promised.items() if samples}
        strangers = {peer for peer in outside if self.company.is_stranger(peer)}
        gone = {peer for peer in outside if peer in group.silent or self.company.left_out(peer)}
        if len(gone - strangers) >= len(members):
            gone &= strangers
        outside = {peer: samples for peer, samples in outside.items() if peer not in gone}
        elsewhere = sum(outside.values())
        if group.samples <= elsewhere:
            # Strangers alone stop nobody twice: they are not counted in the next attempt.
            at_once = group.samples > sum(samples for peer, samples in outside.items() if peer not in strangers)
            reason = f"the group holds {group.samples} samples, {elsewhere} wait elsewhere"
            raise NoGroup(reason, group.silent | set(outside), group.culprits, group.slow, at_once=at_once)

    async def _outer_step(self, parent: State, group: Group, mean: Mean) -> Round:
        began = self._clock()
        try:
            state = await asyncio.get_running_loop().run_in_executor(None, self._outer, parent, mean, group.members)
        except ValueError as error:
            raise RoundFailed(str(error)) from None
        await failpoints.reached("outer_step", self._node.peer_id)
        done, header = Round(group, mean, state), state.header
        log.info(
            "%s round=%d peers=%d samples=%d total_samples=%d state=%s seconds=%.2f",
            done.how, header.round, len(group.members), header.samples, self._end.total, state.digest[:8], self._clock() - began,
            extra={"averaged": group.id, "made": state.digest},
        )  # fmt: skip
        return done
