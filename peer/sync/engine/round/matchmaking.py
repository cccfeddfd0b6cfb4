"""Who averages with whom: every peer that is ready goes to the best ranked one it knows, and that one closes the group.

A peer's rank is a hash of the parent state and its id, behind all whose work is in that state if its own is not: everybody computes
the same order, no one is special for longer than a round, and since peers only ever join a better ranked one, nobody waits in a
circle. A group closes at once when all who are
expected came, declined or proved unreachable; no fixed matchmaking time is ever waited out. Whoever needs longer than the round is
worth waiting for is left out, and comes with the same contribution into a later one.

Strangers (`company.py`) are called like the others, but hold nobody up: they have less time for every word.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from peer.sync.engine import failpoints
from peer.sync.engine.net.messages import (
    JOIN_ANSWER,
    MAX_WAIT_SECONDS,
    Announcement,
    Answer,
    Call,
    Join,
    Message,
    Nothing,
    Onward,
    Refusal,
    Wait,
)
from peer.sync.engine.net.streams import Broken, Channel, PeerLost, Refused, Streams
from peer.sync.engine.round.arrivals import Arrivals
from peer.sync.engine.round.company import Company
from peer.sync.engine.round.groups import Group, Standing, Ticket, group_of, leads_before, ticket_of
from peer.sync.engine.state import MOST_MEMBERS, Head, better
from swarm.tasks import end_tasks, set_within

log = logging.getLogger(__name__)

CALL, JOIN = "distributed-diffusion.call.2", "distributed-diffusion.join.2"
ANSWER_SECONDS = 5.0
BEAT_SECONDS = 3.0
"""Whoever waits for a leader hears from it so often; one that was killed or stopped costs `ANSWER_SECONDS` more than that."""
JOIN_SECONDS = 30.0
"""A leader that lives but has not led for so long beyond its word and our patience is given up."""
STRANGER_JOIN_SECONDS = 10.0
"""The same of a leader that we have not met: as long as it grants to one that it does not know."""
STRANGER_ANSWER_SECONDS = 1.0
"""How long a stranger that has answered before is waited for, once all that we have met have answered. A new stranger is not waited for:
it calls us when it is ready."""
STRANGER_COME_SECONDS = 2.0
"""How long a stranger that said it is ready may take to come, or as long as the round is worth waiting for. Later, it is in the next round."""
_OTHERS_SECONDS = 1.0
"""A leader has answered. Those that rank before it have this long to answer as well: it would send us on to them. So have, once all who
could lead us have answered, those who could not: a dial that a firewall drops takes 10 s to fail."""
_WAITED_SECONDS = 1.0
"""For so long beyond its word a caller waits for us at least (`arrivals.py`). Until then it need not be called: it has said that it is ready,
and knows that we come. That spares a third of all streams of a round, of which a hundred peers open ten thousand."""
_CALL_LASTS_SECONDS = 5.0
"""A caller from longer ago is called nevertheless: meanwhile it may have died, or gone on."""
_MAX_REDIRECTS = 8
_NOTICED_SECONDS = 1.0


_Calls = Mapping[str, "asyncio.Future[Answer | None]"]
_Spoke = dict[str, Answer]


class NoGroup(Exception):
    """No group came about; the reason is for the log. silent: peers that did not answer at all; culprits: those to whom we owe it, so
    that the next attempt begins at once, without them; slow: those of them that were too slow, as the honest may be; at_once: the
    next attempt need not wait although nobody is left out for it."""

    def __init__(
        self,
        reason: str,
        silent: Collection[str] = (),
        culprits: Collection[str] = (),
        slow: Collection[str] = (),
        *,
        at_once: bool = False,
    ):
        super().__init__(reason)
        self.silent, self.culprits, self.slow = frozenset(silent), frozenset(culprits), frozenset(slow)
        self.at_once = at_once or bool(culprits)


class _NotLed(PeerLost):
    """A leader lives, but has not led in the time that it has."""


@dataclass
class _Seen:
    """What came of an attempt to form a group so far. silent: they did not answer, or went away; culprits: strangers that wasted our
    time; slow: those of them that may have meant well; followed: we went to them; heard: we know from their answers where they stand."""

    silent: set[str] = field(default_factory=set)
    culprits: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    followed: set[str] = field(default_factory=set)
    heard: set[str] = field(default_factory=set)

    def too_slow(self, strangers: Collection[str]) -> None:
        self.culprits |= set(strangers)
        self.slow |= set(strangers)

    def no_group(self, reason: str, silent: Collection[str] = ()) -> NoGroup:
        return NoGroup(reason, self.silent | set(silent), self.culprits, self.slow)

    def of(self, group: Group) -> Group:
        return replace(group, silent=group.silent | self.silent, culprits=frozenset(self.culprits), slow=frozenset(self.slow))


@dataclass(frozen=True)
class _Caller:
    """A peer that is ready to average onto the state `head`, as we are: we told it that we come in `ready_seconds`. until: it waits for us."""

    head: Head
    ready_seconds: float
    until: float

    def answer(self) -> Answer:
        """What it would say if we called it."""
        return Answer(coming=True, ready_seconds=0.0, head=self.head, busy=False, behind=False, reason="")


@dataclass
class _Open:
    """A group that this peer leads or may come to lead: those who joined, each waiting for its answer."""

    parent: str
    waiting: dict[str, tuple[Ticket, asyncio.Future]] = field(default_factory=dict)
    leader: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Matchmaker:
    """Forms groups for one peer. `standing(peer)` says what it does, as far as that concerns `peer`; `heard(peer, head, ready)` is run
    when `peer` says that it stands at `head`, ready to average onto it or not; whether we should rather fetch that state, it returns.

    leads: whether others can dial this peer; max_samples: the most that one contribution may hold; rng: what names an attempt is drawn from.
    """

    def __init__(
        self,
        peer_id: str,
        streams: Streams,
        standing: Callable[[str], Standing],
        heard: Callable[[str, Head, bool], bool],
        max_samples: int,
        *,
        leads: bool = True,
        company: Company | None = None,
        rng: random.Random | None = None,
    ):
        self._peer_id, self._streams, self._standing, self._heard = peer_id, streams, standing, heard
        self._max_samples, self._leads = max_samples, leads
        self._company, self._rng = company or Company(), rng or random.SystemRandom()
        self._arrivals = Arrivals()
        self._calls: set[asyncio.Future] = set()  # asyncio itself holds a task only weakly, and nobody waits for all of these
        self._callers: dict[str, _Caller] = {}
        """Since our last attempt."""
        self._open: _Open | None = None
        self._announced: Group | None = None
        """The group that this peer leads, until it is over."""

    async def start(self) -> None:
        await self._streams.serve(CALL, self._answer_call)
        await self._streams.serve(JOIN, self._answer_join)

    def over(self) -> None:
        """The group that `form` returned has averaged, or failed to."""
        self._announced = None

    def moved(self) -> None:
        """This peer's state has changed: whoever waits to average onto another one is told at once."""
        if self._open is not None and self._open.parent != self._standing(self._peer_id).digest:
            self._dismiss(self._open, Refusal(error="the group is closed"))
            self._open = None

    async def form(
        self,
        ticket: Ticket,
        expected: dict[str, bool],
        check: Callable[[Group], None] = lambda group: None,
        *,
        patience: float = MAX_WAIT_SECONDS,
        behind_seconds: float = 0.0,
    ) -> Group:
        """A group for `ticket`, with as many of `expected` (peer -> whether it can lead) as come. Raises NoGroup.

        check: may raise NoGroup when this peer leads; before the group is announced, so that nobody begins to average in vain.
        patience: who needs more seconds than this to be ready is not waited for; behind_seconds: for how long those are waited for
        that have to fetch our state first.

        The group may be ours alone when everyone expected answered and none had anything to offer.
        """
        calls = self._call_all(expected, ticket.parent, patience)
        try:
            return await self._form(ticket, expected, calls, check, patience, behind_seconds)
        finally:
            # Not awaited: what we have announced must find us averaging.
            for peer, call in calls.items():
                if not self._company.is_stranger(peer):
                    call.cancel()

    async def _form(
        self,
        ticket: Ticket,
        expected: dict[str, bool],
        calls: _Calls,
        check: Callable[[Group], None],
        patience: float,
        behind_seconds: float,
    ) -> Group:
        seen = _Seen()
        before_us = self._before_us(ticket, [peer for peer in expected if expected[peer]])
        spoke = await self._leaders_answers(calls, before_us, patience, seen)
        group = await self._led(ticket, before_us, spoke, patience, seen)
        if group is None:
            spoke = await self._all_answers(calls, calls.keys() if ticket.reduces else before_us, seen)
            group = await self._led(ticket, before_us, spoke, patience, seen)
        if group is not None:
            seen.silent |= _unanswered(calls)
            return seen.of(group)
        coming = {peer: answer.ready_seconds for peer, answer in spoke.items() if _comes(answer, patience) and peer not in seen.followed}
        leaders = {peer for peer, answer in spoke.items() if expected[peer] and _leads(answer, patience)}
        _log_absent(spoke, coming.keys() | seen.followed)
        if seen.silent and not ticket.reduces and not any(expected.values()):
            raise seen.no_group("no peer of this run can be dialled: one of them must open its port, or somebody run `dd-peer --assist`")
        behind = {peer for peer, answer in spoke.items() if answer.behind and behind_seconds}
        if not ticket.reduces and (coming or behind):
            raise seen.no_group("every peer that others can dial is away, and this one cannot be dialled")
        missing = {peer for peer in seen.silent if not self._company.is_stranger(peer)}
        alone_if_nobody_joins = not (missing or leaders or any(_comes(answer, patience) for answer in spoke.values()))
        due = self._due(coming, patience) | dict.fromkeys(behind, behind_seconds)
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

    async def _led(self, ticket: Ticket, before_us: Collection[str], spoke: _Spoke, patience: float, seen: _Seen) -> Group | None:
        """The group of the best ranked one that leads us."""
        for leader in before_us:
            if leader in spoke and leader not in seen.followed and _leads(spoke[leader], patience):
                seen.followed.add(leader)
                _log_absent({leader: spoke[leader]}, [leader] if _comes(spoke[leader], patience) else [])
                await failpoints.reached("called", self._peer_id)
                group = await self._led_by(leader, ticket, spoke[leader], patience, seen)
                if group is not None:
                    return group
        return None

    async def _led_by(self, first: str, ticket: Ticket, answer: Answer, patience: float, seen: _Seen) -> Group | None:
        """The group that `first`, or one to which it sends us on, announces; None when none of them leads us after all."""
        leader = first
        try:
            for _ in range(_MAX_REDIRECTS):
                self._redirect(ticket.parent, leader)
                try:
                    said = await self._join_again(leader, ticket, self._lead_seconds(leader, answer, patience))
                    if isinstance(said, Announcement):
                        return group_of(said, ticket, leader, self._standing(self._peer_id), self._max_samples)
                    onward = self._onward(leader, said.leader, ticket)
                except Refused as error:
                    log.info("not led by %s: %s", leader[-6:], error)
                    return None
                except PeerLost as error:
                    log.info("not led by %s: %s", leader[-6:], error)
                    # Whoever waits for an average of others' promised nothing.
                    self._lost(leader, error, seen, blamed=not answer.busy)
                    if leader == first:
                        return None
                    if self._company.is_stranger(first):
                        seen.too_slow([first])
                        return None
                    leader = first  # it lives, and will notice as well
                else:
                    if onward in seen.silent:
                        await asyncio.sleep(_NOTICED_SECONDS)
                    else:
                        leader = onward
            log.info("not led by %s: sent on too often", first[-6:])
            seen.silent.add(first)
            return None
        finally:
            if self._open is not None:
                self._open.leader = None

    def _lost(self, leader: str, error: PeerLost, seen: _Seen, *, blamed: bool) -> None:
        """`leader` is gone, or says nothing that makes a group. A peer that we have met may have been stopped or cut off: it is absent."""
        seen.silent.add(leader)
        if blamed:
            stranger = {leader} if self._company.is_stranger(leader) else set()
            seen.culprits |= {*error.culprits, *stranger}
            if isinstance(error, _NotLed):
                seen.slow |= stranger

    def _lead_seconds(self, leader: str, answer: Answer, patience: float) -> float:
        """For how long `leader`, which says every few seconds that it lives, may let us wait."""
        stranger = self._company.is_stranger(leader)
        if answer.busy:
            return JOIN_SECONDS if stranger else MAX_WAIT_SECONDS
        return min(answer.ready_seconds + patience + (STRANGER_JOIN_SECONDS if stranger else JOIN_SECONDS), MAX_WAIT_SECONDS)

    def _due(self, coming: Mapping[str, float], patience: float) -> dict[str, float]:
        """Seconds until each of them should have come: when it is ready, and as long as it deserves by how late it came before."""

        def grant(peer: str) -> float:
            longest = max(STRANGER_COME_SECONDS, patience) if self._company.is_stranger(peer) else MAX_WAIT_SECONDS
            return min(self._arrivals.grant(peer), longest)

        return {peer: min(ready + grant(peer), MAX_WAIT_SECONDS) for peer, ready in coming.items()}

    def _before_us(self, ticket: Ticket, leaders: Collection[str]) -> list[str]:
        """Those of `leaders` that we should join, the best ranked first."""
        included = self._standing(self._peer_id).included
        ours = leads_before(ticket.parent, self._peer_id, included) if ticket.reduces else None
        ranked = sorted((leads_before(ticket.parent, peer, included), peer) for peer in leaders)
        return [peer for theirs, peer in ranked if ours is None or theirs < ours]

    def _order(self, parent: str, peer: str) -> tuple[bool, str]:
        return leads_before(parent, peer, self._standing(self._peer_id).included)

    def _call_all(self, peers: Collection[str], parent: str, patience: float = MAX_WAIT_SECONDS) -> _Calls:
        """Tell all that we are ready, but those that wait for us. What a stranger answers may still be heard when the round is over."""
        there = self._waiting_callers(parent, patience)
        calls = {peer: _done(there[peer].answer()) if peer in there else asyncio.create_task(self._call(peer, parent)) for peer in peers}
        self._calls = {call for call in self._calls if not call.done()} | set(calls.values())
        return calls

    def _waiting_callers(self, parent: str, patience: float) -> dict[str, _Caller]:
        """Those that called us onto `parent` and wait for us. They are forgotten: after an attempt that failed all are called."""
        callers, self._callers, now = self._callers, {}, asyncio.get_running_loop().time()
        return {
            peer: caller
            for peer, caller in callers.items()
            if caller.head.digest == parent and caller.ready_seconds <= patience and now <= caller.until and not self._company.is_stranger(peer)
        }

    async def _leaders_answers(self, calls: _Calls, before_us: Sequence[str], patience: float, seen: _Seen) -> _Spoke:
        """The answers there are once one that we have met, of those that rank before us, will lead, and those before it had a second more.

        Whoever else is called is its matter. A peer that cannot be dialled is found out after up to 10 s, and who came so late to its
        leader would come too late to every round. Who goes to another one than the first is sent on. Raises NoGroup.
        """
        friends = {calls[peer]: peer for peer in before_us if not self._company.is_stranger(peer)}
        spoke, open_ = {}, set(friends)
        while open_ and not any(_leads(answer, patience) for answer in spoke.values()):
            done, open_ = await asyncio.wait(open_, return_when=asyncio.FIRST_COMPLETED)
            spoke |= self._spoke({friends[call]: call for call in done}, seen)
        first = next((peer for peer in before_us if peer in spoke and _leads(spoke[peer], patience)), None)
        if first is None:
            return {}
        better = before_us[: before_us.index(first)]
        if awaited := [calls[peer] for peer in better if not self._company.is_stranger(peer) or self._company.has_answered(peer)]:
            await asyncio.wait(awaited, timeout=_OTHERS_SECONDS)
        return self._spoke({peer: calls[peer] for peer in before_us}, seen)

    async def _all_answers(self, calls: _Calls, needed: Collection[str], seen: _Seen) -> _Spoke:
        """The answers of all, as far as they come in time; those of others than the `needed` have a second more. Raises NoGroup."""
        strangers = {peer: call for peer, call in calls.items() if self._company.is_stranger(peer)}
        await asyncio.gather(*(call for peer, call in calls.items() if peer in needed and peer not in strangers))
        if others := {call: peer for peer, call in calls.items() if peer not in needed and peer not in strangers}:
            _, late = await asyncio.wait(others, timeout=_OTHERS_SECONDS)
            seen.silent |= {others[call] for call in late}
        await self._await_strangers(strangers, len(strangers) == len(calls), seen)
        await failpoints.reached("called", self._peer_id)
        return self._spoke(calls, seen)

    def _spoke(self, calls: _Calls, seen: _Seen) -> _Spoke:
        """Who has answered by now. Raises NoGroup when one of them has a better state, which is then being fetched."""
        seen.silent |= _unanswered(calls)
        spoke = {peer: answer for peer, call in calls.items() if call.done() and (answer := call.result()) is not None}
        for peer, answer in spoke.items():
            if peer not in seen.heard and self._heard(peer, answer.head, False):
                raise NoGroup(f"{peer[-6:]} has a better state, {answer.head.digest[:8]}")
            seen.heard.add(peer)
        return spoke

    async def _await_strangers(self, calls: dict[str, asyncio.Task], there_is_nobody_else: bool, seen: _Seen) -> None:
        """A new one is waited for only by who has nobody else: three invented ones every two seconds would cost each round a dial in vain."""
        awaited = calls if there_is_nobody_else else {peer: call for peer, call in calls.items() if self._company.has_answered(peer)}
        if awaited:
            await asyncio.wait(awaited.values(), timeout=STRANGER_ANSWER_SECONDS)
        for peer, call in awaited.items():
            if not call.done():
                seen.too_slow({peer} if self._company.has_answered(peer) else ())
                self._company.did_not_answer(peer)

    async def _call(self, peer: str, parent: str) -> Answer | None:
        """Tell `peer` that we are ready; its answer, or None when there is none."""
        answer = await self._ask(peer, parent)
        if answer is None:
            self._company.did_not_answer(peer)
        else:
            self._company.answered(peer)
        return answer

    async def _ask(self, peer: str, parent: str) -> Answer | None:
        try:
            channel = await self._streams.open(peer, CALL)
        except PeerLost as error:
            log.info("no answer to a call: %s", error)
            return None
        with contextlib.closing(channel):
            try:
                await channel.send(Call(head=self._standing(self._peer_id).head), seconds=ANSWER_SECONDS)
                answer, _ = await channel.receive(Answer, seconds=ANSWER_SECONDS)
                return answer
            except PeerLost as error:
                log.info("no answer to a call: %s", error)
                return None

    async def _join_again(self, leader: str, ticket: Ticket, seconds: float) -> Announcement | Onward:
        """As `_join`; once more where the stream breaks."""
        try:
            return await self._join(leader, ticket, seconds)
        except Broken as error:
            # Else the leader waits for us to come, and we for those who went to it.
            log.info("joining %s once more: %s", leader[-6:], error)
            return await self._join(leader, ticket, seconds)

    def _onward(self, leader: str, onward: str, ticket: Ticket) -> str:
        """`onward`, to whom `leader` sends us. Raises PeerLost when we do not go there."""
        if self._company.left_out(onward):
            raise Refused(f"{leader[-6:]} points to {onward[-6:]}, which is left out")
        if onward == self._peer_id or self._order(ticket.parent, onward) >= self._order(ticket.parent, leader):
            raise PeerLost(f"{leader[-6:]} points to {onward[-6:]}, which does not rank before it", [leader])
        return onward

    async def _join(self, leader: str, ticket: Ticket, seconds: float) -> Announcement | Onward:
        """What `leader` says in the end: a group, or who leads instead. Raises PeerLost when it has not within `seconds`."""
        channel = await self._streams.open(leader, JOIN)
        with contextlib.closing(channel):
            member = ticket.member
            join = Join(parent=ticket.parent, number=member.number, samples=member.samples, reduces=ticket.reduces, without=ticket.without)
            await channel.send(join, seconds=ANSWER_SECONDS)
            answer, _ = await channel.receive(JOIN_ANSWER, seconds=ANSWER_SECONDS)
            if isinstance(answer, Wait):
                await failpoints.reached("joined", self._peer_id)
            until = asyncio.get_running_loop().time() + seconds
            while isinstance(answer, Wait):
                if asyncio.get_running_loop().time() >= until:
                    raise _NotLed(f"{leader[-6:]} lives, but has not led within {seconds:.0f} s", [leader])
                answer, _ = await channel.receive(JOIN_ANSWER, seconds=BEAT_SECONDS + ANSWER_SECONDS)
            return answer

    async def _gather(
        self,
        ticket: Ticket,
        coming: dict[str, float],
        due: dict[str, float],
        seen: _Seen,
        alone_if_nobody_joins: bool,
    ) -> tuple[Group, list[asyncio.Future]]:
        """Wait for those who are coming (peer -> seconds until it is ready), each until it is due (peer -> seconds).

        Returns the group, and what its followers wait for.
        """
        book = self._book(ticket.parent)
        book.leader = None
        await self._until_all_came(book, coming, due)
        self._open = None
        self._send_away(book, ticket)
        late = set(coming) - set(book.waiting)
        strangers = {peer for peer in late if self._company.is_stranger(peer)}
        seen.too_slow(strangers)
        if not book.waiting and not alone_if_nobody_joins:
            raise seen.no_group(f"nobody came ({len(coming)} had promised to, {len(seen.silent)} did not answer)", coming)
        for peer in late:
            self._arrivals.missed(peer)
            log.info("closed without %s: it did not come within %.1f s", peer[-6:], due[peer])
        tickets = [ticket, *(self._role(joined) for joined, _ in book.waiting.values())]
        group = Group.of(tickets, f"{self._rng.getrandbits(64):016x}", late)
        return replace(seen.of(group), late=tuple(sorted(strangers)), leader=self._peer_id), [answer for _, answer in book.waiting.values()]

    def _role(self, ticket: Ticket) -> Ticket:
        """A stranger that brings samples reduces once it has been in a round: a share of a small vector may be the only one, and then
        nobody could tell a reducer that stalls from one that waits for a member."""
        trusted = ticket.assists or not self._company.is_stranger(ticket.member.peer)
        return replace(ticket, reduces=ticket.reduces and trusted)

    async def _until_all_came(self, book: _Open, coming: Mapping[str, float], due: Mapping[str, float]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        there: set[str] = set()
        while True:
            now = loop.time()
            for peer in (set(coming) & set(book.waiting)) - there:
                self._arrivals.came(peer, now - began - coming[peer])
            there |= set(book.waiting)
            missing = [began + seconds for peer, seconds in due.items() if peer not in book.waiting and began + seconds > now]
            if not missing:
                return
            book.changed.clear()
            await set_within(max(missing) - now, book.changed)

    def _send_away(self, book: _Open, ticket: Ticket) -> None:
        """No group holds two of whom one leaves the other out: they would only fail once more."""
        without = {peer: joined.without for peer, (joined, _) in book.waiting.items()} | {self._peer_id: ticket.without}
        for peer in self._company.at_odds(ticket.parent, without, self._peer_id):
            _, answer = book.waiting.pop(peer)
            log.info("closed without %s: it is at odds with another member", peer[-6:])
            _tell([answer], Refusal(error="at odds with another member of this group"))

    async def _answer_call(self, channel: Channel) -> None:
        call, _ = await channel.receive(Call, seconds=ANSWER_SECONDS)
        head = call.head
        left_out = self._company.left_out(channel.peer)
        self._company.answered(channel.peer)
        self._heard(channel.peer, head, not left_out)
        standing = self._standing(channel.peer)
        ours = standing.head
        reason = "" if head == ours else f"it is at {ours.digest[:8]}, you average onto {head.digest[:8]}"
        reason = reason or ("you are left out for now" if left_out else "")
        reason = reason or ("" if standing.has_samples else "it has nothing to average") or ("it is averaging" if standing.busy else "")
        if reason:
            log.info("does not come when %s calls: %s", channel.peer[-6:], reason)
        answer = Answer(
            coming=not reason,
            reason=reason,
            ready_seconds=standing.ready_seconds,
            busy=head == ours and standing.busy and not left_out,
            behind=standing.has_samples and better(head, ours),
            head=ours,
        )
        self._callers.pop(channel.peer, None)
        await channel.send(answer, seconds=ANSWER_SECONDS)
        if answer.coming:
            seconds = min(answer.ready_seconds, _CALL_LASTS_SECONDS) + _WAITED_SECONDS
            self._callers[channel.peer] = _Caller(head, answer.ready_seconds, asyncio.get_running_loop().time() + seconds)

    async def _answer_join(self, channel: Channel) -> None:
        try:
            join, _ = await channel.receive(Join, seconds=ANSWER_SECONDS)
            standing, ticket = self._standing(channel.peer), ticket_of(join, channel.peer, self._max_samples)
            if reason := self._refusal(ticket, standing):
                raise PeerLost(reason)
        except PeerLost as error:
            log.info("refused %s: %s", channel.peer[-6:], error)
            raise
        self._company.answered(channel.peer)
        self._heard(channel.peer, standing.head, True)
        if self._announced is not None and self._announced.holds(ticket):
            # Its stream broke before it heard so. Without it, all the others would wait for its parts in vain.
            return await channel.send(self._announced.announcement(), seconds=ANSWER_SECONDS)
        book = self._book(ticket.parent)
        if book.leader is not None:
            return await channel.send(Onward(leader=book.leader), seconds=ANSWER_SECONDS)
        if len(book.waiting) >= MOST_MEMBERS - 1 and channel.peer not in book.waiting:
            raise PeerLost("the group is full")
        answer = asyncio.get_running_loop().create_future()
        self._replace(book, channel.peer, (ticket, answer))
        try:
            await channel.send(await self._answer_unless_gone(ticket, answer, channel), seconds=ANSWER_SECONDS)
        finally:
            if book.waiting.get(channel.peer, (None, None))[1] is answer:
                del book.waiting[channel.peer]

    @staticmethod
    def _replace(book: _Open, peer: str, entry: tuple[Ticket, asyncio.Future]) -> None:
        if peer in book.waiting and not book.waiting[peer][1].done():
            book.waiting[peer][1].set_result(Refusal(error="joined once more"))
        book.waiting[peer] = entry
        book.changed.set()

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
        if ticket.reduces and self._order(ticket.parent, ticket.member.peer) < self._order(ticket.parent, self._peer_id):
            return "it ranks before this peer and should lead itself"
        return ""

    def _book(self, parent: str) -> _Open:
        if self._open is None or self._open.parent != parent:
            if self._open is not None:
                self._dismiss(self._open, Refusal(error="the group is closed"))
            self._open = _Open(parent)
        return self._open

    def _redirect(self, parent: str, leader: str) -> None:
        book = self._book(parent)
        book.leader = leader
        self._dismiss(book, Onward(leader=leader))

    @staticmethod
    def _dismiss(book: _Open, answer: Message) -> None:
        _tell([waiting for _, waiting in book.waiting.values()], answer)
        book.waiting.clear()  # what they are told may be on its way for seconds: they are in no group of ours any more


def _done(answer: Answer) -> asyncio.Future[Answer]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(answer)
    return future


def _tell(waiting: Collection[asyncio.Future], answer: Message) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(answer)


def _unanswered(calls: _Calls) -> set[str]:
    """Whom we have called in vain by now."""
    return {peer for peer, call in calls.items() if call.done() and call.result() is None}


def _comes(answer: Answer, patience: float) -> bool:
    return answer.coming and answer.ready_seconds <= patience


def _leads(answer: Answer, patience: float) -> bool:
    """Whether the one that gave it, if it can be dialled, is worth going to: it comes, or averages and lets us know."""
    return _comes(answer, patience) or answer.busy


def _log_absent(spoke: Mapping[str, Answer], coming: Collection[str]) -> None:
    absent = [
        f"{peer[-6:]} ({answer.reason or f'ready in {answer.ready_seconds:.0f} s'})" for peer, answer in spoke.items() if peer not in coming
    ]
    if absent:
        log.info("not waiting for %s", ", ".join(absent))
