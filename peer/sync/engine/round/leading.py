"""The group that this peer leads: who came to it, and when it is closed."""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from peer.sync.engine.net.messages import MAX_WAIT_SECONDS, Join, Message, Nothing, Onward, Refusal, Wait
from peer.sync.engine.net.streams import Channel, PeerLost, Streams
from peer.sync.engine.round.arrivals import Arrivals
from peer.sync.engine.round.calls import ANSWER_SECONDS
from peer.sync.engine.round.company import Company
from peer.sync.engine.round.groups import NO_RECEIPTS, Group, NoGroup, Seen, Standing, Ticket, may_reduce, ticket_of
from peer.sync.engine.state import MOST_MEMBERS, Head
from swarm.bans import TRUSTED_NEEDED
from swarm.receipts import Receipts
from swarm.tasks import end_tasks, set_within

log = logging.getLogger(__name__)

JOIN = "distributed-diffusion.join.5"
BEAT_SECONDS = 3.0
"""Those who wait for a leader hear from it at this interval; one that was killed or stopped costs `ANSWER_SECONDS` more than that."""
STRANGER_COME_SECONDS = 2.0
"""How long a stranger that said it is ready may take to come, or as long as the round is worth waiting for. Later, it is in the next round."""
AGAIN_SECONDS = 5.0
"""In which those of a group that is void come back to its leader. All hear of it within a second, or look for another reason that long."""


