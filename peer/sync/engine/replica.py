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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from peer.contracts import Member, Settlement
from peer.sync.engine.averaging import Averager, RoundFailed
from peer.sync.engine.codec import CODECS
from peer.sync.engine.disk import StateStore
from peer.sync.engine.donors import Donor, ask_head, fetch
from peer.sync.engine.groups import Group, Matchmaker, NoGroup, Standing, Ticket
from peer.sync.engine.local_work import REBASED_ANCESTORS
from peer.sync.engine.outer import Strategy
from peer.sync.engine.state import BadState, Head, State, better, next_state
from peer.sync.engine.streams import PeerLost, Streams
from swarm.dht import SwarmNode
from swarm.errors import UserError
from swarm.records import RECORD_LIFE_SECONDS, RENEW_SECONDS, PeerRecord, RunRecord
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
_BACKOFF_SECONDS = (1, 2, 4, 8, 16, 30)
_ATTEMPTS_BEFORE_GOING_ON = 3
_LINGER_SECONDS = 15.0
_RUN_RECORD_SECONDS = 60.0
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
    failures: int = 0
    silent: dict[str, int] = field(default_factory=dict)
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
        self.progress, self.offer, self.records = Progress(), None, {}
        self.leaving = False
        self._rounds_path, self._last_known, self._last_holders = rounds_path, last_known, last_holders
        self._codec = CODECS[run.wire]
        streams = Streams(node)
        self._streams = streams
        self._donor = Donor(streams, lambda: self.state, clock)
        self._matchmaker = Matchmaker(node.peer_id, streams, self._standing, self._on_called, 2 * run.target_batch_size)
        self._averager = Averager(node.peer_id, streams, self._codec, size)
        self._phase, self._group_size, self._called, self._asked = "join", 0, False, False
        self._wake, self._publish_now = asyncio.Event(), asyncio.Event()
        # A state read from disk may never have been reported; reporting twice does no harm.
        self._unsettled = _settlements(state)
        self._saved: State | None = state if state.header.round else None
        self._to_save: State | None = None
        self._started = self._records_read = clock()
        self._bad_heads: dict[str, float] = {}
        self._closed = False
        self._rng = random.Random(node.peer_id)

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Serve others; publish our record; read theirs."""
        await self._matchmaker.start()
        await self._averager.start()
        await self._donor.start()
        await self._publish()
        await self._read_records()

    async def live(self) -> None:
        """Take part until closed. Raises UserError when this peer cannot go on."""
        background = [asyncio.create_task(task()) for task in (self._publish_forever, self._read_forever, self._save_forever)]
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
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    async def _tick(self) -> None:
        await self._look()
        if self._phase == "join" and not self._may_start():
            return
        self._settle()
        if self._complete():
            return None if self._unsettled else await self._finish()
        if self.offer is None:
            self._set_phase("train")
            if not self._asked and (self._called or self._round_is_full() or (self.leaving and self.progress.waiting)):
                self._asked = True
                self.trainer.freeze()
        elif (self._others() or self._alone()) and (self._called or self.clock() >= self.offer.next_attempt):
            await self._attempt()

    # ---------------------------------------------------------------- joining and looking

    def _may_start(self) -> bool:
        """Nobody starts again from the base model where a later state is known to exist."""
        known = self._last_known
        if known is not None and better(known, Head.of(self.state)) and known.samples > 0:
            holders = ", ".join(peer[-6:] for peer in self._last_holders) or "unknown peers"
            self.trainer.news(
                f"the run is at {known.samples} samples (state {known.digest[:8]}), this peer at {self.state.header.samples}; "
                f"waiting for one who has that state: {holders}"
            )
            return False
        self._set_phase("train")
        self.trainer.landed(self.state)
        return True

    async def _look(self) -> None:
        """Take over a better head that a live peer signs."""
        ours = Head.of(self.state)
        heads = {record.digest: Head(record.digest, record.samples, record.parents) for record in self._others()}
        right = ours
        for head in heads.values():
            if better(head, right) and self._bad_heads.get(head.digest, 0) < self.clock():
                right = head
        if right is not ours:
            await self._take_over(right.digest, [r.peer_id for r in self._others() if r.digest == right.digest])

    async def _take_over(self, digest: str, holders: list[str]) -> None:
        before = self._phase
        if before != "join":
            self._set_phase("fetch")
        began = self.clock()
        try:
            state = await fetch(self._streams, holders, digest, self.state)
        except (PeerLost, BadState) as error:
            # The next seconds belong to other heads; a liar must not keep us busy.
            self._bad_heads[digest] = self.clock() + 5
            log.warning("could not take over state=%s: %s", digest[:8], error)
            self._set_phase(before)
            return
        log.info(
            "took over round=%d state=%s samples=%d seconds=%.1f",
            state.header.round,
            digest[:8],
            state.header.samples,
            self.clock() - began,
        )
        self._adopt(state, "fetched", announce=before != "join")
        self._set_phase(before)

    def _others(self) -> list[PeerRecord]:
        """Live peers of this run other than us, with the same tensors."""
        return [record for peer, record in self.records.items() if peer != self.node.peer_id and self._ours(record)]

    def _ours(self, record: PeerRecord) -> bool:
        if record.config != self.run.digest:
            return False
        if record.schema != self.state.header.schema:
            log.debug("%s trains other tensors", record.peer_id[-6:])
            return False
        return record.waiting_samples <= 2 * self.run.target_batch_size

    def schema_conflict(self) -> bool:
        """Whether every other live peer trains other tensors than we: a version or method that differs here."""
        records = [record for peer, record in self.records.items() if peer != self.node.peer_id and record.config == self.run.digest]
        return bool(records) and all(record.schema != self.state.header.schema for record in records)

    # ---------------------------------------------------------------- a round

    def progressed(self, progress: Progress, landed: str) -> None:
        """The trainer says how far it is; before it has landed on our state, what it says is waiting may be in that state already."""
        if landed != self.state.digest:
            progress.waiting = self.progress.waiting
        self.progress = progress

    def offered(self, offer: Offer) -> None:
        """The trainer froze a contribution."""
        self._asked = False
        if self._kept(offer.parent):
            self.offer = offer
        self._wake.set()

    def nothing_to_freeze(self) -> None:
        self._asked = self._called = False

    def _kept(self, parent: str) -> bool:
        recent = self.state.header.parents[: REBASED_ANCESTORS if self.strategy.rebases else 0]
        return parent == self.state.digest or parent in recent

    def _round_is_full(self) -> bool:
        if self.progress.waiting == 0:
            return False
        total = self.progress.waiting
        for record in self._others():
            if record.digest == self.state.digest:
                age = min(max(time.time() - record.time, 0), RENEW_SECONDS)
                total += record.waiting_samples + int(record.samples_per_second * age)
        return total >= self._threshold()

    def _threshold(self) -> int:
        target, total = self.run.target_batch_size, self.run.total_samples
        left = total - self.state.header.samples
        return left if total and left <= _LAST_ROUND_STRETCH * target else target

    def _standing(self) -> Standing:
        offers = self._phase != "join" and self.progress.waiting > 0 and not self._complete()
        return Standing(self.state.digest, offers, self.progress.step_seconds)

    def _on_called(self) -> None:
        self._called = True
        self._wake.set()

    async def _attempt(self) -> None:
        offer, self._called = self.offer, False
        try:
            if self._alone():
                group, mean = Group(self.state.digest, (offer.member,), ()), offer.encoded
            else:
                self._set_phase("group")
                group = await self._matchmaker.form(
                    Ticket(self.state.digest, offer.member, not self.node.client_mode), self._expected(offer)
                )
                self._check_quorum(group, offer)
                self._set_phase("average")
                mean = offer.encoded if len(group.members) == 1 else await self._averager.average(group, offer.encoded)
            await self._commit(group, mean)
        except (NoGroup, RoundFailed) as error:
            await self._after_failure(offer, error)

    def _expected(self, offer: Offer) -> dict[str, bool]:
        """Peers that may come, and whether each can lead: those at our state, or a step behind in the records, which are a second old."""
        recent = {self.state.digest, *self.state.header.parents[:REBASED_ANCESTORS]}
        return {
            record.peer_id: not record.client_mode
            for record in self._others()
            if record.digest in recent and offer.silent.get(record.peer_id, 0) < _ATTEMPTS_BEFORE_GOING_ON
        }

    def _check_quorum(self, group: Group, offer: Offer) -> None:
        """A group must hold more than half of the samples that wait on this state, or two of them could both commit. Raises NoGroup."""
        members = {member.peer for member in group.members}
        outside = sum(
            record.waiting_samples
            for record in self._others()
            if record.digest == group.parent
            and record.peer_id not in members
            and offer.silent.get(record.peer_id, 0) < _ATTEMPTS_BEFORE_GOING_ON - 1
        )
        if group.samples <= outside:
            raise NoGroup(f"the group holds {group.samples} samples, {outside} wait elsewhere", group.silent)

    def _alone(self) -> bool:
        """No other live record during a whole record life, and our own can be read back."""
        up = self.clock() - self._started
        return not self._others() and up >= RECORD_LIFE_SECONDS and self.node.peer_id in self.records

    async def _commit(self, group: Group, encoded: Tensor) -> None:
        began = self.clock()
        parent = self.state

        def outer_step() -> State:
            mean = self._codec.decode(encoded)
            return next_state(parent, self.strategy.outer_step(parent.vectors(self.size), mean), group.members)

        state = await asyncio.get_running_loop().run_in_executor(None, outer_step)
        how = "averaged" if len(group.members) > 1 else "solo"
        self._group_size = len(group.members)
        log.info(
            "%s round=%d peers=%d samples=%d of %d state=%s seconds=%.2f",
            how, state.header.round, len(group.members), state.header.samples, self.run.total_samples, state.digest[:8], self.clock() - began,
        )  # fmt: skip
        self._adopt(state, how)
        self._set_phase("train")

    def _adopt(self, state: State, how: str, *, announce: bool = True) -> None:
        """The new state is ours: swap, publish, tell the trainer, keep what is still to be settled."""
        previous, self.state = self.state, state
        self._donor.retire(previous)
        self._to_save = state
        self._unsettled += [s for s in _settlements(state) if s.round > previous.header.round]
        if self.offer is not None:
            included = state.header.included.get(self.node.peer_id, 0) >= self.offer.member.number
            if included:
                self.progress.waiting = max(self.progress.waiting - self.offer.member.samples, 0)
            if included or not self._kept(self.offer.parent):
                self.offer = None
        self._asked = self._called = False
        self._write_round(how)
        if announce:
            self.trainer.landed(state)
        self._publish_now.set()

    def _write_round(self, how: str) -> None:
        header = self.state.header
        line = {
            "round": header.round,
            "samples": header.samples,
            "digest": self.state.digest,
            "parent": header.parents[0] if header.parents else "",
            "members": [[m.peer, m.number, m.samples] for m in header.members],
            "how": how,
            "live_peers": len(self._others()) + 1,
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
        self._called = False
        log.info("round=%d not averaged: %s", self.state.header.round + 1, error)
        for peer in getattr(error, "silent", ()):
            offer.silent[peer] = offer.silent.get(peer, 0) + 1
        await self._ask_heads()
        await self._read_records()
        await self._look()
        if self.offer is offer:
            pause = _BACKOFF_SECONDS[min(offer.failures, len(_BACKOFF_SECONDS) - 1)]
            offer.failures += 1
            offer.next_attempt = self.clock() + pause * self._rng.uniform(0.75, 1.25)
            self.trainer.train()
        self._set_phase("train")

    async def _ask_heads(self) -> None:
        """Ask the others directly: their records may be seconds old, and a member may have committed what we missed."""
        others = self._others()
        heads = await asyncio.gather(*(ask_head(self._streams, record.peer_id) for record in others))
        found = [(head, record.peer_id) for head, record in zip(heads, others, strict=True) if head is not None]
        better_ones = [(head, peer) for head, peer in found if better(head, Head.of(self.state))]
        if better_ones:
            digest = better_ones[0][0].digest
            await self._take_over(digest, [peer for head, peer in better_ones if head.digest == digest])

    # ---------------------------------------------------------------- settling and the end

    def _settle(self) -> None:
        """A state is settled when a second live peer signs it or a descendant of it or, alone, when it is on disk."""
        if not self._unsettled:
            return
        signed = set()
        for record in self._others():
            signed |= {record.digest, *record.parents}
        if self._saved is not None and not self._others():
            signed |= {self._saved.digest, *self._saved.header.parents}
        lineage = {self.state.digest, *self.state.header.parents}
        newest = max((index for index, s in enumerate(self._unsettled) if s.digest in signed and s.digest in lineage), default=None)
        if newest is None:
            return
        settled, self._unsettled = self._unsettled[: newest + 1], self._unsettled[newest + 1 :]
        self.trainer.settled([s for s in settled if s.digest in lineage])

    def _complete(self) -> bool:
        """Whether the run's samples are all in the state; it ends when that state is settled."""
        return 0 < self.run.total_samples <= self.state.header.samples

    async def _finish(self) -> None:
        """Tell the trainer, after those who are still behind had a chance to fetch the last state."""
        self._set_phase("done")
        until = self.clock() + _LINGER_SECONDS
        while (
            self.clock() < until and not self._closed and (self._donor.busy or any(r.digest != self.state.digest for r in self._others()))
        ):
            await asyncio.sleep(TICK_SECONDS)
        self.trainer.done()
        while not self._closed:
            await asyncio.sleep(TICK_SECONDS)

    # ---------------------------------------------------------------- background

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
        rate = self.progress.samples_per_second + sum(record.samples_per_second for record in self._others())
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

    async def _read_records(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            self.records = await asyncio.wait_for(self.node.records(self.run.run_id), RENEW_SECONDS)
            if self.node.peer_id in self.records:
                self._records_read = self.clock()
        self._wake.set()

    async def _read_forever(self) -> None:
        while True:
            await asyncio.sleep(min(self._period(), 1.0))
            with contextlib.suppress(Exception):
                await self._read_records()
            if self.clock() - self._records_read > RECORD_LIFE_SECONDS and not await self.node.alive():
                raise PeerLost("p2pd does not answer any more")

    async def _save_forever(self) -> None:
        while True:
            state, self._to_save = self._to_save, None
            if state is not None:
                try:
                    await asyncio.get_running_loop().run_in_executor(None, self.store.save, state)
                    self._saved = state
                    self._wake.set()
                except UserError as error:
                    self.trainer.failed(error)
            await asyncio.sleep(TICK_SECONDS)

    async def save_last(self) -> None:
        """Before leaving: the newest state on disk."""
        if self._saved is not self.state and self.state.header.round:
            await asyncio.get_running_loop().run_in_executor(None, self.store.save, self.state)


def _settlements(state: State) -> list[Settlement]:
    """What a state says of itself and its ancestors, oldest first."""
    own = [state.header.settlement(state.digest)] if state.header.round else []
    return [*reversed(state.header.ancestors), *own]
