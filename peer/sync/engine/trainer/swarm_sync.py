"""The trainer's side of a swarm: freezes contributions, rebases the parameters onto new states, and tells its sidecar of both.

Implements `contracts.Sync` for every strategy that averages; what differs between them is an `outer.Strategy`. The words of the conversation
are in `messages.py`, its other end is `trainer.py` in the sidecar.
"""

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from peer.contracts import CommittedRound, SyncContext, SyncReport
from peer.machine.device import describe_hardware
from peer.sync.engine import failpoints
from peer.sync.engine.buffers import buffers_on
from peer.sync.engine.codec import Wire
from peer.sync.engine.memory import available_bytes, check_memory, host_bytes, state_bytes
from peer.sync.engine.net.messages import read_header
from peer.sync.engine.outer import load_strategy
from peer.sync.engine.round.plausible import NUMBER_FILE
from peer.sync.engine.state import first_state
from peer.sync.engine.trainer.local_work import OPEN, Anchor, LocalWork, NotFinite
from peer.sync.engine.trainer.messages import (
    Admitted,
    Banned,
    Done,
    Extend,
    Extended,
    Failed,
    Final,
    Freeze,
    Leave,
    Message,
    News,
    Nothing,
    Offer,
    Progress,
    Proven,
    Ready,
    Rebase,
    Seen,
    Start,
    Train,
)
from peer.sync.engine.trainer.pace import Pace
from peer.sync.engine.trainer.port import PortClosed
from peer.sync.engine.trainer.sidecar_process import Processes, SidecarProcess
from peer.sync.engine.transfer.discarded import discard
from peer.sync.engine.vectors import Schema, flatten
from swarm import advice, bans, files, members
from swarm.end import End
from swarm.errors import ExitCode, UserError
from swarm.records import CATCHING_UP, DONE
from swarm.wrong_states import ACCUSATIONS, Accusation

log = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0
LAST_STATE_SECONDS, MOST_LAST_STATE_SECONDS = 15.0, 330.0
POLL_SECONDS = 0.5
TELL_SECONDS = 1.0
"""The interval at which we tell the sidecar of our progress again: it answers with what it sees of the swarm. While a trainer waits, any
word from the sidecar made it say the same again, which woke the sidecar for nothing: a third of all that the two said."""


class _Swarm(Enum):
    """Where the trainer and the swarm are with each other."""

    UNKNOWN = "we have never stood where it stands"
    LOST = "the sidecar was started again, and has yet to find it"
    JOINED = "our parameters stand on its state, or on one shortly before"
    OVER = "the run has ended"


