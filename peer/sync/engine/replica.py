"""One peer's part in the rounds: Train, Group, Average, Commit, and Look when anything failed.

Owns the swarm's state at this peer. Lives in the sidecar's loop, talks to the swarm through a node and to the trainer through a
port, and never decides from a record that is not signed, fresh and within bounds. The rules, and what each one is for, are in
docs/protocol.md.
"""

import asyncio
import contextlib
import json
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from peer.contracts import Member, Settlement
from peer.sync.engine.averaging import Averager, RoundFailed
from peer.sync.engine.codec import CODECS
from peer.sync.engine.disk import StateStore
from peer.sync.engine.donors import Donor, ask_head
from peer.sync.engine.groups import Group, Matchmaker, NoGroup, Standing, Ticket
from peer.sync.engine.local_work import REBASED_ANCESTORS, follows
from peer.sync.engine.neighbours import LEFT, Neighbours
from peer.sync.engine.outer import Strategy
from peer.sync.engine.settling import Settling
from peer.sync.engine.state import Head, State, better, next_state
from peer.sync.engine.streams import PeerLost, Streams
from peer.sync.engine.takeover import Takeover
from swarm.dht import SwarmNode
from swarm.errors import ExitCode, UserError
from swarm.records import RECORD_LIFE_SECONDS, RENEW_SECONDS, PeerRecord, RunRecord
from swarm.run_config import RunConfig
from swarm.tasks import end_tasks

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
_BACKOFF_SECONDS = (1, 2, 4, 8, 16, 30)
_LINGER_SECONDS = 15.0
_LONGEST_LINGER_SECONDS = 300.0
_RUN_RECORD_SECONDS = 60.0
_MEET_SECONDS = 15.0
_ASK_SECONDS = 5.0
_JOIN_PATIENCE_SECONDS = 60.0
"""A newcomer waits so long for a better state that somebody signs, before it starts from its own."""
_HOLDER_PATIENCE_SECONDS = 120.0
"""A peer that has a state of its own waits so long for the holder of a later one that nobody live has."""
SETTLE_SECONDS = 120.0
"""A state that was on disk and on our lineage for so long is settled even when a live peer signs another one: it may never follow."""
_LAST_ROUND_STRETCH = 1.25
"""The run's last round may be so much larger than the target, so that no tiny one is left over."""


class Trainer(Protocol):
    """What the replica tells the training process; nothing here blocks."""

    def freeze(self) -> None: ...
    def train(self) -> None: ...
    def landed(self, state: State) -> None: ...
    def settled(self, settlements: list[Settlement]) -> None: ...
    def news(self, text: str) -> None: ...
    def done(self) -> None: ...
    def failed(self, error: UserError) -> None: ...


@dataclass
class Offer:
    """A frozen contribution: its bytes never change, whatever becomes of the attempts to average it."""

    member: Member
    encoded: Tensor
    parent: str
    """The state that the trainer stood on when it offered this."""
    failures: int = 0
    next_attempt: float = 0.0


@dataclass
class Progress:
    """What the trainer last said of itself."""

    waiting: int = 0
    samples_per_second: float = 0.0
    step_seconds: float = 0.0
    loss: float | None = None


