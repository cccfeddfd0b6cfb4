"""One peer's part in the rounds: Train, Group, Average, Commit, and Look when anything failed.

Owns the swarm's state at this peer. Lives in the sidecar's loop, talks to the swarm through a node and to the trainer through a
port, and never decides from a record that is not signed, fresh and within bounds. The rules, and what each one is for, are in
docs/protocol.md. When a round is due is in `next_round.py`, how it is averaged in `rounds.py`, who may start in `beginning.py`, when the
run is over in `ending.py`, what others see of us in `status.py`.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from peer.contracts import Member
from peer.sync.engine import points
from peer.sync.engine.codec import Wire
from peer.sync.engine.net.bucket import Bucket
from peer.sync.engine.net.link import serve_link
from peer.sync.engine.net.neighbours import Neighbours
from peer.sync.engine.net.presence import Presence
from peer.sync.engine.net.streams import Streams
from peer.sync.engine.outer import Strategy
from peer.sync.engine.round.averaging import RoundFailed
from peer.sync.engine.round.beginning import Beginning
from peer.sync.engine.round.company import Company
from peer.sync.engine.round.ending import Ending
from peer.sync.engine.round.groups import Standing
from peer.sync.engine.round.heads import Heads, head_of
from peer.sync.engine.round.matchmaking import NoGroup
from peer.sync.engine.round.met import Met
from peer.sync.engine.round.next_round import NextRound
from peer.sync.engine.round.plausible import Plausible
from peer.sync.engine.round.rounds import Round, Rounds, patience_seconds
from peer.sync.engine.round.rounds_file import write_round
from peer.sync.engine.round.settling import Settling
from peer.sync.engine.round.status import Status
from peer.sync.engine.state import Head, State, better
from peer.sync.engine.trainer.local_work import follows
from peer.sync.engine.trainer.trainer import Offer, Progress, Trainer
from peer.sync.engine.transfer.disk import StateStore
from peer.sync.engine.transfer.donors import Donor, ask_head
from peer.sync.engine.transfer.kind import Kind, serve_kind
from peer.sync.engine.transfer.replay import MeanStore, rounds_kept
from peer.sync.engine.transfer.saving import Saver
from peer.sync.engine.transfer.takeover import Replaying, Takeover
from swarm.dht import SwarmNode
from swarm.end import End
from swarm.errors import UserError
from swarm.records import JOINING, RECORD_LIFE_SECONDS, PeerRecord, RunRecord
from swarm.run_config import RunConfig
from swarm.tasks import end_tasks, set_within

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
IDLE_SECONDS, _SHORTEST_IDLE_SECONDS = 1.0, 0.05
"""Whatever happens wakes a peer; so long it sleeps at most, and at least, while time alone may make something due."""
_BACKOFF_SECONDS = (1, 2, 4, 8, 16, 30)
_LINGER_SECONDS = 15.0
_LONGEST_LINGER_SECONDS = 300.0
_ASK_SECONDS = _CLOSE_SECONDS = 5.0
_LAND_SECONDS = 2.0
"""A trainer that did not land for so long has other things to do: the state is written without waiting for it."""
SETTLE_SECONDS = 120.0
"""A state that was on disk and on our lineage for so long is settled even when a live peer signs another one: it may never follow."""


class Replica:
    def __init__(
        self,
        *,
        run: RunConfig,
        state: State,
        wire: Wire,
        strategy: Strategy,
        node: SwarmNode,
        store: StateStore,
        rounds_path: Path,
        trainer: Trainer,
        server_url: str = "",
        name: str = "",
        hardware: str = "",
        last_known: Head | None = None,
        last_holders: tuple[str, ...] = (),
        min_peers: int = 1,
        last_number: int | None = None,
        assists: bool = False,
        end: End | None = None,
        upload: Bucket | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ):
        self.run, self.state, self.strategy, self.node = run, state, strategy, node
        self.trainer, self.clock, self._wall, self._rng = trainer, clock, wall, rng or random.SystemRandom()
        self.progress, self.offer = Progress(), None
        self.leaving, self.assists = False, assists
        self.end = end or End(run)
        self._ending = Ending(run, self.end, node, trainer.extended)
        self._note = ""
        self.met = Met(store.folder / "met.json", run.digest)
        company = Company(self.met, lambda: self.state.header.round, clock, node.peer_id)
        self.neighbours = Neighbours(node, run, state.header.schema, clock, company, wall)
        self.heads = Heads(
            self.met, self.neighbours.others, state, lambda peer: self._takeover.avoids(peer), clock, leads=not node.client_mode
        )
        self._plausible = Plausible(run, node.peer_id, state, self.heads, self._ending, store.discarded, last_number, clock)
        self.status = Status(run, node, self.neighbours, self.end, assists=assists, name=name, hardware=hardware, server_url=server_url, wall=wall)  # fmt: skip
        self.next_round = NextRound(run, self.end, self.neighbours, state, clock, wall)
        streams = Streams(node, upload)
        self.rounds = Rounds(
            run, self.end, node, streams, self.neighbours, strategy, wire,
            standing=self._standing, heard=self._heard, entered=self._set_phase, closed=self.heads.averages_in, company=company, clock=clock,
            rng=self._rng,
        )  # fmt: skip
        self._streams, self._rounds_path = streams, rounds_path
        self._means = MeanStore(store.folder / "means", rounds_kept(state.buffer.num_bytes, wire.num_bytes))
        self._donor = Donor(streams, lambda: self.state, store, self._means, lambda: self._phase == "average", clock, met=self.met)
        self._takeover = Takeover(streams, self._plausible.refusal, clock, Replaying(wire.num_bytes, self.rounds.step, self._means), self.wake)  # fmt: skip
        self._beginning = Beginning(run, last_known, last_holders, min_peers, clock, self.end)
        self._saver = Saver(store, state, self.wake, trainer.failed, self._trainer_landed, clock, node.peer_id)
        self._presence = Presence(run, node, self.neighbours, self.record, self._run_record, self._rate, self.wake, clock, self.met)
        self.book = self._presence.book
        self._settling = Settling(state)
        self._phase, self._asked = "join", False
        self._progressed, self._looked = clock(), wall()
        self._wake = asyncio.Event()
        self._told = self._landed = ""
        self._closed = False

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Serve others; publish our record; read theirs. Where connections are scarce, those to peers that we have met stay."""
        self.node.prefer(self.met.__contains__)
        await self.rounds.start()
        await self._donor.start()
        await serve_link(self._streams)
        await serve_kind(self._streams, Kind(self.state.header.schema, self.rounds.wire.sizes))
        await self._presence.publish()
        await self.neighbours.read()

    async def live(self) -> None:
        """Take part until closed. Raises UserError when this peer cannot go on."""
        endless = (*self._presence.tasks(), self._saver.save_forever, self._means.keep_forever, self._donor.tidy_forever)
        background = [asyncio.create_task(task()) for task in endless]
        try:
            while not self._closed:
                for task in background:
                    if task.done():
                        task.result()
                self._notice_absence()
                await self._tick()
                await self._changed(self._idle_seconds())
        finally:
            await end_tasks(*background)
            await self._takeover.close()
            self._donor.close()

    async def _changed(self, seconds: float) -> None:
        """Wait until something has happened since we last waited, or for so long."""
        try:
            await set_within(seconds, self._wake)
        finally:
            self._wake.clear()

    def _idle_seconds(self) -> float:
        """Until something may be due although nothing happens: the next attempt, or a round that others' promises fill."""
        if self.offer is not None:
            due = self.offer.next_attempt - self.clock()
        elif self._asked:
            due = IDLE_SECONDS  # the trainer's answer wakes us
        else:
            due = self.next_round.seconds_until_full(self.progress) if self.progress.waiting else IDLE_SECONDS
        return min(max(due, _SHORTEST_IDLE_SECONDS), IDLE_SECONDS)

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    def failed(self, reason: str) -> None:
        """Our trainer ends for this reason: the others read it in our last record."""
        self._note = reason

    async def leave(self) -> None:
        """After living: the newest state on disk and reported, and nobody need wait until our record is too old.

        Raises UserError (disk), which is then what the others read of us.
        """
        self._set_phase("left")
        try:
            await self._saver.save(self.state)
        except UserError as error:
            self.failed(error.message)
            raise
        else:
            self._tell_trainer()
            await self._settle()
        finally:
            await self._presence.publish_last()

    async def live_until(self, *ends: Coroutine[Any, Any, Any]) -> None:
        """Live until one of `ends` does, or life itself; then leave in order. Raises what the first of them to end raised."""
        living, *_ = tasks = [asyncio.create_task(job) for job in (self.live(), *ends)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            self.close()
            await asyncio.wait({living}, timeout=_CLOSE_SECONDS)
            await end_tasks(living)
            await self.leave()
        finally:
            await end_tasks(*tasks)

    async def _tick(self) -> None:
        self._look()
        if self._phase == "join" and not self._may_start():
            return
        self._tell_trainer()
        await self._settle()
        if self._ending.in_doubt:
            await self._ending.was_put_off()
        if self._ending.is_over(self.state):
            return None if self._settling.waiting or await self._ending.was_put_off() else await self._finish()
        if self.assists:
            return await self._assist()
        self._set_phase("fetch" if self._held_back() else "train")
        if self.offer is None:
            if not self._asked and self.progress.waiting and self._due():
                self._asked = True
                self.trainer.freeze()
        elif self._ready_to_attempt():
            await self._attempt(self.offer)

    def _notice_absence(self) -> None:
        """A machine that slept, or a process that was stopped, comes back like one that starts: others have gone on without it.

        Until it has looked around, its record says so (JOINING), and where it stands counts for nothing.
        """
        away = self._wall() - self._looked
        self._looked = self._wall()
        if away > RECORD_LIFE_SECONDS and self._phase in ("train", "fetch"):
            log.info("back after %.0f s", away)
            self._beginning.again()
            self._set_phase("join")

    def _still_here(self) -> None:
        """Within a tick that takes long; an absence in it is noticed after it."""
        if self._wall() - self._looked <= RECORD_LIFE_SECONDS:
            self._looked = self._wall()

    def _may_start(self) -> bool:
        may = self._beginning.may_start(
            Head.of(self.state), own_round=self.state.header.round, fetching=self._takeover.signers > 0, behind=bool(self.heads.right()),
            others=self.neighbours.others(), news=self._waits, counts=self._takeover.promises.counts,
        )  # fmt: skip
        if may:
            self._note = ""
            self._set_phase("train")
        return may

    def _waits(self, why: str) -> None:
        self._note = why
        self.trainer.news(why)

    async def _finish(self) -> None:
        """Tell the trainer, after those who are still behind had a chance to fetch the last state; unless the run goes on, or ended better."""
        self._set_phase("done")
        last, began = self.state, self.clock()
        while not self._closed and (self._told != self.state.digest or self._needed_by_others(self.clock() - began)):
            self._tell_trainer()
            await asyncio.sleep(TICK_SECONDS)
            self._still_here()
            self._look()
            if self._ending.in_doubt:
                await self._ending.was_put_off()
            if self.state is not last or not self._ending.is_over(self.state):
                return
        if await self._ending.was_put_off():
            return
        self.trainer.done()
        while not self._closed:
            await asyncio.sleep(TICK_SECONDS)

    def _needed_by_others(self, lingered: float) -> bool:
        if self._donor.busy:
            return lingered < _LONGEST_LINGER_SECONDS
        return lingered < _LINGER_SECONDS and any(record.digest != self.state.digest for record in self.neighbours.others())

    # ---------------------------------------------------------------- better states

    def _look(self) -> None:
        """Take over what has arrived; fetch what is right in place of ours."""
        before, state = self._takeover.began_from, self._takeover.result()
        if state is not None and (self.heads.is_right(Head.of(state)) or (self.state is before and not self.heads.keeps(Head.of(state)))):
            self._adopt(state, "fetched")
        self._takeover.consider(self.heads.right(), self.state)

    def extend(self, extension: Mapping[str, Any]) -> None:
        """The trainer has heard from the host that the run goes on."""
        if self.end.extend(extension):
            self._presence.publish_run_soon()
            self.wake()

    def _held_back(self) -> bool:
        """Whether to wait for the better state that is on its way: unless more live peers are with us than with it."""
        if not self._takeover.signers:
            return False
        with_us = 1 + sum(record.digest == self.state.digest and record.phase != JOINING for record in self.neighbours.others())
        return self._takeover.signers >= with_us

    async def _ask_heads(self) -> set[str]:
        """Ask the others directly: their records may be seconds old, and a member may have committed what we missed. Returns who is ahead."""
        asked = {asyncio.create_task(ask_head(self._streams, r.peer_id)): r.peer_id for r in self.neighbours.counted_upon()}
        if not asked:
            return set()
        done, late = await asyncio.wait(asked, timeout=_ASK_SECONDS)
        await end_tasks(*late)
        heads = [(task.result(), asked[task]) for task in done if task.result() is not None]
        for head, peer in heads:
            self.heads.heard(peer, head)
        self._takeover.consider(self.heads.right(), self.state)
        return {peer for head, peer in heads if better(head, Head.of(self.state))}

    # ---------------------------------------------------------------- what the trainer says

    def progressed(self, progress: Progress, landed: str) -> None:
        """The trainer says how far it is; before it has landed on our state, what it says is waiting may be in that state already."""
        self._landed, self._progressed = landed, self.clock()
        if landed != self.state.digest:
            progress.waiting = self.progress.waiting
        self.progress = progress
        self._wake.set()

    def offered(self, offer: Offer) -> None:
        """The trainer froze a contribution, or says after landing that it still has it."""
        self._asked = False
        if not self._counts(offer):
            return  # the trainer hears of our state soon, and finds the same
        if self.offer is not None and self.offer.member == offer.member:
            self.offer.parent = offer.parent
        else:
            self.offer = offer
        self._plausible.offered(offer.member.number)
        if not self.offer.failures and self.strategy.steps_locally and not self._wanted():
            self.offer.next_attempt = self.clock() + _BACKOFF_SECONDS[-1]
            self.trainer.train()
        self._wake.set()

    def nothing_to_freeze(self) -> None:
        self._asked = False
        if self.offer is None:
            self.progress.waiting = 0

    def _counts(self, offer: Offer) -> bool:
        """Whether it is not in our state, and was made on that or on one shortly before."""
        header = self.state.header
        included = header.included.get(self.node.peer_id, 0) >= offer.member.number
        return not included and follows(self.state.digest, header, offer.parent, self.strategy)

    # ---------------------------------------------------------------- a round

    def _ready_to_attempt(self) -> bool:
        company = self.neighbours.others() or self.neighbours.alone()
        if not company or self._held_back():
            return False
        return self.next_round.is_called() or self.clock() >= self.offer.next_attempt or (not self.offer.failures and self._wanted())

    def _due(self) -> bool:
        """Whether the trainer should freeze what it has."""
        return self._goes() or self.next_round.is_called_here_or_ahead() or self.next_round.is_full(self.progress)

    def _wanted(self) -> bool:
        """Whether a contribution should be averaged now; one that came late for its round need not make a small one of its own."""
        return self._goes() or self.next_round.is_called() or self.next_round.is_full(self.progress)

    def _goes(self) -> bool:
        """Whether we make no more samples for now: what we have is averaged, however little it is."""
        return self.leaving or self.progress.paused

    def _knows(self, peer: str) -> bool:
        return peer == self.node.peer_id or any(record.peer_id == peer for record in self.neighbours.others())

    async def _assist(self) -> None:
        """We bring nothing of our own: we come when somebody calls, and never begin a round."""
        self._set_phase("fetch" if self._held_back() else "train")
        if self.next_round.is_called() and self._phase == "train":
            await self._attempt(Offer(Member(self.node.peer_id, 0, 0), None, self.state.digest))

    def _standing(self, caller: str) -> Standing:
        """What to tell `caller`; only a peer whose signed record we know may make us average."""
        since, has_it = self.clock() - self._progressed, self.assists or self.offer is not None
        ready_seconds = 0.0 if has_it else max(self.progress.step_seconds - since, 0.0)
        may_come = self._knows(caller) and self._phase not in ("join", "fetch", "left") and not self._ending.is_over(self.state)
        has_samples = may_come and (has_it or self.progress.brings_samples(since))
        return Standing(Head.of(self.state), has_samples, ready_seconds, self.state.header.included, busy=self._phase == "average")

    def _heard(self, peer: str, head: Head, ready: bool) -> bool:
        """`peer` stands at `head`, and is ready to average onto it or not. Returns whether we should rather fetch that."""
        if not self._knows(peer):
            return False
        if ready:
            self.next_round.call(peer, head.digest)
            self._let_go(peer, head.digest)
        self.heads.heard(peer, head)
        self._takeover.consider(self.heads.right(), self.state)
        self._wake.set()
        return self._held_back()

    def _let_go(self, peer: str, digest: str) -> None:
        """`peer` averages onto the state `digest`: without us, if we are not there, have nothing, or need longer than it has patience for."""
        standing = self._standing(peer)
        if standing.digest != digest or not standing.has_samples or standing.ready_seconds > patience_seconds(self.next_round.age_seconds):
            self.heads.let_go(peer, digest)

    async def _attempt(self, offer: Offer) -> None:
        callers = self.next_round.take_callers()
        try:
            done = await self._unless_overtaken(self.rounds.attempt(self.state, offer, callers, self.next_round.age_seconds))
        except (NoGroup, RoundFailed) as error:
            return await self._after_failure(offer, error)
        if done is None:
            return self._set_phase("train")
        if self.status.had(done) and not self.assists:
            self.trainer.news(self.status.advice(self.progress))
        if done.how == "averaged":
            self.met.averaged(done.group.peers - {self.node.peer_id})
        self._means.want(done.state, done.mean)
        self._adopt(done.state, done.how)
        self._set_phase("train")
        await points.reached("before_publish", self.node.peer_id)

    async def _unless_overtaken(self, attempt: Coroutine[Any, Any, Round]) -> Round | None:
        """What `attempt` comes to; None when a better state was taken over before its group was closed.

        Those it waits for may be at that state already, and would never come; a group that is closed waits for us.
        """
        parent, attempting = self.state, asyncio.create_task(attempt)
        attempting.add_done_callback(lambda task: task.cancelled() or task.exception())  # who is cancelled once more hears of neither
        attempting.add_done_callback(lambda task: self.wake())
        try:
            while not attempting.done():
                await self._changed(IDLE_SECONDS)
                self._still_here()
                if self._phase == "group" and not attempting.done():
                    self._look()
                    if self.state is not parent:
                        log.info("round=%d not averaged: a better state has come", parent.header.round + 1)
                        return None
            return attempting.result()
        finally:
            await end_tasks(attempting)

    async def _after_failure(self, offer: Offer, error: NoGroup | RoundFailed) -> None:
        """Look whether the others have committed; if not, offer the same bytes again. Training goes on.

        At once when it is known whose fault it was, for that one is left out now. Otherwise after a pause: whatever it was may go by.
        """
        self._set_phase("look")
        self.next_round.take_callers()
        log.info("round=%d not averaged: %s", self.state.header.round + 1, error)
        self._note = f"round {self.state.header.round + 1} not averaged: {error}"
        ahead = await self._ask_heads()
        await self.neighbours.read()
        ahead |= {record.peer_id for record in self.neighbours.others() if better(head_of(record), Head.of(self.state))}
        # Who has moved on did not stay away: taken for absent, it would leave us to average alone beside it as soon as we have caught up.
        self.neighbours.missed(error.silent - ahead)
        pause = 0 if error.at_once else _BACKOFF_SECONDS[min(offer.failures, len(_BACKOFF_SECONDS) - 1)]
        offer.failures += 1
        offer.next_attempt = self.clock() + pause * self._rng.uniform(0.75, 1.25)
        self._set_phase("train")
        self.trainer.train()

    # ---------------------------------------------------------------- our state

    def _adopt(self, state: State, how: str) -> None:
        """The new state is ours: swap, publish, keep what is still to be settled; the trainer hears of it when it has time."""
        previous, self.state, self._note = self.state, state, ""
        self.next_round.follows(state)
        self.heads.moved(state, fetched=how == "fetched")
        self._plausible.moved(state)
        self._donor.retire(previous)
        self.rounds.matchmaker.moved()
        self._settling.moved(previous, state)
        self._saver.want(state)
        if self.offer is not None:
            if state.header.included.get(self.node.peer_id, 0) >= self.offer.member.number:
                self.progress.waiting = max(self.progress.waiting - self.offer.member.samples, 0)
            if self._counts(self.offer):
                self.offer.failures, self.offer.next_attempt = 0, self.clock() + _BACKOFF_SECONDS[-1]
            else:
                self.offer = None
        # Its last word was that it waits. It trains on as soon as it has landed, and the record that says so is published now.
        self.progress.waits = self._goes()
        self._asked = False
        write_round(self._rounds_path, state, how, self.status.training(), self.node.peer_id, self._wall())
        self._tell_trainer()
        self._presence.publish_soon()

    def _tell_trainer(self) -> None:
        """One state at a time: a trainer that is busy or stopped is told of the last one only, and no memory waits in its queue."""
        if self._phase != "join" and self._told != self.state.digest and (not self._told or self._landed == self._told):
            self._told = self.state.digest
            self.trainer.landed(self.state)

    def _trainer_landed(self) -> bool:
        """Or it has other things to do. Writing a state takes a core and the memory, and the trainer needs both for landing on it."""
        return self.assists or self._landed == self.state.digest or self.next_round.age_seconds > _LAND_SECONDS

    async def _settle(self) -> None:
        """A state is settled when a second live peer signs it or a descendant of it or, alone, when it is on disk."""
        if not self._settling.waiting:
            return
        others = self.neighbours.others()
        others = [record for record in others if record.peer_id in self.met] or others
        safe = {digest for record in others for digest in (record.digest, *record.parents)}
        safe |= self._saver.on_disk(SETTLE_SECONDS if others else 0.0)
        settled = self._settling.take(safe)
        if settled:
            await points.reached("before_settle", self.node.peer_id)
            self.trainer.settled(settled)

    # ---------------------------------------------------------------- what others see of us

    def _set_phase(self, phase: str) -> None:
        self._phase = phase

    def _rate(self) -> float:
        return self.progress.samples_per_second

    def _said(self) -> str:
        """What keeps us from going on, for people to read."""
        if self._takeover.signers and self._phase in ("join", "fetch"):
            return f"fetching a newer state: {self._takeover.share:.0%} of it is here"
        return self._note or self._takeover.trouble

    def record(self, maddrs: tuple[str, ...] = ()) -> PeerRecord:
        return self.status.record(self.state, self.progress, self._phase, self._said(), self.heads.backers(), maddrs)

    def seen(self) -> dict[str, Any]:
        return self.status.seen(self.state, self.record())

    def _run_record(self) -> RunRecord:
        return self.status.run_record(self.state)
