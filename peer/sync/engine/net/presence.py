"""Being seen by the others and seeing them: our record and the run's are published, theirs are read, and those we lost are dialled."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Mapping
from typing import Any

from peer.sync.engine.cell import Bell
from peer.sync.engine.net.address_book import AddressBook
from peer.sync.engine.net.neighbours import Neighbours
from peer.sync.engine.net.streams import PeerLost
from peer.sync.engine.round.status import Status
from swarm import proofs
from swarm.budget import Budget
from swarm.dht import SwarmNode
from swarm.dialling import grounds
from swarm.errors import ExitCode, UserError
from swarm.records import RENEW_SECONDS, PeerRecord
from swarm.run_config import RunConfig
from swarm.tasks import set_within, within

log = logging.getLogger(__name__)

_RUN_RECORD_SECONDS = 60.0
_NEWCOMER_SECONDS = 120.0
_SPREAD = (0.75, 1.25)
"""Of the time between two looks. Where looks, rounds and publications kept step, a peer read its own word for minutes and never its double's."""
_MEET_SECONDS = 15.0
_DIALS_PER_SECOND, _DIALS_AT_ONCE = 0.1, 6
"""Lost peers that are dialled, at up to three addresses each: 6 a minute after the first 6. They are a stranger's word."""
_SHORTEST_READ_SECONDS = 1.0
"""However short the rounds: between two looks the others are taken to train on at the rate that they told, and who calls has told all that matters."""
_READ_PEERS_PER_SECOND = 20
"""A look asks up to 20 nodes, and each answers with all records, of 1.6 kB each: 6 Mbit/s with 20 peers, 10 with 100 (docs/internals.md)."""


def read_seconds(period: float, others: int) -> float:
    """Seconds between two looks at `others` peers; period: as far apart as they may be, but for the second that lies between them at least."""
    return max(min(period, others / _READ_PEERS_PER_SECOND), _SHORTEST_READ_SECONDS)