class Replica:
    def __init__(
        self,
        *,
        run: RunConfig,
        state: State,
        size: int,
        strategy: Strategy,
        node: SwarmNode,
        store: StateStore,
        rounds_path: Path,
        trainer: Trainer,
        server_url: str = "",
        last_known: Head | None = None,
        last_holders: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run, self.state, self.size, self.strategy, self.node = run, state, size, strategy, node
        self.store, self.trainer, self.server_url, self.clock = store, trainer, server_url, clock
        self.progress, self.offer = Progress(), None
        self.leaving = False
        self._rounds_path, self._last_known, self._last_holders = rounds_path, last_known, last_holders
        self._codec = CODECS[run.wire]
        self.neighbours = Neighbours(node, run, state.header.schema, clock)
        self._streams = streams = Streams(node)
        self._donor = Donor(streams, lambda: self.state, clock)
        self._takeover = Takeover(streams, self._refusal, clock)
        self._matchmaker = Matchmaker(
            node.peer_id, streams, self._standing, self._on_called, 2 * run.target_batch_size, leads=not node.client_mode
        )
        self._averager = Averager(node.peer_id, streams, self._codec, size)
        self._phase, self._group_size, self._asked = "join", 0, False
        self._callers: set[str] = set()
        """Who said that they are ready to average on our state, since the last attempt."""
        self._wake, self._publish_now = asyncio.Event(), asyncio.Event()
        self._settling = Settling(state)
        self._to_save: State | None = None
        self._saved: deque[tuple[str, float]] = deque([(state.digest, clock())] if state.header.round else [], maxlen=16)
        self._told = self._landed = ""
        self._started = clock()
        self._closed = False
        self._rng = random.Random(node.peer_id)

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Serve others; publish our record; read theirs."""
        await self._matchmaker.start()
        await self._averager.start()
        await self._donor.start()
        with contextlib.suppress(Exception):  # a node that answers nothing is the watchdog's matter
            await asyncio.wait_for(self._publish(), RENEW_SECONDS)
        await self.neighbours.read()

    async def live(self) -> None:
        """Take part until closed. Raises UserError when this peer cannot go on."""
        background = [asyncio.create_task(task()) for task in self._background()]
        try:
            while not self._closed:
                for task in background:
                    if task.done():
                        task.result()
                await self._tick()
                self._wake.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), TICK_SECONDS)
        finally:
            await end_tasks(*background)
            await self._takeover.close()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    async def _tick(self) -> None:
        self._look()
        if self._phase == "join" and not self._may_start():
            return
        self._tell_trainer()
        self._settle()
        self._donor.forget_old()
        if self._complete():
            return None if self._settling.waiting else await self._finish()
        if self.offer is None:
            self._set_phase("fetch" if self._held_back() else "train")
            if not self._asked and (self._callers or self._round_is_full() or (self.leaving and self.progress.waiting)):
                self._asked = True
                self.trainer.freeze()
        elif self._ready_to_attempt():
            await self._attempt(self.offer)

    def _ready_to_attempt(self) -> bool:
        company = self.neighbours.others() or self.neighbours.alone()
        return bool(company) and not self._held_back() and (bool(self._callers) or self.clock() >= self.offer.next_attempt)

    def _held_back(self) -> bool:
        """Whether to wait for the better state that is on its way: unless more live peers are with us than with it."""
        with_us = 1 + sum(record.digest == self.state.digest for record in self.neighbours.others())
        return self._takeover.signers >= with_us

    # ---------------------------------------------------------------- joining and looking

    def _may_start(self) -> bool:
        """Nobody starts again from the base model where a later state is known to exist."""
        ours, waited = Head.of(self.state), self.clock() - self._started
        others = self.neighbours.others()
        if self._takeover.signers or (waited < _JOIN_PATIENCE_SECONDS and any(better(_head(record), ours) for record in others)):
            return False
        known = self._last_known
        running = any(record.phase != "join" and record.round for record in others)
        if known is not None and known.samples > 0 and better(known, ours) and not running:
            if not self.state.header.round or waited < _HOLDER_PATIENCE_SECONDS:
                holders = ", ".join(peer[-6:] for peer in self._last_holders) or "unknown peers"
                if 0 < self.run.total_samples <= known.samples and waited >= RECORD_LIFE_SECONDS:
                    raise UserError(
                        f"The run '{self.run.run_name}' is over: all {known.samples} samples are in its last state, and no peer is left.",
                        fix=f"Ask the host for the result, or one of the peers that had it: {holders}.",
                        code=ExitCode.FAILED,
                    )
                self.trainer.news(
                    f"the run is at {known.samples} samples (state {known.digest[:8]}), this peer at {ours.samples}; "
                    f"waiting for one who has that state: {holders}"
                )
                return False
            self.trainer.news(f"nobody has brought the state {known.digest[:8]} at {known.samples} samples; going on from {ours.samples}")
        self._set_phase("train")
        return True

    def _look(self) -> None:
        """Take over what has arrived; fetch a better head that a live peer signs."""
        state = self._takeover.result()
        if state is not None and better(Head.of(state), Head.of(self.state)):
            self._adopt(state, "fetched")
        self._takeover.consider([(_head(record), record.peer_id) for record in self.neighbours.others()], self.state)

    def _refusal(self, state: State) -> str:
        total, header = self.run.total_samples, state.header
        before = header.samples - sum(member.samples for member in header.members)
        return f"it made a round after the run's end of {total} samples" if total and before >= total else ""

    # ---------------------------------------------------------------- a round

    def progressed(self, progress: Progress, landed: str) -> None:
        """The trainer says how far it is; before it has landed on our state, what it says is waiting may be in that state already."""
        self._landed = landed
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
        self._wake.set()

    def nothing_to_freeze(self) -> None:
        self._asked = False
        self._callers.clear()

    def _counts(self, offer: Offer) -> bool:
        """Whether it is not in our state, and was made on that or on one shortly before."""
        header = self.state.header
        included = header.included.get(self.node.peer_id, 0) >= offer.member.number
        return not included and follows(self.state.digest, header, offer.parent, self.strategy)

    def _round_is_full(self) -> bool:
        if self.progress.waiting == 0:
            return False
        total = self.progress.waiting
        for record in self.neighbours.counted_upon():
            if record.digest == self.state.digest:
                age = min(max(time.time() - record.time, 0), RENEW_SECONDS)
                promised = record.waiting_samples + int(record.samples_per_second * age)
                total += min(promised, 2 * self.run.target_batch_size)
        return total >= self._threshold()

    def _threshold(self) -> int:
        target, total = self.run.target_batch_size, self.run.total_samples
        left = total - self.state.header.samples
        return left if total and left <= _LAST_ROUND_STRETCH * target else target

    def _standing(self, caller: str) -> Standing:
        """What to tell `caller`; only a peer whose signed record we know may make us average."""
        known = caller == self.node.peer_id or any(record.peer_id == caller for record in self.neighbours.others())
        offers = self._phase not in ("join", "fetch") and self.progress.waiting > 0 and not self._complete()
        return Standing(self.state.digest, known and offers, self.progress.step_seconds, self.state.header.included)

    def _on_called(self, peer: str) -> None:
        self._callers.add(peer)
        self._wake.set()

    async def _attempt(self, offer: Offer) -> None:
        callers = frozenset(self._callers)
        self._callers.clear()
        try:
            if self.neighbours.alone():
                group, mean = Group(self.state.digest, (offer.member,), ()), offer.encoded
            else:
                self._set_phase("group")
                ticket = Ticket(self.state.digest, offer.member, not self.node.client_mode)
                group = await self._matchmaker.form(ticket, self._expected(callers), self._check_quorum)
                self._set_phase("average")
                mean = offer.encoded if len(group.members) == 1 else await self._averager.average(group, offer.encoded)
            self.neighbours.missed(group.silent)
            self.neighbours.came([member.peer for member in group.members])
            await self._commit(group, mean)
        except (NoGroup, RoundFailed) as error:
            await self._after_failure(offer, error)

    def _expected(self, callers: Collection[str]) -> dict[str, bool]:
        """Peers that may come, and whether each can lead: those at our state, or a step behind in the records, which are a second old."""
        recent = {self.state.digest, *self.state.header.parents[:REBASED_ANCESTORS]}
        return {record.peer_id: not record.client_mode for record in self.neighbours.counted_upon(callers) if record.digest in recent}

    def _check_quorum(self, group: Group) -> None:
        """A group must hold more than half of the samples that wait on this state, or two of them could both commit. Raises NoGroup.

        Those who stay away from several attempts are not counted any more, whatever their records promise.
        """
        members = {member.peer for member in group.members}
        outside = {
            record.peer_id: record.waiting_samples
            for record in self.neighbours.counted_upon()
            if record.digest == group.parent and record.peer_id not in members and record.waiting_samples
        }
        if group.samples <= sum(outside.values()):
            raise NoGroup(f"the group holds {group.samples} samples, {sum(outside.values())} wait elsewhere", group.silent | set(outside))

    async def _commit(self, group: Group, encoded: Tensor) -> None:
        began = self.clock()
        parent = self.state

        def outer_step() -> State:
            mean = self._codec.decode(encoded)
            vectors = self.strategy.outer_step(parent.vectors(self.size), mean)
            if not all(bool(torch.isfinite(vector).all()) for vector in vectors):
                raise ValueError("non-finite values after the outer step")
            return next_state(parent, vectors, group.members)

        try:
            state = await asyncio.get_running_loop().run_in_executor(None, outer_step)
        except ValueError as error:
            raise RoundFailed(str(error)) from None
        how = "averaged" if len(group.members) > 1 else "solo"
        self._group_size = len(group.members)
        log.info(
            "%s round=%d peers=%d samples=%d of %d state=%s seconds=%.2f",
            how, state.header.round, len(group.members), state.header.samples, self.run.total_samples, state.digest[:8], self.clock() - began,
        )  # fmt: skip
        self._adopt(state, how)
        self._set_phase("train")

    def _adopt(self, state: State, how: str) -> None:
        """The new state is ours: swap, publish, keep what is still to be settled; the trainer hears of it when it has time."""
        previous, self.state = self.state, state
        self._donor.retire(previous)
        self._matchmaker.moved()
        self._settling.moved(previous, state)
        self._to_save = state
        if self.offer is not None:
            if state.header.included.get(self.node.peer_id, 0) >= self.offer.member.number:
                self.progress.waiting = max(self.progress.waiting - self.offer.member.samples, 0)
            if self._counts(self.offer):
                self.offer.failures, self.offer.next_attempt = 0, 0.0
            else:
                self.offer = None
        self._asked = False
        self._callers.clear()
        self._write_round(how)
        self._tell_trainer()
        self._publish_now.set()

    def _tell_trainer(self) -> None:
        """One state at a time: a trainer that is busy or stopped is told of the last one only, and no memory waits in its queue."""
        if self._phase != "join" and self._told != self.state.digest and (not self._told or self._landed == self._told):
            self._told = self.state.digest
            self.trainer.landed(self.state)

    def _write_round(self, how: str) -> None:
        header = self.state.header
        line = {
            "round": header.round,
            "samples": header.samples,
            "digest": self.state.digest,
            "parent": header.parents[0] if header.parents else "",
            "members": [[m.peer, m.number, m.samples] for m in header.members],
            "how": how,
            "live_peers": len(self.neighbours.others()) + 1,
            "peer": self.node.peer_id,
            "time": time.time(),
        }
        try:
            with self._rounds_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.warning("could not write %s: %s", self._rounds_path, error.strerror)

    async def _after_failure(self, offer: Offer, error: NoGroup | RoundFailed) -> None:
        """Look whether the others have committed; if not, wait a little and offer the same bytes again. Training goes on."""
        self._set_phase("look")
        self._callers.clear()
        log.info("round=%d not averaged: %s", self.state.header.round + 1, error)
        self.neighbours.missed(getattr(error, "silent", ()))
        await self._ask_heads()
        await self.neighbours.read()
        pause = _BACKOFF_SECONDS[min(offer.failures, len(_BACKOFF_SECONDS) - 1)]
        offer.failures += 1
        offer.next_attempt = self.clock() + pause * self._rng.uniform(0.75, 1.25)
        self._set_phase("train")
        self.trainer.train()

    async def _ask_heads(self) -> None:
        """Ask the others directly: their records may be seconds old, and a member may have committed what we missed."""
        asked = {asyncio.create_task(ask_head(self._streams, r.peer_id)): r.peer_id for r in self.neighbours.counted_upon()}
        if not asked:
            return
        done, late = await asyncio.wait(asked, timeout=_ASK_SECONDS)
        await end_tasks(*late)
        self._takeover.consider([(task.result(), asked[task]) for task in done if task.result() is not None], self.state)

    # ---------------------------------------------------------------- settling and the end

    def _settle(self) -> None:
        """A state is settled when a second live peer signs it or a descendant of it or, alone, when it is on disk."""
        if not self._settling.waiting:
            return
        others, now = self.neighbours.others(), self.clock()
        safe = {digest for record in others for digest in (record.digest, *record.parents)}
        safe |= {digest for digest, since in self._saved if not others or now - since >= SETTLE_SECONDS}
        settled = self._settling.take(safe)
        if settled:
            self.trainer.settled(settled)

    def _complete(self) -> bool:
        """Whether the run's samples are all in the state; it ends when that state is settled."""
        return 0 < self.run.total_samples <= self.state.header.samples

    async def _finish(self) -> None:
        """Tell the trainer, after those who are still behind had a chance to fetch the last state."""
        self._set_phase("done")
        began = self.clock()
        while not self._closed and (self._told != self.state.digest or self._needed_by_others(self.clock() - began)):
            self._tell_trainer()
            await asyncio.sleep(TICK_SECONDS)
        self.trainer.done()
        while not self._closed:
            await asyncio.sleep(TICK_SECONDS)

    def _needed_by_others(self, lingered: float) -> bool:
        if self._donor.busy:
            return lingered < _LONGEST_LINGER_SECONDS
        return lingered < _LINGER_SECONDS and any(record.digest != self.state.digest for record in self.neighbours.others())

    # ---------------------------------------------------------------- background

    def _background(self) -> list[Callable[[], Awaitable[None]]]:
        return [self._publish_forever, self._read_forever, self._save_forever, self._watch_forever, self._meet_forever]

    def _set_phase(self, phase: str) -> None:
        self._phase = phase

    def record(self, maddrs: tuple[str, ...] = ()) -> PeerRecord:
        header, progress = self.state.header, self.progress
        return PeerRecord(
            peer_id=self.node.peer_id,
            config=self.run.digest,
            schema=header.schema,
            round=header.round,
            samples=header.samples,
            digest=self.state.digest,
            parents=header.parents,
            waiting_samples=min(progress.waiting, 2 * self.run.target_batch_size),
            samples_per_second=progress.samples_per_second if self._phase == "train" and self.offer is None else 0.0,
            loss=progress.loss,
            phase=self._phase,
            group_size=self._group_size,
            client_mode=self.node.client_mode,
            maddrs=maddrs[:6],
            time=time.time(),
        )

    async def _publish(self) -> None:
        maddrs = tuple(await self.node.maddrs())
        await self.node.publish(self.run.run_id, self.record(maddrs))

    def _period(self) -> float:
        """Seconds between two looks at each other: a twentieth of a round, so that a round is not overrun by more than that."""
        rate = self.progress.samples_per_second + sum(record.samples_per_second for record in self.neighbours.counted_upon())
        return min(max(self.run.target_batch_size / rate / 20, 0.5), RENEW_SECONDS) if rate > 0 else 1.0

    async def _publish_forever(self) -> None:
        told_run = 0.0
        while True:
            self._publish_now.clear()
            with contextlib.suppress(Exception):  # a node that answers nothing any more is the watchdog's matter
                await asyncio.wait_for(self._publish(), RENEW_SECONDS)
                if self.clock() >= told_run:
                    await asyncio.wait_for(self.node.publish_run(self._run_record()), RENEW_SECONDS)
                    told_run = self.clock() + _RUN_RECORD_SECONDS
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._publish_now.wait(), self._period())

    def _run_record(self) -> RunRecord:
        header = self.state.header
        head = {"digest": self.state.digest, "round": header.round, "samples": header.samples, "peers": [self.node.peer_id]}
        return RunRecord(run_id=self.run.run_id, run=vars(self.run), server_url=self.server_url, head=head if header.round else None)

    async def _read_forever(self) -> None:
        while True:
            await asyncio.sleep(min(self._period(), 1.0))
            await self.neighbours.read()
            self._wake.set()

    async def _watch_forever(self) -> None:
        """hivemind notices nothing of p2pd's death: ask it, and end when it is gone, so that a new sidecar is started."""
        failures = 0
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            failures = 0 if await self.node.alive() else failures + 1
            if failures >= 2:
                raise PeerLost("p2pd does not answer any more")

    async def _meet_forever(self) -> None:
        """Dial those we lost: hivemind forgets peers for good after a partition, and two halves would never meet again."""
        while True:
            await asyncio.sleep(_MEET_SECONDS)
            for maddrs in self.neighbours.lost():
                await self.node.meet(maddrs)

    async def _save_forever(self) -> None:
        while True:
            state, self._to_save = self._to_save, None
            if state is not None:
                try:
                    await asyncio.get_running_loop().run_in_executor(None, self.store.save, state)
                    self._saved.append((state.digest, self.clock()))
                    self._wake.set()
                except UserError as error:
                    self.trainer.failed(error)
            await asyncio.sleep(TICK_SECONDS)

    async def leave(self) -> None:
        """After living: the newest state on disk and reported, and nobody need wait until our record is too old. Raises UserError (disk)."""
        if self.state.header.round and self.state.digest not in [digest for digest, _ in self._saved]:
            await asyncio.get_running_loop().run_in_executor(None, self.store.save, self.state)
            self._saved.append((self.state.digest, self.clock()))
        self._tell_trainer()
        self._settle()
        self._set_phase(LEFT)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.node.publish(self.run.run_id, self.record()), 2)


def _head(record: PeerRecord) -> Head:
    return Head(record.digest, record.samples)