class SwarmSync:
    def __init__(self, context: SyncContext, strategy_path: str, processes: Processes | None = None):
        self._clock = processes.clock if processes else time.monotonic
        self._context, self._strategy_path = context, strategy_path
        self._strategy = load_strategy(strategy_path, context.run)
        if context.peer.overlap and not self._strategy.steps_locally:
            raise UserError(
                f"--overlap is not for --sync {context.run.sync}: gradients taken while a round is averaged would be of an old state, and lost.",
                fix="Remove --overlap, or found a run with --sync parameters or diloco.",
            )
        self._schema = Schema.of(context.params)
        wire, on_host = Wire.of(context.run.wire, self._schema), any(parameter.is_cpu for parameter in context.params.values())
        log.info("%s", advice.promise(wire.num_bytes))
        state_on = context.peer.state_on
        check_memory(host_bytes(self._strategy, wire, params_on_host=on_host, state_on=state_on), available_bytes())
        self._folder = context.output_dir
        self._folder.mkdir(parents=True, exist_ok=True)
        discard(self._folder / "state", context.peer.discard_state)
        buffers = buffers_on(state_on, self._folder / "state", sum(state_bytes(self._strategy, wire).values()))
        memory = buffers.shared(4 * self._schema.size * (1 + self._strategy.slots))
        anchor = flatten(context.params, memory.floats()[: self._schema.size])
        base = first_state(context.run.digest, self._schema.digest, anchor, self._strategy.slots, memory)
        self._work = LocalWork(context.params, Anchor(base.digest, base.header, base.buffer), self._strategy, wire, buffers)
        self._swarm, self._leaving = _Swarm.UNKNOWN, None
        self._offered = self._may_train = False
        """Of the frozen contribution: whether the sidecar knows that it stands on our state, and whether we train on while it waits."""
        self._number = 0
        self._news = _News()
        self._peer_id, self._min_peers = "", context.peer.min_peers
        self._end = context.end or End(context.run)
        self._members = context.members or members.Members(context.run)
        self._told_extension, self._told_bans = self._end.extension, self._members.bans.version
        self._told_membership = self._members.own
        self._told: tuple[Progress | None, float] = None, 0.0
        """Our progress as the sidecar heard it last, and when."""
        self.seen: Mapping[str, Any] = {}
        """What the sidecar last said of the swarm, by the names in `peer.figures.metrics.METRICS`; never changed in place."""
        self.paused = False
        """Set while this peer's owner has paused it: the others see it."""
        self._hardware = describe_hardware(next(iter(context.params.values())).device)
        self._pace, self._loss = Pace(self._clock), None
        self._validation: tuple[float | None, int] = None, 0
        """The held-out loss that was measured last, and of which round."""
        self._sidecar = SidecarProcess(self._opening, self._hear, processes)

    # ---------------------------------------------------------------- the contract

    @property
    def round(self) -> int:
        return self._work.state.header.round

    @property
    def samples(self) -> int:
        return self._work.state.header.samples

    @property
    def peers(self) -> int:
        return max(len(self._work.state.header.members), 1)

    def catch_up(self) -> SyncReport:
        """Hear from the swarm; while `wait` in the report says that our state is not yet the swarm's, call `step(0)`."""
        self._exchange(POLL_SECONDS)
        return self._report()

    def before_step(self) -> bool:
        if not self._strategy.steps_locally:
            self._work.accumulate()
        return self._strategy.steps_locally

    def step(self, samples: int, loss: float | None = None) -> SyncReport:
        """Count `samples` trained since the last call; take over what the swarm did. Raises UserError when the swarm is lost for good."""
        if samples:
            self._count(samples, loss)
        with self._pace.lost():
            self._exchange(POLL_SECONDS if self._must_wait() else 0)
        return self._report()

    def measured(self, loss: float) -> None:
        self._validation = loss, self.round

    def registered(self, number: int, receipt: str) -> None:
        """It is kept as long as the contribution, and no longer: both are in this process's memory."""
        assert self._work.frozen is not None and self._work.frozen.number == number and not self._offered
        self._work.frozen.receipt = receipt

    def withdraw(self, number: int) -> SyncReport:
        """The contribution just frozen may not be offered: take its work out of the parameters."""
        assert self._work.frozen is not None and self._work.frozen.number == number and not self._offered
        self._work.withdraw()
        self._send(Nothing())
        return self._report()

    def undo(self) -> SyncReport:
        return SyncReport(dropped=tuple(self._work.undo()))

    def rest(self, resting: bool) -> None:
        """While resting, what we have is averaged as soon as can be, and `step(0)` says `wait`; states are held, and handed to others."""
        self.paused = resting
        if not resting:
            self._pace.pause()

    def leave(self, *, hurry: bool) -> SyncReport:
        """Ask the swarm to average what we have now; while the report says `wait`, call it again. It ends after LEAVE_SECONDS.

        Not in a hurry, it also waits for the run's last state, which the others may have made without us, and for those who fetch it
        from us: for LAST_STATE_SECONDS after the last sign of either, and MOST_LAST_STATE_SECONDS in all.
        """
        now = self._clock()
        if self._leaving is None:
            takes_part = self._swarm is _Swarm.JOINED
            has_work = takes_part and bool(self._work.waiting_samples or self._work.included)
            self._leaving = _Leaving.from_now(now, has_work=has_work, has_end=takes_part and self._end.total > 0)
            if has_work:
                self._send(Leave())
        if hurry:
            self._leaving.end_until = 0.0
        elif self.seen.get("phase") in (CATCHING_UP, DONE) or self._others_can_end_it():
            self._leaving.sign_of_the_end(now)
        if self._must_wait():
            self._exchange(POLL_SECONDS)
        report = self._report()
        if not (report.wait or report.done or hurry) and self._leaving.end_until and self.samples < self._end.total:
            said = "this peer ends with %d of the run's %d samples; if the others went on, dd-export gets their newest state"
            log.warning(said, self.samples, self._end.total)
        return report

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self._work.state.digest, "round": self.round, "samples": self.samples, "contributions": self._work.numbers()}

    def load_state_dict(self, state: Mapping[str, Any]) -> SyncReport:
        """The swarm's states are on disk beside the checkpoint, and the swarm's word counts more: its parameters come with the first rebase.

        What was trained beyond a state is gone with the process that did it. Whether a contribution of that one came into a state, the
        members of its round say, and the ledger withdraws it once a later one of ours has come into one.
        """
        self._work.give_up()
        return SyncReport(final=tuple(state["contributions"]), dropped=(OPEN,))

    def close(self, reason: str = "") -> None:
        """End the sidecar, hearing what it still has to say; kill what does not end by itself. reason: what failed, for the others to read."""
        self._sidecar.close(reason)

    # ---------------------------------------------------------------- reports

    def _report(self) -> SyncReport:
        if self._leaving is not None and not self._must_wait():
            self._end_on_the_state()
        news, self._news = self._news, _News()
        return news.report(wait=self._must_wait(), done=self._swarm is _Swarm.OVER)

    def _end_on_the_state(self) -> None:
        if self._work.waiting_samples or self._work.included:
            # What is in no state once the sidecar has ended never will be: nobody is there to offer it.
            self.close()
        if self._work.waiting_samples or self.round:
            # Exported is what all hold to the bit, without what the codec left over in our parameters.
            self._news.dropped += self._work.give_up()

    def _must_wait(self) -> bool:
        if self._swarm is _Swarm.OVER:
            return False
        work = self._work
        if self._leaving is not None:
            now = self._clock()
            return (bool(work.waiting_samples or work.included) and now < self._leaving.work_until) or now < self._leaving.end_until
        full = work.waiting_samples + self._pace.step_samples > 2 * self._context.run.target_batch_size
        return self._swarm is not _Swarm.JOINED or self.paused or full or (work.frozen is not None and not self._trains_on())

    def _others_can_end_it(self) -> bool:
        """Whether samples enough for the last round wait on our state: somebody is about to average them."""
        return 0 < self.seen.get("round_target", 0) <= self.seen.get("round_waiting", 0)

    def _trains_on(self) -> bool:
        """Whether to train while a contribution is on its way: what a strategy could not move onto the next anchor would be in vain."""
        return (self._context.peer.overlap or self._may_train) and self._strategy.steps_locally

    def _count(self, samples: int, loss: float | None) -> None:
        self._pace.stepped(samples)
        if samples > 2 * self._context.run.target_batch_size:
            raise UserError(
                f"One local step takes {samples} samples, but the swarm's round has {self._context.run.target_batch_size}.",
                fix="Lower --train_batch_size or --gradient_accumulation_steps, or found a run with a larger --target_batch_size.",
            )
        self._work.open_samples += samples
        if loss is not None:
            self._loss = loss

    # ---------------------------------------------------------------- what we say

    def _exchange(self, seconds: float) -> None:
        """Tell our progress, offer what is frozen, and hear every message that is there; wait up to `seconds` for the first."""
        if self._sidecar.ended:
            return
        try:
            self._tell()
            for message in self._sidecar.messages(seconds):
                self._hear(message)
                if isinstance(message, Rebase):
                    self._tell()
        except PortClosed:
            self._restart()

    def _tell(self) -> None:
        if not self._sidecar.has_room():  # not a reason to hang with it
            return
        frozen = self._work.frozen
        if frozen is not None and not self._offered and self._news.frozen is None:
            self._sidecar.send(Offer(frozen.number, frozen.samples, self._work.state.digest, frozen.encoded, frozen.receipt))
            self._offered = True
        if self._end.extension != self._told_extension:
            self._sidecar.send(Extend(dict(self._end.extension)))
            self._told_extension = self._end.extension
        known = self._members.bans
        if known.version != self._told_bans:
            self._told_bans = known.version
            self._sidecar.send(Banned(bans.said(known.words)))
        if (own := self._members.own) != self._told_membership:
            self._told_membership = own
            self._sidecar.send(Admitted(members.said(own)))
        progress, now = self._progress(), self._clock()
        if progress != self._told[0] or now - self._told[1] >= TELL_SECONDS:
            self._sidecar.send(progress)
            self._told = progress, now

    def _progress(self) -> Progress:
        pace = self._pace
        return Progress(
            self._work.waiting_samples, pace.samples_per_second, pace.step_seconds, pace.share_lost, self._loss,
            waits=self._must_wait(), paused=self.paused, stands_on=self._work.state.digest,
            validation_loss=self._validation[0], validation_round=self._validation[1],
        )  # fmt: skip

    def _send(self, message: Message) -> None:
        try:
            self._sidecar.send(message)
        except PortClosed:
            self._restart()

    def _restart(self) -> None:
        """The new one does not know of our frozen contribution: it is offered again once we are rebased onto what the swarm has now."""
        self._sidecar.restart()
        self._offered, self._told = False, (None, 0.0)
        if self._swarm is _Swarm.JOINED:
            self._swarm = _Swarm.LOST

    # ---------------------------------------------------------------- what we hear

    def _hear(self, message: Message) -> None:
        match message:
            case Ready(peer_id, maddrs):
                self._peer_id = peer_id
                for maddr in maddrs:
                    log.info("others can join with --peers %s", maddr)
            case Seen(values):
                self.seen = values
            case News(text):
                log.info("%s", text)
            case Failed():
                raise message.error
            case Train():
                self._may_train = True
                self._pace.pause()
            case Freeze():
                self._freeze()
            case Rebase():
                self._rebase(message)
            case Final():
                self._news.final_rounds.append(message.committed_round)
                self._work.final(message.digest, message.round)
                self._news.final += self._work.take_done()
            case Proven(accusations):
                self._news.proven += ACCUSATIONS.validate_python(accusations)
            case Extended(extension):
                self._end.extend(extension)
                self._told_extension = self._end.extension
            case Done():
                self._swarm = _Swarm.OVER
                self._news.dropped += self._work.give_up()

    def _freeze(self) -> None:
        if self._sidecar.closing or self._work.frozen is not None:
            self._offered = False  # it does not know: tell it once more
            return
        if self._work.open_samples == 0:
            return self._sidecar.send(Nothing())
        try:
            self._news.frozen = self._work.freeze(self._next_number()).number
            self._may_train = self._offered = False
            failpoints.reached_in_trainer("frozen")
        except NotFinite:
            log.warning("the parameters are not finite any more; going back to the swarm's state")
            self._news.dropped.append(OPEN)
            self._sidecar.send(Nothing())

    def _next_number(self) -> int:
        """One more than any this identity ever used; on disk before it is used."""
        path = self._folder / NUMBER_FILE
        with contextlib.suppress(OSError, ValueError):
            self._number = max(self._number, int(path.read_text()))
        self._number = max(self._number, self._work.state.header.included.get(self._peer_id, 0)) + 1
        try:
            files.replace(path, str(self._number).encode())
        except OSError as error:
            raise UserError(f"Cannot write {path}: {error.strerror}.", fix="Free some space.", code=ExitCode.DISK) from None
        return self._number

    def _rebase(self, message: Rebase) -> None:
        header = read_header(message.header)
        self._news.dropped += self._work.rebase(Anchor(message.digest, header, message.state), header.included.get(self._peer_id, 0))
        self._news.final += self._work.take_done()
        if self._swarm is _Swarm.JOINED:
            self._pace.rebased()
        self._swarm, self._may_train, self._offered = _Swarm.JOINED, False, False
        self._min_peers = 1  # who leaves later stops nobody, also not a sidecar that was started again
        failpoints.reached_in_trainer("rebased")
        self._pace.pause()

    # ---------------------------------------------------------------- a sidecar's first message

    def _opening(self) -> Start:
        context, peer, state = self._context, self._context.peer, self._work.state
        last = context.last_known or {}
        return Start(
            state=state.buffer,
            header=state.header.to_json(),
            run=context.run.to_mapping(),
            sizes=[self._schema.big_size, self._schema.size - self._schema.big_size],
            strategy=self._strategy_path,
            folder=str(self._folder),
            state_on=peer.state_on,
            peers=list(context.initial_peers),
            has_joined=context.known or self._swarm is not _Swarm.UNKNOWN,
            host_maddrs=list(peer.host_maddrs),
            announce_maddrs=list(peer.announce_maddrs),
            identity_path=str(peer.identity_file),
            client_mode=peer.client_mode,
            server_url=context.server_url,
            last_known={"digest": last["digest"], "samples": last["samples"]} if last else None,
            last_holders=list(last.get("peers", ())),
            min_peers=self._min_peers,
            host_key=self._end.host_key,
            extension=self._end.extension,
            bans=bans.said(self._members.bans.words),
            membership=members.said(self._members.own),
            max_upload_mbit=peer.max_upload_mbit,
            peer_name=peer.peer_name,
            hardware=self._hardware,
            name=peer.output_dir.rstrip("/").split("/")[-1],
            debug=peer.debug,
            log_format=peer.log_format,
        )


