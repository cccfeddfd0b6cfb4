"""Who averages with whom: every peer that is ready goes to the best ranked one it knows, and that one closes the group.

Those that the host trusts rank first, then those whose work is in the parent state; among equals a hash of that state and the peer's id decides.
Everybody computes the same order. No one else is special for longer than a round. Since peers only ever join a better ranked one, nobody waits in a
circle. A group closes at once when all who are expected came, declined or proved unreachable; no fixed matchmaking time is ever waited out. Whoever
needs longer than the round is worth waiting for is left out, and comes with the same contribution into a later one.

The rooms: `calls.py` (who is ready), `following.py` (another one leads), `leading.py` (we lead).
"""

import logging
import random
from collections.abc import Callable, Collection, Mapping

from peer.sync.engine import failpoints
from peer.sync.engine.net.messages import MAX_WAIT_SECONDS, Answer
from peer.sync.engine.net.streams import Streams
from peer.sync.engine.round.calls import FIRST_SECONDS, Called, Calls, Spoke, comes, leads, unanswered
from peer.sync.engine.round.company import Company
from peer.sync.engine.round.following import Following
from peer.sync.engine.round.groups import NO_RECEIPTS, Group, NoGroup, Seen, Standing, Ticket
from peer.sync.engine.round.leading import Leading
from peer.sync.engine.state import Head
from swarm.receipts import Receipts

log = logging.getLogger(__name__)