@dataclass
class _Gathering:
    """A group that this peer leads or may come to lead: those who joined, each waiting for its answer."""

    parent: str
    waiting: dict[str, tuple[Ticket, asyncio.Future]] = field(default_factory=dict)
    leader: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Leading:
    """standing, heard, leads, max_samples, receipts, rng: as in `Matchmaker`."""

    def __init__(
        self,
        peer_id: str,
        streams: Streams,
        standing: Callable[[str], Standing],
        heard: Callable[[str, Head, bool], bool],
        max_samples: int,
        company: Company,
        *,
        leads: bool,
        receipts: Receipts = NO_RECEIPTS,
        rng: random.Random,
    ):
        self._peer_id, self._streams, self._standing, self._heard = peer_id, streams, standing, heard
        self._max_samples, self._leads, self._company, self._receipts, self._rng = max_samples, leads, company, receipts, rng
        self._arrivals = Arrivals()
        self._gathering: _Gathering | None = None
        self._announced: Group | None = None
        """The group that this peer leads, until it is over."""

    async def serve(self) -> None:
        await self._streams.serve(JOIN, self._answer_join, of_round=True)

    def over(self) -> None:
        """The group that `form` returned has averaged, or failed to."""
        self._announced = None

    def moved(self) -> None:
        """This peer's state has changed: whoever waits to average onto another one is told at once."""
        if self._gathering is not None and self._gathering.parent != self._standing(self._peer_id).digest:
            self._dismiss(self._gathering, Refusal(error="the group is closed"))
            self._gathering = None

    def redirect(self, parent: str, leader: str) -> None:
        """We go to `leader`: so does whoever comes to us."""
        gathering = self._gathering_onto(parent)
        gathering.leader = leader
        self._dismiss(gathering, Onward(leader=leader))

    def redirect_no_more(self) -> None:
        if self._gathering is not None:
            self._gathering.leader = None

    async def lead(
        self,
        ticket: Ticket,
        coming: Mapping[str, float],
        behind: Mapping[str, float],
        patience: float,
        check: Callable[[Group], None],
        seen: Seen,
        *,
        alone_if_nobody_joins: bool,
    ) -> Group:
        """The group of those who come, announced to them. Raises NoGroup.

        coming: peer -> seconds until it is ready; behind: peer -> seconds that it may take to fetch our state; check: may refuse the group.
        """
        due = self._due(coming, patience) | behind
        group, followers = await self._gather(ticket, coming, due, seen, alone_if_nobody_joins)
        try:
            if not group.members:
                raise seen.no_group("nobody who has samples came")
            check(group)
        except NoGroup as error:
            _tell(followers, Refusal(error=str(error)))
            raise
        self._announced = group
        _tell(followers, group.announcement())
        return group

    async def lead_again(self, closed: Group, ticket: Ticket, gone: Collection[str], check: Callable[[Group], None], seen: Seen) -> Group:
        """The group `closed`, which we led and which is void, of those that come back; who is `gone` is not waited for. Raises NoGroup."""
        coming = closed.peers - {self._peer_id, *gone}
        if not coming:
            raise NoGroup("nobody else is left")
        due = dict.fromkeys(coming, AGAIN_SECONDS)
        group = await self.lead(ticket, dict.fromkeys(coming, 0.0), due, 0.0, check, seen, alone_if_nobody_joins=False)
        log.info("closed again with %d peers instead of %d", len(group.peers), len(closed.peers))
        return group

    def _due(self, coming: Mapping[str, float], patience: float) -> dict[str, float]:
        """Seconds until each of them should have come: when it is ready, and as long as it deserves by how late it came before."""

        def grant(peer: str) -> float:
            longest = max(STRANGER_COME_SECONDS, patience) if self._company.is_stranger(peer) else MAX_WAIT_SECONDS
            return min(self._arrivals.grant(peer), longest)

        return {peer: min(ready + grant(peer), MAX_WAIT_SECONDS) for peer, ready in coming.items()}

    async def _gather(
        self,
        ticket: Ticket,
        coming: Mapping[str, float],
        due: Mapping[str, float],
        seen: Seen,
        alone_if_nobody_joins: bool,
    ) -> tuple[Group, list[asyncio.Future]]:
        """Wait for those who are coming (peer -> seconds until it is ready), each until it is due (peer -> seconds).

        Returns the group, and what its followers wait for.
        """
        gathering = self._gathering_onto(ticket.parent)
        gathering.leader = None
        await self._until_all_came(gathering, coming, due)
        self._gathering = None
        late = set(coming) - set(gathering.waiting)
        away = self._send_away(gathering, ticket)
        in_vain = {peer for peer in late if self._company.left_out(peer)}
        strangers = {peer for peer in late - in_vain if self._company.is_stranger(peer)}
        seen.too_slow(strangers)
        if not gathering.waiting and not alone_if_nobody_joins:
            raise seen.no_group(f"nobody came ({len(coming)} had promised to, {len(seen.silent)} did not answer)", coming)
        for peer in late - in_vain:
            self._arrivals.missed(peer)
            log.info("closed without %s: it did not come within %.1f s", peer[-6:], due[peer])
        tickets = self._with_roles([ticket, *(joined for joined, _ in gathering.waiting.values())])
        if ticket.reduces and not tickets[0].reduces:
            # They rank before us and would not have come if they had heard what we have of the host.
            _tell([answer for _, answer in gathering.waiting.values()], Refusal(error="one that the host trusts should lead"))
            raise seen.no_group(f"{TRUSTED_NEEDED} came that the host trusts: one of them leads")
        self._send_helpers_away(gathering, tickets)
        group = Group.of([t for t in tickets if t.reduces or not t.assists], f"{self._rng.getrandbits(64):016x}", late | away)
        return replace(seen.of(group), late=tuple(sorted(strangers)), leader=self._peer_id), [answer for _, answer in gathering.waiting.values()]

    async def _until_all_came(self, gathering: _Gathering, coming: Mapping[str, float], due: Mapping[str, float]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        there: set[str] = set()
        while True:
            now = loop.time()
            for peer in (set(coming) & set(gathering.waiting)) - there:
                self._arrivals.came(peer, now - began - coming[peer])
            there |= set(gathering.waiting)
            awaited = [peer for peer in due if peer not in gathering.waiting and not self._company.left_out(peer)]
            missing = [until for peer in awaited if (until := began + due[peer]) > now]
            if not missing:
                return
            gathering.changed.clear()
            await set_within(max(missing) - now, gathering.changed)

    def _with_roles(self, tickets: Collection[Ticket]) -> list[Ticket]:
        """Who reduces. A stranger that brings samples does once it has been in a round: a share of a small vector may be the only one, and then
        nobody could tell a reducer that stalls from one that waits for a member."""
        able = {ticket.member.peer for ticket in tickets if ticket.reduces and (ticket.assists or not self._company.is_stranger(ticket.member.peer))}
        reducers = may_reduce(able, self._standing(self._peer_id).trusted)
        return [replace(ticket, reduces=ticket.member.peer in reducers) for ticket in tickets]

    @staticmethod
    def _send_helpers_away(gathering: _Gathering, tickets: Collection[Ticket]) -> None:
        """A peer that assists is in no group where it does not reduce."""
        for ticket in tickets:
            if ticket.assists and not ticket.reduces:
                _, answer = gathering.waiting.pop(ticket.member.peer)
                _tell([answer], Refusal(error="those that the host trusts average this round"))

    def _send_away(self, gathering: _Gathering, ticket: Ticket) -> set[str]:
        """No group holds two of whom one leaves the other out: they would only fail once more. Returns who came in vain."""
        without = {peer: joined.without for peer, (joined, _) in gathering.waiting.items()} | {self._peer_id: ticket.without}
        away = self._company.at_odds(ticket.parent, without, self._peer_id)
        for peer in away:
            _, answer = gathering.waiting.pop(peer)
            log.info("closed without %s: it conflicts with another member", peer[-6:])
            _tell([answer], Refusal(error="conflicts with another member of this group"))
        return away

    async def _answer_join(self, channel: Channel) -> None:
        try:
            join, _ = await channel.receive(Join, seconds=ANSWER_SECONDS)
            standing, ticket = self._standing(channel.peer), self._ticket(join, channel.peer)
            if reason := self._refusal(ticket, standing):
                raise PeerLost(reason)
        except PeerLost as error:
            log.info("refused %s: %s", channel.peer[-6:], error)
            raise
        self._company.answered(channel.peer)
        self._heard(channel.peer, standing.head, True)
        if self._announced is not None and self._announced.holds(ticket) and join.after != self._announced.id:
            # Its stream broke before it heard so. Without it, all the others would wait for its parts in vain.
            return await channel.send(self._announced.announcement(), seconds=ANSWER_SECONDS)
        gathering = self._gathering_onto(ticket.parent)
        if gathering.leader is not None:
            return await channel.send(Onward(leader=gathering.leader), seconds=ANSWER_SECONDS)
        if len(gathering.waiting) >= MOST_MEMBERS - 1 and channel.peer not in gathering.waiting:
            raise PeerLost("the group is full")
        answer = asyncio.get_running_loop().create_future()
        self._replace(gathering, channel.peer, (ticket, answer))
        try:
            await channel.send(await self._answer_unless_gone(ticket, answer, channel), seconds=ANSWER_SECONDS)
        finally:
            if gathering.waiting.get(channel.peer, (None, None))[1] is answer:
                del gathering.waiting[channel.peer]

    def _ticket(self, join: Join, peer: str) -> Ticket:
        """What `peer` brings. Raises PeerLost; then it is left out, and we wait for it no more: the honest read their own tickets first."""
        try:
            return ticket_of(join, peer, self._max_samples, self._receipts)
        except PeerLost:
            if not self._company.left_out(peer):
                self._company.blame([peer])
            if self._gathering is not None:
                self._gathering.changed.set()
            raise

    @staticmethod
    def _replace(gathering: _Gathering, peer: str, entry: tuple[Ticket, asyncio.Future]) -> None:
        if peer in gathering.waiting and not gathering.waiting[peer][1].done():
            gathering.waiting[peer][1].set_result(Refusal(error="joined again"))
        gathering.waiting[peer] = entry
        gathering.changed.set()

    async def _answer_unless_gone(self, ticket: Ticket, answer: asyncio.Future, channel: Channel) -> Message:
        """Our word to a joiner, which hears meanwhile that we live. Raises PeerLost when one of us cannot be in a group any more.

        A joiner says nothing while it waits: when its stream speaks or ends, it is gone, and must not be in the group.
        """
        gone = asyncio.create_task(channel.receive(Nothing, seconds=MAX_WAIT_SECONDS))
        try:
            while not answer.done():
                await channel.send(Wait(), seconds=ANSWER_SECONDS)
                await asyncio.wait({answer, gone}, timeout=BEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                reason = "went away" if gone.done() else self._refusal(ticket, self._standing(channel.peer))
                if reason and not answer.done():
                    raise PeerLost(reason)
            return answer.result()
        finally:
            await end_tasks(gone)

    def _refusal(self, ticket: Ticket, standing: Standing) -> str:
        if ticket.parent != standing.digest:
            return f"it averages onto {ticket.parent[:8]}, this peer is at {standing.digest[:8]}"
        if not self._leads:
            return "this peer cannot be dialled and leads nobody"
        if self._company.left_out(ticket.member.peer):
            return "it is left out for now"
        if not standing.has_samples:
            return "this peer has nothing to average with it yet"
        if not ticket.assists and ticket.member.number <= standing.included.get(ticket.member.peer, 0):
            return f"its contribution {ticket.member.number} is in the state already"
        if ticket.member.number > standing.highest_number:
            return f"no state may hold its contribution's number {ticket.member.number}"
        if ticket.reduces and self._standing(self._peer_id).ranks_before(ticket.parent, ticket.member.peer, self._peer_id):
            return "it ranks before this peer and should lead itself"
        return ""

    def _gathering_onto(self, parent: str) -> _Gathering:
        if self._gathering is None or self._gathering.parent != parent:
            if self._gathering is not None:
                self._dismiss(self._gathering, Refusal(error="the group is closed"))
            self._gathering = _Gathering(parent)
        return self._gathering

    @staticmethod
    def _dismiss(gathering: _Gathering, answer: Message) -> None:
        _tell([waiting for _, waiting in gathering.waiting.values()], answer)
        gathering.waiting.clear()  # what they are told may be on its way for seconds: they are in no group of ours any more


def _tell(waiting: Collection[asyncio.Future], answer: Message) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(answer)