@dataclass
class _Leaving:
    """Until when a trainer that leaves waits, by the clock: for its work to come into a state, and for the run's last state."""

    work_until: float
    end_until: float
    end_at_most: float

    @classmethod
    def from_now(cls, now: float, *, has_work: bool, has_end: bool) -> "_Leaving":
        return cls(
            now + LEAVE_SECONDS if has_work else 0.0, now + LAST_STATE_SECONDS if has_end else 0.0, now + MOST_LAST_STATE_SECONDS
        )

    def sign_of_the_end(self, now: float) -> None:
        """The last state is on its way here, or from here to others."""
        if self.end_until:
            self.end_until = min(now + LAST_STATE_SECONDS, self.end_at_most)


class _News:
    def __init__(self) -> None:
        self.frozen: int | None = None
        self.final: list[int] = []
        self.dropped: list[int] = []
        self.final_rounds: list[CommittedRound] = []
        self.proven: list[Accusation] = []

    def report(self, *, wait: bool, done: bool) -> SyncReport:
        if self.frozen in self.dropped:  # lost before its number was told: to whoever keeps the books, its samples are still open ones
            self.dropped[self.dropped.index(self.frozen)], self.frozen = OPEN, None
        return SyncReport(
            frozen=self.frozen,
            final=tuple(self.final),
            dropped=tuple(self.dropped),
            final_rounds=tuple(self.final_rounds),
            proven=tuple(self.proven),
            wait=wait,
            done=done,
        )