class Presence:
    """status: what to publish; bell: rung after each look at the others that brings news of them; met: the peers that we have averaged with, which are dialled
    first of those that we lose."""

    def __init__(
        self,
        run: RunConfig,
        node: SwarmNode,
        neighbours: Neighbours,
        status: Status,
        bell: Bell,
        clock: Callable[[], float] = time.monotonic,
        met: Container[str] = (),
        rng: random.Random | None = None,
    ):
        self._run, self._node, self._neighbours, self._status, self._bell, self._clock = run, node, neighbours, status, bell, clock
        self._rng, self._now, self._told_run = rng or random.SystemRandom(), asyncio.Event(), -math.inf
        self._began, self._warned, self._unsaid = clock(), False, 0
        self.book, self._grounds = AddressBook(met), frozenset()
        self._dials = Budget(_DIALS_PER_SECOND, _DIALS_AT_ONCE, clock)
        self._said: Mapping[str, Any] = {}
        """What our last record says; empty: it may not be there."""
        self._said_at = -math.inf

    def tasks(self) -> list[Callable[[], Awaitable[None]]]:
        return [self._publish_forever, self._read_forever, self._watch_forever, self._meet_forever]

    def publish_soon(self) -> None:
        self._now.set()

    def publish_run_soon(self) -> None:
        """Those who cannot reach the host hear from us that the run goes on."""
        self._told_run = -math.inf
        self._now.set()

    async def publish(self) -> None:
        """Our record, with our addresses; not the one that says what the last one said, and need not be renewed before the next look.

        While nothing changes, the others work out from that one's time what we have trained since (next_round.py).
        """
        await self._unless_deaf(self._publish_with_addresses())

    async def publish_last(self) -> None:
        """Before leaving: without our addresses, since nobody shall dial us."""
        await self._unless_deaf(self._publish_record(self._status.record()))

    async def _unless_deaf(self, publishing: Coroutine[Any, Any, None]) -> None:
        """A node that answers nothing any more is the watchdog's matter, but who looks at the log shall find why nobody sees this peer."""
        try:
            await within(RENEW_SECONDS, publishing)
            self._unsaid = 0
        except Exception as error:
            self._unsaid += 1
            log.log(logging.WARNING if self._unsaid in (1, 60) else logging.DEBUG, "could not publish this peer's record: %r", error)

    async def _publish_with_addresses(self) -> None:
        maddrs = tuple(await self._node.maddrs())
        self._grounds = grounds(self._node.came_by, maddrs)
        record = self._status.record(maddrs)
        if _words(record) != self._said or self._must_renew(record):
            await self._publish_record(record)

    def _must_renew(self, record: PeerRecord) -> bool:
        """Before the others take us for gone. While we train they add to what waits what comes at our rate: a step that takes longer than
        usual must not count as more than one."""
        age = self._clock() - self._said_at
        return age + self._period() > RENEW_SECONDS or (record.samples_per_second > 0 and age >= self._status.step_seconds)

    async def _publish_record(self, record: PeerRecord) -> None:
        self._neighbours.say(record)
        self._said = {}
        if await self._node.publish(self._run.run_id, record):
            self._said, self._said_at = _words(record), self._clock()

    def _period(self) -> float:
        """Seconds between two looks at each other: a twentieth of a round, so that a round is not overrun by more than that."""
        rate = self._status.rate + sum([record.samples_per_second for record in self._neighbours.counted_upon()])
        return min(max(self._run.target_batch_size / rate / 20, 0.5), RENEW_SECONDS) if rate > 0 else 1.0

    async def _publish_forever(self) -> None:
        while True:
            self._now.clear()
            await self.publish()
            if self._clock() >= self._told_run + _RUN_RECORD_SECONDS:
                told, self._told_run = self._told_run, self._clock()
                try:
                    await within(RENEW_SECONDS, self._node.publish_run(self._status.run_record()))
                except Exception:
                    self._told_run = told
            await set_within(self._period(), self._now)

    async def _read_forever(self) -> None:
        while True:
            await asyncio.sleep(read_seconds(self._period(), len(self._neighbours.others())) * self._rng.uniform(*_SPREAD))
            before = self._neighbours.others()
            await self._neighbours.read()
            if (others := self._neighbours.others()) is not before:
                self.book.see(others, self._grounds)
                self._bell.ring()
            if self._neighbours.doubled:
                self._refuse_our_double()
            members = self._neighbours.members
            if reason := members.bans.reason(self._node.peer_id):
                raise UserError(f"The host has banned this peer: {reason}.", fix="Ask the host.", code=ExitCode.AUTH)
            if reason := members.proofs.reason(self._node.peer_id):
                raise UserError(f"This peer is banned by a proof of its own key: {reason}.", fix=proofs.FIX, code=ExitCode.AUTH)
            if members.has_ended():
                raise UserError(
                    "This peer's membership of the run has ended, and the dataset server has not renewed it.",
                    fix="See the warnings above; dd-peer asks for a new one at its next start.", code=ExitCode.NETWORK,
                )  # fmt: skip

    def _refuse_our_double(self) -> None:
        """Of two with one identity each takes the other's contributions for its own, and what it trained itself for done. The newcomer gives way."""
        what = (
            f"Another peer of this run has this one's identity ({self._node.peer_id[-6:]}): a copy of its folder, or of the whole machine."
        )
        if self._clock() - self._began < _NEWCOMER_SECONDS:
            raise UserError(
                what, fix="Delete identity.key in this --output_dir (or where --identity_path says), and start again as a new peer."
            )
        if not self._warned:
            self._warned = True
            log.warning("%s It will give way; if it does not, delete its identity.key and start it again.", what)

    async def _watch_forever(self) -> None:
        """hivemind notices nothing of p2pd's death: end when it is gone or hangs, so that a new sidecar is started."""
        failures = 0
        while True:
            if await self._node.ended_within(RENEW_SECONDS):
                raise PeerLost("p2pd has ended")
            failures = 0 if await self._node.alive() else failures + 1
            if failures >= 2:
                raise PeerLost("p2pd does not answer any more")

    async def _meet_forever(self) -> None:
        """Dial those we lost: hivemind forgets peers for good after a partition, and two halves would never meet again.

        And those by whom we came: a dataset server that was started again knows nobody, and newcomers ask nobody else.
        """
        while True:
            await asyncio.sleep(_MEET_SECONDS)
            for maddrs in self._node.came_by:
                await self._node.meet(maddrs)
            await self._meet_lost()

    async def _meet_lost(self) -> None:
        """As many of them as the budget allows, each once; none that is banned."""
        live = {record.peer_id for record in self._neighbours.others()} | self._neighbours.members.bans.peers()
        for _ in range(len(self.book.addresses.keys() - live)):
            if not self._dials.take():
                return
            await self._node.meet(self.book.next_lost(live))


def _words(record: PeerRecord) -> Mapping[str, Any]:
    """What it says, besides when that was: its time, and the host's words, of which each record has others."""
    return {**vars(record), "time": 0.0, "bans": ()}
