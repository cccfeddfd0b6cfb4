"""One peer's part in the rounds, from its coming to the run's end: `take_part` is the story, each line of it a phase that others can see.

Lives in the sidecar's loop, talks to the swarm through a node and to the trainer through `Trainer`, and never decides from a record that is
not signed, fresh and within bounds. The rules, the reason for each, and the reading order are in docs/internals.md:
who may start, when a round is due, how it is averaged, which state is right, when a state is final.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from peer.contracts import Member
from peer.sync.engine import failpoints
from peer.sync.engine.cell import Bell, Cell, Phase
from peer.sync.engine.certificate import Seals
from peer.sync.engine.codec import Wire
from peer.sync.engine.net.bucket import Bucket
from peer.sync.engine.net.link import serve_link
from peer.sync.engine.net.neighbours import Neighbours
from peer.sync.engine.net.presence import Presence
from peer.sync.engine.net.streams import Streams
from peer.sync.engine.outer import Strategy
from peer.sync.engine.round import span
from peer.sync.engine.round.averaging import RoundFailed
from peer.sync.engine.round.beginning import Beginning
from peer.sync.engine.round.catch_up import CatchUp
from peer.sync.engine.round.certificates import Certificates
from peer.sync.engine.round.checks import SpotChecks
from peer.sync.engine.round.company import Company
from peer.sync.engine.round.ending import Ending
from peer.sync.engine.round.equivocation import Equivocation
from peer.sync.engine.round.evidence import Evidence
from peer.sync.engine.round.excerpts import Auditor, NoAuditor
from peer.sync.engine.round.finality import Finality, safe
from peer.sync.engine.round.groups import NoGroup
from peer.sync.engine.round.heads import Heads
from peer.sync.engine.round.met import Met
from peer.sync.engine.round.next_round import NextRound
from peer.sync.engine.round.past_rounds import Past
from peer.sync.engine.round.plausible import Plausible
from peer.sync.engine.round.reception import Reception
from peer.sync.engine.round.rounds import OuterStep, Round, Rounds
from peer.sync.engine.round.rounds_file import flush_rounds, read_rounds, write_round
from peer.sync.engine.round.share_seals import ShareSeals
from peer.sync.engine.round.status import Status
from peer.sync.engine.round.telling import forever
from peer.sync.engine.round.wrong_states import WrongStates
from peer.sync.engine.state import Head, State
from peer.sync.engine.trainer.messages import Done, Failed, Sends
from peer.sync.engine.trainer.trainer import Contribution, Trainer
from peer.sync.engine.transfer.disk import StateStore
from peer.sync.engine.transfer.donors import Donor
from peer.sync.engine.transfer.kind import Kind, serve_kind
from peer.sync.engine.transfer.replay import MeanStore, rounds_kept
from peer.sync.engine.transfer.saving import Saver
from peer.sync.engine.transfer.state_fetch import Replaying, StateFetch
from swarm.dht import SwarmNode
from swarm.end import End
from swarm.errors import ExitCode, UserError
from swarm.members import Members
from swarm.proofs import Proofs
from swarm.records import RECORD_LIFE_SECONDS, PeerRecord
from swarm.run_config import RunConfig
from swarm.tasks import end_tasks
from swarm.wrong_states import Accusation

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_SECONDS, _SHORTEST_IDLE_SECONDS = 1.0, 0.05
"""Every event wakes a peer. While time alone may make something due, it sleeps the first at most and the second at least."""
_BACKOFF_SECONDS = (1, 2, 4, 8, 16, 30)
_LINGER_SECONDS, _LONGEST_LINGER_SECONDS = 60.0, 300.0
"""At the end others may need our state: the first is how long we wait for one to fetch it, the second how long while one does. A peer on a slow link needed 22 s to begin; of a dead one the record is gone
after 20 s."""
_CLOSE_SECONDS = 5.0
_REBASE_SECONDS = 2.0
"""A trainer that did not rebase within this time has other things to do: the state is written without waiting for it."""


class Replica:
    """line: takes the messages to the training process. last_number: of the last contribution that it ever made; None where that is not known."""

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
        line: Sends,
        server_url: str = "",
        name: str = "",
        hardware: str = "",
        last_known: Head | None = None,
        last_holders: tuple[str, ...] = (),
        min_peers: int = 1,
        last_number: int | None = None,
        assists: bool = False,
        end: End | None = None,
        members: Members | None = None,
        upload: Bucket | None = None,
        auditor: Auditor | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ):
        self.node, self.assists, self.end, self.members = node, assists, end or End(run), members or Members(run, wall=wall)
        self.members.proofs = Proofs(run, node.has_signed, self.members.has, path=store.folder / "proofs.json")
        self._discarded, self._rounds_path, self._clock, self._wall, self._rng = store.discarded, rounds_path, clock, wall, rng or random.SystemRandom()
        self.bell, self._auditor = Bell(), auditor or NoAuditor()
        self.state, self.phase = Cell(state, self.bell, clock), Cell(Phase.JOIN, self.bell, clock)
        self.trainer = Trainer(line, self.state, strategy, node.peer_id, self.bell, clock, last_number)
        # Who is there.
        self.met = Met(store.folder / "met.json", run.digest)
        forsaken = store.forsaken and not state.header.round
        if forsaken:
            self.met.clear()  # those that stood with us there know nothing better: we come as a newcomer does
        company = Company(self.met, lambda: self.state.value.header.round, clock, node.peer_id, lambda: self.members.bans.trusted)
        self.neighbours = Neighbours(node, run, state.header.schema, clock, company, wall, self.members)
        # Which state is right, and how a better one comes here.
        outer, streams = OuterStep(strategy, wire, store.buffers), Streams(node, upload, self.members)
        seals = Seals(run, node, self.members)
        self.certificates = Certificates(seals, store.folder / "certificate.json", state, forsaken=forsaken)
        self._evidence = Evidence(streams, seals, self.certificates, self.bell.ring, clock)
        self.heads = Heads(
            self.met, self.neighbours.others, state, lambda peer: self._state_fetch.avoids(peer), clock, leads=not node.client_mode,
            trains=lambda: not (assists or self.trainer.progress.paused), evidence=self._evidence, starting_again=lambda: self.neighbours.starting_again,
            is_last=self._is_last,
        )  # fmt: skip
        self._ending = Ending(run, self.end, node, line)
        plausible = Plausible(run, node.peer_id, self.state, self.trainer, self.heads, self._ending, store.discarded)
        self._means = MeanStore(store.folder / "means", rounds_kept(state.buffer.num_bytes, wire.num_bytes))
        self._state_fetch = StateFetch(
            streams, plausible.refusal, clock, Replaying(wire.num_bytes, outer, self._means), self.bell.ring, store.buffers, self.met, self._rng
        )
        self._catch_up = CatchUp(streams, self.state, self.heads, self.neighbours, self._state_fetch)
        # A round.
        self.next_round = NextRound(run, self.end, self.neighbours, self.state, wall)
        self.reception = Reception(
            node.peer_id, self.state, self.phase, self.trainer, self.neighbours, self.heads, self._catch_up, self.next_round, self.end,
            self.bell, assists=assists,
        )  # fmt: skip
        self.rounds = Rounds(
            run, self.end, node, streams, self.neighbours, company, outer, self.phase, self.reception, self.next_round,
            seals=ShareSeals(run.digest, node) if self.members.needed else None, auditor=auditor, clock=clock, rng=self._rng,
        )  # fmt: skip
        self._equivocation = Equivocation(streams, self.members.proofs, self.neighbours.others, clock, self._rng)
        self._checks = SpotChecks(run, node, streams, wire, self.members.proofs, self.neighbours.others, clock, self._rng)
        self._wrong_states = WrongStates(self.members.proofs, state)
        self._beginning = Beginning(
            run, last_known, last_holders, min_peers, clock, self.end, store.discarded.holds, store.forsaken or bool(store.discarded.names)
        )
        # What is kept of our states, what is handed out, and what others see of us.
        self._past = Past(streams, self.state, self._holders, self.trainer.final, read_rounds(rounds_path), clock)
        self._finality = Finality(state, self._past.earlier())
        self._donor = Donor(
            streams, lambda: self.state.value, store, self._means, lambda: self.phase.value is Phase.AVERAGE, clock, met=self.met
        )
        self._saver = Saver(
            store, state, self._saved, self._fail, self._may_save, clock, node.peer_id, before=lambda: flush_rounds(rounds_path)
        )
        self.status = Status(
            run, node, self.neighbours, self.end, self.members, self.state, self.phase, self.trainer, self.heads, self._catch_up,
            assists=assists, name=name, hardware=hardware, server_url=server_url, wall=wall, seal=lambda: self.certificates.seal,
            findings=self._auditor.findings,
        )  # fmt: skip
        self._presence = Presence(run, node, self.neighbours, self.status, self.bell, clock, self.met, self._rng)
        self.book = self._presence.book
        self._streams, self._kind, self._steps_locally = streams, Kind(state.header.schema, wire.sizes), strategy.steps_locally
        self._looked, self._closed = wall(), False

    # ---------------------------------------------------------------- the story

    async def take_part(self) -> None:
        """Until closed. Raises UserError when this peer cannot go on."""
        await self._join()
        while not self._closed:
            contribution = await self._until(self._contribution)
            if contribution is not None:
                await self._average(contribution)
            elif not self._closed:
                await self._finish()

    async def _join(self) -> None:
        """Until we stand where the swarm stands, and may train from there."""
        self.phase.set(Phase.JOIN)
        await self._until(lambda: self._closed or self._may_start())
        if not self._closed:
            self.status.note = ""
            self.phase.set(Phase.TRAIN)

    def _contribution(self) -> Contribution | bool | None:
        """What is to be averaged now; None: nothing any more, for the run is over. False while neither is so."""
        if self._closed or self._ending.is_over(self.state.value):
            return None
        self.phase.set(Phase.FETCH if self._catch_up.held_back else Phase.TRAIN)
        if self.assists:  # we bring nothing of our own: we come when somebody calls, and never begin a round
            called = self.phase.value is Phase.TRAIN and self.next_round.is_called()
            return called and Contribution(Member(self.node.peer_id, 0, 0), None, self.state.value.digest)
        held = self.trainer.contribution
        if held is None:
            if self.trainer.may_freeze and self._is_due():
                self.trainer.freeze()
            return False
        return self._may_attempt(held) and held

    async def _average(self, contribution: Contribution) -> None:
        """One attempt at the next round, with this in it."""
        callers = self.next_round.take_callers()
        attempt = self.rounds.attempt(self.state.value, contribution, callers, self.state.age_seconds)
        try:
            done = await self._unless_overtaken(attempt)
        except (NoGroup, RoundFailed) as error:
            await self._look_and_back_off(contribution, error)
        else:
            if done is not None:
                await self._commit(done, contribution)
        self.phase.set(Phase.TRAIN)

    async def _finish(self) -> None:
        """Once the last state is final, tell the trainer, after those who are still behind had a chance to fetch that state; unless the run
        goes on, or ended better."""
        await self._until(lambda: self._closed or not self._ending.is_over(self.state.value) or not self._finality.waiting)
        if await self._ending.was_put_off():
            return
        self.phase.set(Phase.DONE)
        last, began = self.state.value, self._clock()
        await self._until(lambda: self._closed or self._goes_on_after(last) or self._has_served(last, self._clock() - began))
        if self._goes_on_after(last) or await self._ending.was_put_off():
            return
        self.trainer.send(Done())
        await self.bell.until(lambda: self._closed)

    # ---------------------------------------------------------------- life around it

    async def start(self) -> None:
        """Serve others; publish our record; read theirs. Where connections are scarce, those to peers that we have met stay."""
        self.node.admit(self.members)
        self.node.prefer(self.met.__contains__)
        await self.rounds.start()
        await self._donor.start()
        await serve_link(self._streams, self._clock)
        await serve_kind(self._streams, self._kind)
        await self._past.serve()
        if self.members.needed:
            await self._evidence.serve()
            await self._equivocation.serve()
            await self._checks.serve()
        await self._presence.publish()
        await self.neighbours.read()

    async def live(self) -> None:
        """Take part until closed, with all that goes on beside it. Raises UserError when this peer cannot go on."""
        beside = (
            *self._presence.tasks(), self._saver.save_forever, self._means.keep_forever, self._donor.tidy_forever,
            self._rebase_trainer_forever, self._report_forever, self._ask_for_the_past_forever, self._ask_for_the_end_forever,
            self._end_once_discarded, *self._for_members(),
        )  # fmt: skip
        tasks = [asyncio.create_task(job()) for job in (self.take_part, *beside)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await end_tasks(*tasks)
            await self._state_fetch.close()
            self._donor.close()

    def _for_members(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        looks = partial(forever, self._equivocation.look), partial(forever, self._checks.look)
        return (self._gather_seals_forever, self._evidence.ask_forever, *looks) if self.members.needed else ()

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

    def close(self) -> None:
        """End after the round that is being averaged."""
        self._closed = True
        self.bell.ring()

    async def leave(self) -> None:
        """After living: the newest state on disk and reported, and nobody need wait until our record is too old.

        Raises UserError (disk), which is then what the others read of us.
        """
        self.phase.set(Phase.LEFT)
        try:
            await self._saver.save(self.state.value)
        except UserError as error:
            self.failed(error.message)
            raise
        else:
            self.certificates.saved(self.state.value)
            self.trainer.rebase()
            await self._report()
        finally:
            await self._presence.publish_last()

    def failed(self, reason: str) -> None:
        """Our trainer ends for this reason: the others read it in our last record."""
        self.status.note = reason

    def extend(self, extension: Mapping[str, Any]) -> None:
        """The trainer has heard from the host that the run goes on."""
        if self.end.extend(extension):
            self._presence.publish_run_soon()
            self.bell.ring()

    def record(self) -> PeerRecord:
        return self.status.record()

    def seen(self) -> dict[str, Any]:
        return self.status.seen()

    def accusations(self) -> list[Accusation]:
        """What is proven of others, and which of our last states a wrong mean has made."""
        return [*self.members.proofs.all, *self._wrong_states.found()]

    # ---------------------------------------------------------------- waiting

    async def _until(self, ready: Callable[[], T]) -> T:
        """Wait until `ready` says something other than False. Before it is asked, a better state is taken over."""
        while True:
            self._look()
            if (found := ready()) is not False:
                return found
            await self.bell.rung(self._idle_seconds())
            await self._notice_absence()

    def _idle_seconds(self) -> float:
        """Until something may be due although nothing happens: the next attempt, or a round that others' promises fill."""
        held, seconds = self.trainer.contribution, IDLE_SECONDS
        if self.phase.value is Phase.FETCH or not (self.neighbours.others() or self.neighbours.alone()):
            return seconds  # there is no attempt before that changes, whatever is due
        if held is not None and held.next_attempt is not None:
            seconds = held.next_attempt - self._clock()
        elif held is None and self.trainer.may_freeze:
            seconds = self.next_round.seconds_until_full(self.trainer.progress)
        return min(max(seconds, _SHORTEST_IDLE_SECONDS), IDLE_SECONDS)

    async def _notice_absence(self) -> None:
        """A machine that slept, or a process that was stopped, comes back like one that starts: others have gone on without it.

        Until it has looked around, its record says so (JOINING), and where it stands counts for nothing. An absence in the middle of a round is
        noticed after it.
        """
        before, self._looked = self._looked, self._wall()
        away = self._looked - before
        if away > RECORD_LIFE_SECONDS and self.phase.value in (Phase.TRAIN, Phase.FETCH):
            log.info("back after %.0f s", away)
            self._beginning.again()
            await self._join()

    # ---------------------------------------------------------------- joining

    def _may_start(self) -> bool:
        ours = self.state.value
        return self._beginning.may_start(
            Head.of(ours), own_round=ours.header.round, fetching=self._state_fetch.signers > 0,
            behind=bool(self.heads.right()) or self._evidence.is_pending,
            others=self.neighbours.others(), news=self._waits, counts=self._state_fetch.promises.counts,
        )  # fmt: skip

    def _waits(self, why: str) -> None:
        self.status.note = why
        self.trainer.news(why)

    # ---------------------------------------------------------------- when to average

    def _is_due(self) -> bool:
        """Whether the trainer should freeze what it has."""
        return self.trainer.goes or self.next_round.is_called_here_or_ahead() or self.next_round.is_full(self.trainer.progress)

    def _is_wanted(self) -> bool:
        """Whether a contribution should be averaged now. One that came late joins the next round instead of starting a small one."""
        return self.trainer.goes or self.next_round.is_called() or self.next_round.is_full(self.trainer.progress)

    def _may_attempt(self, held: Contribution) -> bool:
        wanted = not held.failures and self._is_wanted()
        if held.next_attempt is None:
            if self._steps_locally and not held.failures and not wanted:
                self.trainer.postpone(held)
            else:
                held.next_attempt = self._clock()
        company = self.neighbours.others() or self.neighbours.alone()
        if not company or self.phase.value is Phase.FETCH:
            return False
        return self.next_round.is_called() or self._clock() >= held.next_attempt or wanted

    # ---------------------------------------------------------------- what comes of an attempt

    async def _unless_overtaken(self, attempt: Coroutine[Any, Any, Round]) -> Round | None:
        """What `attempt` comes to; None when a better state was taken over before its group was closed.

        Those it waits for may be at that state already, and would never come; a group that is closed waits for us.
        """
        parent, attempting = self.state.value, asyncio.create_task(attempt)
        attempting.add_done_callback(lambda task: task.cancelled() or task.exception())  # retrieved, even if we are cancelled meanwhile
        attempting.add_done_callback(lambda task: self.bell.ring())
        try:
            await self.bell.until(lambda: attempting.done() or self._is_overtaken(parent), IDLE_SECONDS)
            if attempting.done():
                return attempting.result()
            log.info("round=%d not averaged: a better state has arrived", parent.header.round + 1)
            return None
        finally:
            await end_tasks(attempting)

    def _is_overtaken(self, parent: State) -> bool:
        if (now := self._wall()) - self._looked <= RECORD_LIFE_SECONDS:  # a longer absence is noticed after the round
            self._looked = now
        if self.phase.value is Phase.GROUP:
            self._look()
        return self.state.value is not parent

    async def _commit(self, done: Round, contribution: Contribution) -> None:
        """The round is ours: its state, and what is to be told of it."""
        if self.status.had(done) and not self.assists:
            self.trainer.news(self.status.advice())
        if done.how == "averaged":
            self.met.averaged(done.group.peers - {self.node.peer_id})
            self._equivocation.averaged(done)
            self._checks.averaged(done, contribution.encoded)
            if done.mean.excerpts is not None:
                self._auditor.averaged(done.state.header.round, done.group, done.mean.excerpts)
        self._means.want(done.state, done.mean)
        self._adopt(done.state, done.how)
        self.phase.set(Phase.TRAIN)
        await failpoints.reached("before_publish", self.node.peer_id)

    async def _look_and_back_off(self, contribution: Contribution, error: NoGroup | RoundFailed) -> None:
        """Look whether the others have committed; if not, offer the same bytes again. Training goes on.

        At once when it is known whose fault it was, for that one is left out now. Otherwise after a pause: whatever it was may go by.
        """
        self.phase.set(Phase.LOOK)
        self.next_round.take_callers()
        number = self.state.value.header.round + 1
        log.info("round=%d not averaged: %s", number, error)
        self.status.note = f"round {number} not averaged: {error}"
        ahead = await self._catch_up.ask()
        # Who has moved on did not stay away: taken for absent, it would leave us to average alone beside it as soon as we have caught up.
        self.neighbours.missed(error.silent - ahead)
        pause = 0 if error.at_once else _BACKOFF_SECONDS[min(contribution.failures, len(_BACKOFF_SECONDS) - 1)]
        contribution.failures += 1
        contribution.next_attempt = self._clock() + pause * self._rng.uniform(0.75, 1.25)
        self.trainer.train()

    def _look(self) -> None:
        """Take over what has arrived; fetch what is right in place of ours."""
        arrived = self._catch_up.arrived()
        if arrived is not None:
            self._adopt(arrived, "fetched")
        self._catch_up.look()

    def _adopt(self, state: State, how: str) -> None:
        """The new state is ours. The one place where that changes: all that must change in the same instant is here, the rest follows the cell."""
        previous, self.status.note = self.state.value, ""
        self.state.set(state)
        self.trainer.moved()
        self.heads.moved(state, fetched=how == "fetched")
        self.certificates.moved(state)
        self._wrong_states.moved(state)
        self._finality.moved(state)
        self._past.moved(state)
        self._donor.retire(previous)
        self.rounds.matchmaker.moved()
        self._saver.want(state)
        write_round(self._rounds_path, state, how, self.status.training(), self.node.peer_id, self._wall())
        self._presence.publish_soon()

    # ---------------------------------------------------------------- what goes on beside it

    async def _rebase_trainer_forever(self) -> None:
        while True:
            await self.bell.until(lambda: self.phase.value is not Phase.JOIN and self.trainer.may_rebase)
            self.trainer.rebase()

    def _may_save(self) -> bool:
        """Writing a state takes a core and the memory, and the trainer needs both for its rebase."""
        return self.assists or self.trainer.stands_on(self.state.value) or self.state.age_seconds > _REBASE_SECONDS

    def _saved(self, state: State) -> None:
        self.certificates.saved(state)
        self.bell.ring()

    def _fail(self, error: UserError) -> None:
        self.trainer.send(Failed.of(error))

    async def _gather_seals_forever(self) -> None:
        while True:
            seen = self.neighbours.others()
            self.certificates.see(seen)
            await self.bell.until(lambda seen=seen: self.neighbours.others() is not seen)

    async def _report_forever(self) -> None:
        while True:
            await self.bell.until(lambda: self._finality.waiting and self.phase.value is not Phase.JOIN)
            await self._report()
            await self.bell.rung(IDLE_SECONDS)

    async def _report(self) -> None:
        """To the trainer, which states are final."""
        if not self._finality.waiting or self.phase.value is Phase.JOIN:
            return
        waiting = [committed.digest for committed in self._finality.waiting]
        if final := self._finality.take(safe(waiting, self.neighbours.others(), self.met, self._saver.is_on_disk)):
            await failpoints.reached("before_final", self.node.peer_id)
            self.trainer.final(final)
            self.bell.ring()

    async def _ask_for_the_past_forever(self) -> None:
        """Who fetches a state asks what made it further back than it says itself, once its disk has it: what it hears is final."""
        await self._past.ask_forever(
            lambda ready: self.bell.until(lambda: self.phase.value is not Phase.JOIN and self._is_kept(self.state.value) and ready())
        )

    def _is_kept(self, state: State) -> bool:
        """Whether our disk has it, or an ancestor that it names."""
        return any(map(self._saver.is_on_disk, (state.digest, *state.header.parents)))

    async def _end_once_discarded(self) -> None:
        """Nobody goes on from a state that the host discards. A new start loads what was before it, or takes what the others have."""
        while not (name := self._discarded.name_of(self.state.value.digest, self.state.value.header)):
            await asyncio.sleep(IDLE_SECONDS)
        self.phase.set(Phase.LEFT)
        await self._presence.publish_last()  # the host's word is in it: who stands where we stood may hear it from nobody else
        raise UserError(
            f"The host has discarded state {name[:16]}, on which this peer's is built: {self.members.bans.reason(name) or 'no reason given'}.",
            fix="Start again, as dd-peer does by itself: it takes what the others have, or what is left on its disk.", code=ExitCode.FAILED,
        )  # fmt: skip

    def _holders(self) -> list[str]:
        """The others, those first that stand on our state."""
        others = sorted(self.neighbours.others(), key=lambda record: record.digest != self.state.value.digest)
        return [record.peer_id for record in others]

    # ---------------------------------------------------------------- the end

    async def _ask_for_the_end_forever(self) -> None:
        """Whether others went on after what we take for the end, because the host has put it off."""
        while True:
            await self.bell.until(lambda: self._ending.in_doubt and self.phase.value is not Phase.JOIN)
            await self._ending.was_put_off()
            self.bell.ring()

    def _is_last(self, head: Head) -> bool:
        """Whether the run ends with it; with ours only once that is final: where the last round failed at all others, they make it again without us."""
        return span.is_over(self.end, head) and (head.digest != self.state.value.digest or not self._finality.waiting)

    def _goes_on_after(self, last: State) -> bool:
        return self.state.value is not last or not self._ending.is_over(self.state.value)

    def _has_served(self, last: State, lingered: float) -> bool:
        return self.trainer.was_told_of(last) and not self._needed_by_others(lingered)

    def _needed_by_others(self, lingered: float) -> bool:
        if self._donor.busy:
            return lingered < _LONGEST_LINGER_SECONDS
        return lingered < _LINGER_SECONDS and any(record.digest != self.state.value.digest for record in self.neighbours.others())
