"""Who is ready: we call all who may be, and note who calls us.

Strangers (`company.py`) are called like the others, but hold nobody up: they have less time for every word.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass

from peer.sync.engine import failpoints
from peer.sync.engine.net.messages import MAX_WAIT_SECONDS, Answer, Call
from peer.sync.engine.net.streams import Channel, PeerLost, Streams
from peer.sync.engine.round.company import Company
from peer.sync.engine.round.groups import NoGroup, Seen, Standing
from peer.sync.engine.state import Head, better

log = logging.getLogger(__name__)

CALL = "distributed-diffusion.call.5"
ANSWER_SECONDS = 5.0
STRANGER_ANSWER_SECONDS = 1.0
"""How long a stranger that has answered before is waited for, once all that we have met have answered. A new stranger is not waited for:
it calls us when it is ready."""
FIRST_SECONDS = 1.0
"""The best ranked is the only one that is called at first, and has not answered: the others are called as well."""
_OTHERS_SECONDS = 1.0
"""A leader has answered. Those that rank before it have this long to answer as well: it would send us on to them. So have, once all who
could lead us have answered, those who could not: a dial that a firewall drops takes 10 s to fail."""
_WAITED_SECONDS = 1.0
"""How long beyond its word a caller waits for us at least (`arrivals.py`). Until then it need not be called: it has said that it is ready,
and knows that we come. A hundred peers open ten thousand streams a round; this spares a third of them."""
_CALL_LASTS_SECONDS = 5.0
"""A caller from longer ago is called nevertheless: meanwhile it may have died, or gone on."""

Called = dict[str, "asyncio.Future[Answer | None]"]
"""Peer -> what it answers; None: nothing."""
Spoke = dict[str, Answer]


@dataclass(frozen=True)
class _Caller:
    """A peer that is ready to average onto the state `head`, as we are: we told it that we come in `ready_seconds`. until: it waits for us."""

    head: Head
    ready_seconds: float
    until: float

    def answer(self) -> Answer:
        """What it would say if we called it."""
        return Answer(coming=True, ready_seconds=0.0, head=self.head, busy=False, behind=False, reason="")


class Calls:
    """standing, heard: as in `Matchmaker`."""

    def __init__(
        self,
        peer_id: str,
        streams: Streams,
        standing: Callable[[str], Standing],
        heard: Callable[[str, Head, bool], bool],
        company: Company,
    ):
        self._peer_id, self._streams, self._standing, self._heard, self._company = peer_id, streams, standing, heard, company
        self._open: set[asyncio.Future] = set()  # asyncio itself holds a task only weakly, and nobody waits for all of these
        self._callers: dict[str, _Caller] = {}
        """Since our last attempt."""

    async def serve(self) -> None:
        await self._streams.serve(CALL, self._answer)

    def call_all(self, peers: Collection[str], parent: str, patience: float = MAX_WAIT_SECONDS, spared: Container[str] = ()) -> Called:
        """Tell all that we are ready, but those that wait for us, and the `spared`. What a stranger answers may still be heard when the round is over.

        Who waits for us has answered, spared or not.
        """
        there = self._waiting_callers(parent, patience)
        calls: Called = {}
        for peer in peers:
            if peer in there:
                calls[peer] = _done(there[peer].answer())
            elif peer not in spared:
                calls[peer] = asyncio.create_task(self._call(peer, parent))
        self._open = {call for call in self._open if not call.done()} | set(calls.values())
        return calls

    def end(self, calls: Called) -> None:
        """The attempt is over. Not awaited: what we have announced must find us averaging."""
        for peer, call in calls.items():
            if not self._company.is_stranger(peer):
                call.cancel()

    async def leaders_answers(
        self, calls: Called, before_us: Sequence[str], patience: float, seen: Seen, seconds: float | None = None
    ) -> Spoke:
        """The answers there are once one that we have met, of those that rank before us, will lead, and those before it had a second more.

        Whoever else is called is its matter. A peer that cannot be dialled is found out after up to 10 s, and who came so late to its
        leader would come too late to every round. Who goes to another one than the first is sent on. seconds: until none is waited for any more.
        Raises NoGroup.
        """
        friends = {calls[peer]: peer for peer in before_us if not self._company.is_stranger(peer)}
        spoke, open_, late = {}, set(friends), False
        while open_ and not late and not any(leads(answer, patience) for answer in spoke.values()):
            done, open_ = await asyncio.wait(open_, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            spoke |= self._spoke({friends[call]: call for call in done}, seen)
            late = not done
        first = next((peer for peer in before_us if peer in spoke and leads(spoke[peer], patience)), None)
        if first is None:
            return {}
        better = before_us[: before_us.index(first)]
        if awaited := [calls[peer] for peer in better if not self._company.is_stranger(peer) or self._company.has_answered(peer)]:
            await asyncio.wait(awaited, timeout=_OTHERS_SECONDS)
        return self._spoke({peer: calls[peer] for peer in before_us}, seen)

    async def all_answers(self, calls: Called, needed: Collection[str], seen: Seen) -> Spoke:
        """The answers of all, as far as they come in time; those of others than the `needed` have a second more. Raises NoGroup."""
        strangers = {peer: call for peer, call in calls.items() if self._company.is_stranger(peer)}
        await asyncio.gather(*(call for peer, call in calls.items() if peer in needed and peer not in strangers))
        if others := {call: peer for peer, call in calls.items() if peer not in needed and peer not in strangers}:
            _, late = await asyncio.wait(others, timeout=_OTHERS_SECONDS)
            seen.silent |= {others[call] for call in late}
        await self._await_strangers(strangers, len(strangers) == len(calls), seen)
        await failpoints.reached("called", self._peer_id)
        return self._spoke(calls, seen)

    def _waiting_callers(self, parent: str, patience: float) -> dict[str, _Caller]:
        """Those that called us onto `parent` and wait for us. They are forgotten: after an attempt that failed all are called."""
        callers, self._callers, now = self._callers, {}, asyncio.get_running_loop().time()
        return {
            peer: caller
            for peer, caller in callers.items()
            if caller.head.digest == parent and caller.ready_seconds <= patience and now <= caller.until and not self._company.is_stranger(peer)
        }

    def _spoke(self, calls: Called, seen: Seen) -> Spoke:
        """Who has answered by now. Raises NoGroup when one of them has a better state, which is then being fetched."""
        seen.silent |= unanswered(calls)
        spoke = {peer: answer for peer, call in calls.items() if call.done() and (answer := call.result()) is not None}
        for peer, answer in spoke.items():
            if peer not in seen.heard and self._heard(peer, answer.head, False):
                raise NoGroup(f"{peer[-6:]} has a better state, {answer.head.digest[:8]}")
            seen.heard.add(peer)
        return spoke

    async def _await_strangers(self, calls: dict[str, asyncio.Task], there_is_nobody_else: bool, seen: Seen) -> None:
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

    async def _answer(self, channel: Channel) -> None:
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


def _done(answer: Answer) -> asyncio.Future[Answer]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(answer)
    return future


def unanswered(calls: Called) -> set[str]:
    """Whom we have called in vain by now."""
    return {peer for peer, call in calls.items() if call.done() and call.result() is None}


def comes(answer: Answer, patience: float) -> bool:
    return answer.coming and answer.ready_seconds <= patience


def leads(answer: Answer, patience: float) -> bool:
    """Whether the one that gave it, if it can be dialled, is worth going to: it comes, or averages and lets us know."""
    return comes(answer, patience) or answer.busy
