"""The group that another peer leads. Whoever is ready goes to the best ranked peer that it knows; that one may know a better one, and sends it on."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from peer.sync.engine import failpoints
from peer.sync.engine.net.messages import JOIN_ANSWER, MAX_WAIT_SECONDS, Announcement, Answer, Join, Onward, Wait
from peer.sync.engine.net.streams import Broken, PeerLost, Refused, Streams
from peer.sync.engine.round.calls import ANSWER_SECONDS
from peer.sync.engine.round.company import Company
from peer.sync.engine.round.groups import NO_RECEIPTS, Group, NoGroup, Seen, Standing, Ticket, group_of
from peer.sync.engine.round.leading import AGAIN_SECONDS, BEAT_SECONDS, JOIN, Leading
from swarm.receipts import Receipts

log = logging.getLogger(__name__)

JOIN_SECONDS = 30.0
"""How long after it said that it would lead, and after our patience with it, a leader that lives is given up."""
STRANGER_JOIN_SECONDS = 10.0
"""The same of a leader that we have not met: as long as it grants to one that it does not know."""
_MAX_REDIRECTS = 8
_NOTICED_SECONDS = 1.0
_MOST_WAITS_AT_ONCE = 4
"""Of a leader's words that it lives: what held one up may let several through together."""


class _NotLed(PeerLost):
    """A leader lives, but has not led in the time that it has."""


class Following:
    """standing, max_samples, receipts, average_seconds: as in `Matchmaker`; leading: sends those who come to us after us."""

    def __init__(
        self,
        peer_id: str,
        streams: Streams,
        standing: Callable[[str], Standing],
        max_samples: int,
        company: Company,
        leading: Leading,
        receipts: Receipts = NO_RECEIPTS,
        average_seconds: float = MAX_WAIT_SECONDS,
    ):
        self._busy_seconds = min(average_seconds + JOIN_SECONDS, MAX_WAIT_SECONDS)
        self._peer_id, self._streams, self._standing = peer_id, streams, standing
        self._max_samples, self._company, self._leading, self._receipts = max_samples, company, leading, receipts

    async def led_by(self, first: str, ticket: Ticket, answer: Answer, patience: float, seen: Seen) -> Group | None:
        """The group that `first`, or one to which it sends us on, announces; None when none of them leads us after all."""
        leader = first
        try:
            for _ in range(_MAX_REDIRECTS):
                self._leading.redirect(ticket.parent, leader)
                try:
                    said = await self._join_again(leader, ticket, self._lead_seconds(leader, answer, patience))
                    if isinstance(said, Announcement):
                        return group_of(said, ticket, leader, self._standing(self._peer_id), self._max_samples, self._receipts)
                    onward = self._onward(leader, said.leader, ticket)
                except Refused as error:
                    log.info("not led by %s: %s", leader[-6:], error)
                    return None
                except PeerLost as error:
                    log.info("not led by %s: %s", leader[-6:], error)
                    # Whoever waits for an average of others' promised nothing; but none takes longer than it may.
                    too_long = isinstance(error, _NotLed) and self._busy_seconds < MAX_WAIT_SECONDS and not self._company.is_stranger(leader)
                    self._lost(leader, error, seen, blamed=too_long or not answer.busy)
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
            self._leading.redirect_no_more()

    async def led_again(self, closed: Group, ticket: Ticket) -> Group:
        """The group `closed`, which is void, as its leader closes it once more. Raises NoGroup."""
        leader = closed.leader
        self._leading.redirect(ticket.parent, leader)
        try:
            said = await self._join_again(leader, ticket, 2 * AGAIN_SECONDS, after=closed.id)
            if not isinstance(said, Announcement):
                raise NoGroup(f"{leader[-6:]} leads no more")
            group = group_of(said, ticket, leader, self._standing(self._peer_id), self._max_samples, self._receipts)
            if group.id == closed.id:
                raise NoGroup(f"{leader[-6:]} closes no group again")
            return group
        except PeerLost as error:
            raise NoGroup(f"not led again: {error}") from None
        finally:
            self._leading.redirect_no_more()

    def _lost(self, leader: str, error: PeerLost, seen: Seen, *, blamed: bool) -> None:
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
            return JOIN_SECONDS if stranger else self._busy_seconds
        return min(answer.ready_seconds + patience + (STRANGER_JOIN_SECONDS if stranger else JOIN_SECONDS), MAX_WAIT_SECONDS)

    async def _join_again(self, leader: str, ticket: Ticket, seconds: float, after: str = "") -> Announcement | Onward:
        """As `_join`; once more where the stream breaks."""
        try:
            return await self._join(leader, ticket, seconds, after)
        except Broken as error:
            # Else the leader waits for us to come, and we for those who went to it.
            log.info("joining %s again: %s", leader[-6:], error)
            return await self._join(leader, ticket, seconds, after)

    def _onward(self, leader: str, onward: str, ticket: Ticket) -> str:
        """`onward`, to whom `leader` sends us. Raises PeerLost when we do not go there, Refused where nobody need be at fault."""
        if self._company.left_out(onward):
            raise Refused(f"{leader[-6:]} points to {onward[-6:]}, which is left out")
        standing = self._standing(self._peer_id)
        if onward == self._peer_id or not standing.ranks_before(ticket.parent, onward, leader):
            reason = f"{leader[-6:]} points to {onward[-6:]}, which does not rank before it"
            # Where the host trusts some, the leader may have heard of one more or one less than we: nobody is at fault.
            raise Refused(reason) if standing.has_roles else PeerLost(reason, [leader])
        return onward

    async def _join(self, leader: str, ticket: Ticket, seconds: float, after: str = "") -> Announcement | Onward:
        """What `leader` says in the end: a group, or who leads instead. Raises PeerLost when it has not within `seconds`.

        after: the group of this leader that is void, '' for none.
        """
        channel = await self._streams.open(leader, JOIN)
        with contextlib.closing(channel):
            member = ticket.member
            join = Join(
                parent=ticket.parent, number=member.number, samples=member.samples, norm=ticket.norm, receipt=ticket.receipt,
                reduces=ticket.reduces, without=ticket.without, draw=ticket.draw, after=after,
            )  # fmt: skip
            await channel.send(join, seconds=ANSWER_SECONDS)
            answer, _ = await channel.receive(JOIN_ANSWER, seconds=ANSWER_SECONDS)
            if isinstance(answer, Wait):
                await failpoints.reached("joined", self._peer_id)
            clock, waits = asyncio.get_running_loop().time, 0
            began = clock()
            while isinstance(answer, Wait):
                waits, waited = waits + 1, clock() - began
                if waited >= seconds:
                    raise _NotLed(f"{leader[-6:]} lives, but has not led within {seconds:.0f} s", [leader])
                if waits > _MOST_WAITS_AT_ONCE + 2 * waited / BEAT_SECONDS:  # one costs 69 us, and 1.7 Mbit/s of them all of a CPU
                    raise PeerLost(f"{leader[-6:]} says more often that it lives than every {BEAT_SECONDS:.0f} s", [leader])
                answer, _ = await channel.receive(JOIN_ANSWER, seconds=BEAT_SECONDS + ANSWER_SECONDS)
            return answer