class Matchmaker:
    """Forms groups for one peer. `standing(peer)` says what it does, as far as that concerns `peer`; `heard(peer, head, ready)` is run
    when `peer` says that it stands at `head`, ready to average onto it or not; whether we should rather fetch that state, it returns.

    leads: whether others can dial this peer; max_samples: the most that one contribution may hold; receipts: how those of the host are read; rng: what names an attempt is drawn from; average_seconds: for how long a group averages at most.
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
        receipts: Receipts = NO_RECEIPTS,
        rng: random.Random | None = None,
        average_seconds: float = MAX_WAIT_SECONDS,
    ):
        self._peer_id, self._standing, self._company = peer_id, standing, company or Company()
        self._calls = Calls(peer_id, streams, standing, heard, self._company)
        self._leading = Leading(
            peer_id, streams, standing, heard, max_samples, self._company, leads=leads, receipts=receipts, rng=rng or random.SystemRandom()
        )
        self._following = Following(peer_id, streams, standing, max_samples, self._company, self._leading, receipts, average_seconds)

    async def start(self) -> None:
        await self._calls.serve()
        await self._leading.serve()

    def over(self) -> None:
        """The group that `form` returned has averaged, or failed to."""
        self._leading.over()

    def moved(self) -> None:
        """This peer's state has changed: whoever waits to average onto another one is told at once."""
        self._leading.moved()

    async def form(
        self,
        ticket: Ticket,
        expected: dict[str, bool],
        check: Callable[[Group], None] = lambda group: None,
        *,
        patience: float = MAX_WAIT_SECONDS,
        behind_seconds: float = 0.0,
        told: Collection[str] = (),
    ) -> Group:
        """A group for `ticket`, with as many of `expected` (peer -> whether it can lead) as come. Raises NoGroup.

        check: may raise NoGroup when this peer leads; before the group is announced, so that nobody begins to average in vain.
        patience: who needs more seconds than this to be ready is not waited for; behind_seconds: for how long those are waited for
        that have to fetch our state first. told: who hears without us that the round has begun. If the best ranked is one of them, it is called
        before the others of them: it calls everybody itself, and they need not be called at all once it leads us.

        The group may be ours alone when everyone expected answered and none had anything to offer.
        """
        before_us = self._before_us(ticket, [peer for peer in expected if expected[peer]])
        spared = set(told).difference(before_us[:1]) if before_us and before_us[0] in told else ()
        calls = self._calls.call_all(expected, ticket.parent, patience, spared)
        try:
            return await self._form(ticket, expected, before_us, calls, check, patience, behind_seconds)
        finally:
            self._calls.end(calls)

    async def again(self, closed: Group, ticket: Ticket, gone: Collection[str], check: Callable[[Group], None] = lambda group: None) -> Group:
        """The group `closed` once more, of those that come back to its leader at once; who is `gone` is not waited for. Raises NoGroup.

        Only for a group that is void. Its leader knows that itself before it closes the group again, so nobody can have committed the first
        closing: the others need no more than to have failed in it. Nobody is called, since all are at their leader within seconds.
        """
        if closed.leader in gone:
            raise NoGroup("its leader is gone")
        if closed.leader != self._peer_id:
            return await self._following.led_again(closed, ticket)
        return await self._leading.lead_again(closed, ticket, gone, check, Seen())

    async def _form(
        self,
        ticket: Ticket,
        expected: dict[str, bool],
        before_us: list[str],
        calls: Called,
        check: Callable[[Group], None],
        patience: float,
        behind_seconds: float,
    ) -> Group:
        seen = Seen()
        group = await self._followed(ticket, before_us, calls, patience, seen, FIRST_SECONDS if len(calls) < len(expected) else None)
        if group is None and (others := [peer for peer in expected if peer not in calls]):
            calls |= self._calls.call_all(others, ticket.parent, patience)
            group = await self._followed(ticket, before_us, calls, patience, seen)
        if group is None:
            spoke = await self._calls.all_answers(calls, calls.keys() if ticket.reduces else before_us, seen)
            group = await self._led(ticket, before_us, spoke, patience, seen)
        if group is not None:
            seen.silent |= unanswered(calls)
            return seen.of(group)
        coming = {peer: answer.ready_seconds for peer, answer in spoke.items() if comes(answer, patience) and peer not in seen.followed}
        leaders = {peer for peer, answer in spoke.items() if expected[peer] and leads(answer, patience)}
        _log_absent(spoke, coming.keys() | seen.followed)
        if seen.silent and not ticket.reduces and not any(expected.values()):
            raise seen.no_group("no peer of this run can be dialled: one of them must open its port, or somebody run `dd-peer --assist`")
        behind = {peer for peer, answer in spoke.items() if answer.behind and behind_seconds}
        if not ticket.reduces and (coming or behind):
            raise seen.no_group("every peer that others can dial is away, and this one cannot be dialled")
        missing = {peer for peer in seen.silent if not self._company.is_stranger(peer)}
        alone_if_nobody_joins = not (missing or leaders or any(comes(answer, patience) for answer in spoke.values()))
        return await self._leading.lead(
            ticket, coming, dict.fromkeys(behind, behind_seconds), patience, check, seen, alone_if_nobody_joins=alone_if_nobody_joins
        )

    async def _followed(
        self, ticket: Ticket, before_us: Collection[str], calls: Called, patience: float, seen: Seen, seconds: float | None = None
    ) -> Group | None:
        """The group of the first that leads us, of those that were called; None when none does, or has answered within `seconds`."""
        called = [peer for peer in before_us if peer in calls]
        spoke = await self._calls.leaders_answers(calls, called, patience, seen, seconds)
        return await self._led(ticket, called, spoke, patience, seen)

    async def _led(self, ticket: Ticket, before_us: Collection[str], spoke: Spoke, patience: float, seen: Seen) -> Group | None:
        """The group of the best ranked one that leads us."""
        for leader in before_us:
            if leader in spoke and leader not in seen.followed and leads(spoke[leader], patience):
                seen.followed.add(leader)
                _log_absent({leader: spoke[leader]}, [leader] if comes(spoke[leader], patience) else [])
                await failpoints.reached("called", self._peer_id)
                group = await self._following.led_by(leader, ticket, spoke[leader], patience, seen)
                if group is not None:
                    return group
        return None

    def _before_us(self, ticket: Ticket, leaders: Collection[str]) -> list[str]:
        """Those of `leaders` that we should join, the best ranked first."""
        standing = self._standing(self._peer_id)
        ours = standing.leads_before(ticket.parent, self._peer_id) if ticket.reduces else None
        ranked = sorted((standing.leads_before(ticket.parent, peer), peer) for peer in leaders)
        return [peer for theirs, peer in ranked if ours is None or theirs < ours]


def _log_absent(spoke: Mapping[str, Answer], coming: Collection[str]) -> None:
    absent = [
        f"{peer[-6:]} ({answer.reason or f'ready in {answer.ready_seconds:.0f} s'})" for peer, answer in spoke.items() if peer not in coming
    ]
    if absent:
        log.info("not waiting for %s", ", ".join(absent))
