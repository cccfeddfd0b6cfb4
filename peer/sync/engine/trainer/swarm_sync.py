"""The trainer's side of a swarm: freezes contributions, lands states, and tells its sidecar of both.

Implements `contracts.Sync` for every strategy that averages; what differs between them is an `outer.Strategy`.
"""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from peer.contracts import Member, Settlement, SyncContext, SyncReport
from peer.machine.device import describe_hardware
from peer.sync.engine import points
from peer.sync.engine.codec import Wire
from peer.sync.engine.memory import available_bytes, check_memory, host_bytes
from peer.sync.engine.outer import load_strategy
from peer.sync.engine.round.plausible import NUMBER_FILE
from peer.sync.engine.state import Header, first_state
from peer.sync.engine.trainer.local_work import OPEN, Frozen, Landing, LocalWork, NotFinite
from peer.sync.engine.trainer.port import PortClosed
from peer.sync.engine.trainer.sidecar_process import Processes, SidecarProcess
from peer.sync.engine.transfer.discarded import discard
from peer.sync.engine.vectors import Schema, SharedBuffer, flatten
from swarm import advice, files
from swarm.end import End
from swarm.errors import ExitCode, UserError
from swarm.records import CATCHING_UP, DONE

log = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0
LAST_STATE_SECONDS, MOST_LAST_STATE_SECONDS = 15.0, 330.0
POLL_SECONDS = 0.5
_RATE_MEMORY = 0.9


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
        check_memory(host_bytes(self._strategy, wire, params_on_host=on_host), available_bytes())
        self._folder = context.output_dir
        self._folder.mkdir(parents=True, exist_ok=True)
        discard(self._folder / "state", context.peer.discard_state)
        base = first_state(
            context.run.digest, self._schema.digest, flatten(context.params, torch.empty(self._schema.size)), self._strategy.slots
        )
        start = Landing(base.digest, base.header, base.buffer)
        self._work = LocalWork(context.params, start, self._strategy, wire)
        self._offered = False
        """Whether the sidecar knows that the frozen contribution stands on our state."""
        self._batch_samples = self._number = 0
        self._news = _News()
        self._joined = self._has_landed = self._done = self._may_train = self._leaving = self._closing = False
        self._peer_id, self._min_peers = "", context.peer.min_peers
        self._end = context.end or End(context.run)
        self._told_extension = self._end.extension
        self.seen: Mapping[str, Any] = {}
        """What the sidecar last said of the swarm, by the names in `peer.figures.metrics.METRICS`; never changed in place."""
        self.paused = False
        """Set while this peer's owner has paused it: the others see it."""
        self._hardware = describe_hardware(next(iter(context.params.values())).device)
        self._rate, self._step_seconds, self._last_step, self._loss = 0.0, 0.0, 0.0, None
        self._lost = _Lost()
        self._sidecar = SidecarProcess(self._opening, self._handle, processes)

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
        began = self._clock()
        self._exchange(POLL_SECONDS if self._must_wait() else 0)
        self._lost.seconds += self._clock() - began
        return self._report()

    def withdraw(self, number: int) -> SyncReport:
        """The contribution just frozen may not be offered: take its work out of the parameters."""
        assert self._work.frozen is not None and self._work.frozen.number == number and not self._offered
        self._work.withdraw()
        self._send("nothing")
        return self._report()

    def rest(self, resting: bool) -> None:
        """While resting, what we have is averaged as soon as can be, and `step(0)` says `wait`; states are held, and handed to others."""
        self.paused = resting
        if not resting:
            self._last_step = 0.0

    def leave(self, *, hurry: bool) -> SyncReport:
        """Ask the swarm to average what we have now; while the report says `wait`, call it again. It ends after LEAVE_SECONDS.

        Not in a hurry, it also waits for the run's last state, which the others may have made without us, and for those who fetch it
        from us: for LAST_STATE_SECONDS after the last sign of either, and MOST_LAST_STATE_SECONDS in all.
        """
        now = self._clock()
        if not self._leaving:
            self._leaving, takes_part = True, self._joined and not self._done
            has_work = takes_part and (self._work.waiting_samples or self._work.included)
            self._leave_until = now + LEAVE_SECONDS if has_work else 0.0
            self._end_until = now + LAST_STATE_SECONDS if takes_part and self._end.total else 0.0
            self._end_at_most = now + MOST_LAST_STATE_SECONDS
            if has_work:
                self._send("leave")
        if self._end_until and self.seen.get("phase") in (CATCHING_UP, DONE):
            self._end_until = min(now + LAST_STATE_SECONDS, self._end_at_most)
        if hurry:
            self._end_until = 0.0
        if self._must_wait():
            self._exchange(POLL_SECONDS)
        return self._report()

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self._work.state.digest, "round": self.round, "samples": self.samples, "contributions": self._work.numbers()}

    def load_state_dict(self, state: Mapping[str, Any]) -> SyncReport:
        """The swarm's states are on disk beside the checkpoint, and the swarm's word counts more: its parameters come with the first landing.

        What was trained beyond a state is gone with the process that did it. Whether a contribution of that one came into a state, the
        members of its round say, and the ledger withdraws it once a later one of ours has come into one.
        """
        self._work.give_up()
        return SyncReport(settled=tuple(state["contributions"]), dropped=(OPEN,))

    def close(self, reason: str = "") -> None:
        """End the sidecar, hearing what it still has to say; kill what does not end by itself. reason: what failed, for the others to read."""
        self._closing = True
        self._sidecar.close(reason)

    # ---------------------------------------------------------------- reports

    def _report(self) -> SyncReport:
        if self._leaving and not self._must_wait():
            self._end_on_the_state()
        news, self._news = self._news, _News()
        return news.report(wait=self._must_wait(), done=self._done)

    def _end_on_the_state(self) -> None:
        if self._work.waiting_samples or self._work.included:
            # What is in no state once the sidecar has ended never will be: nobody is there to offer it.
            self.close()
        if self._work.waiting_samples or self.round:
            # Exported is what all hold to the bit, without what the codec left over in our parameters.
            self._news.dropped += self._work.give_up()

    def _must_wait(self) -> bool:
        if self._done:
            return False
        work = self._work
        if self._leaving:
            now = self._clock()
            return (bool(work.waiting_samples or work.included) and now < self._leave_until) or now < self._end_until
        full = work.waiting_samples + self._batch_samples > 2 * self._context.run.target_batch_size
        return not self._joined or self.paused or full or (work.frozen is not None and not self._trains_on())

    def _trains_on(self) -> bool:
        """Whether to train while a contribution is on its way: what a strategy could not move onto the next anchor would be in vain."""
        return (self._context.peer.overlap or self._may_train) and self._strategy.steps_locally

    def _count(self, samples: int, loss: float | None) -> None:
        now = self._clock()
        if self._last_step and now > self._last_step:
            seconds = now - self._last_step
            memory = _RATE_MEMORY if self._rate else 0.0
            self._rate = memory * self._rate + (1 - memory) * samples / seconds
            self._step_seconds = memory * self._step_seconds + (1 - memory) * seconds
        self._last_step = now
        if samples > 2 * self._context.run.target_batch_size:
            raise UserError(
                f"One local step takes {samples} samples, but the swarm's round has {self._context.run.target_batch_size}.",
                fix="Lower --train_batch_size or --gradient_accumulation_steps, or found a run with a larger --target_batch_size.",
            )
        self._work.open_samples += samples
        self._batch_samples = max(self._batch_samples, samples)
        if loss is not None:
            self._loss = loss

    # ---------------------------------------------------------------- talking to the sidecar

    def _exchange(self, seconds: float) -> None:
        """Tell our progress, offer what is frozen, and handle every message that is there; wait up to `seconds` for the first."""
        if self._sidecar.ended:
            return
        try:
            self._tell()
            for message in self._sidecar.messages(seconds):
                self._handle(*message)
                if message[0] == "landed":
                    self._tell()
        except PortClosed:
            self._restart()

    def _handle(self, kind: str, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        getattr(self, f"_on_{kind}")(values, buffers)

    def _tell(self) -> None:
        if not self._sidecar.has_room():  # not a reason to hang with it
            return
        if self._work.frozen is not None and not self._offered and self._news.frozen is None:
            self._send_offer(self._work.frozen)
        if self._end.extension != self._told_extension:
            self._sidecar.send("extend", extension=self._end.extension)
            self._told_extension = self._end.extension
        self._tell_progress()

    def _send(self, kind: str, *buffers: SharedBuffer, **values: Any) -> None:
        try:
            self._sidecar.send(kind, *buffers, **values)
        except PortClosed:
            self._restart()

    def _tell_progress(self) -> None:
        figures = {
            "samples_per_second": self._rate,
            "step_seconds": self._step_seconds,
            "share_lost": self._lost.share,
            "loss": self._loss,
            "waits": self._must_wait(),
            "paused": self.paused,
        }
        self._sidecar.send("progress", waiting=self._work.waiting_samples, landed=self._work.state.digest, **figures)

    def _send_offer(self, frozen: Frozen) -> None:
        self._sidecar.send("offer", frozen.encoded, number=frozen.number, samples=frozen.samples, parent=self._work.state.digest)
        self._offered = True

    def _on_ready(self, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        self._peer_id = values["peer_id"]
        for maddr in values["maddrs"]:
            log.info("others can join with --peers %s", maddr)

    def _on_seen(self, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        self.seen = values["seen"]

    def _on_news(self, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        log.info("%s", values["text"])

    def _on_failed(self, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        raise UserError(values["message"], fix=values["fix"], code=ExitCode(values["code"]))

    def _on_train(self, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        self._may_train = True
        self._last_step = 0.0

    def _on_done(self, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        self._done = True
        self._news.dropped += self._work.give_up()

    def _on_extended(self, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        self._end.extend(values["extension"])
        self._told_extension = self._end.extension

    def _on_settled(self, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        s = values["settlement"]
        members = tuple(Member(*member) for member in s["members"])
        self._news.settlements.append(Settlement(s["digest"], s["parent"], s["round"], s["samples"], members))
        self._work.settle(s["digest"], s["round"])
        self._news.settled += self._work.take_done()

    # ---------------------------------------------------------------- freezing and landing

    def _on_freeze(self, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        if self._closing or self._work.frozen is not None:
            self._offered = False  # it does not know: tell it once more
            return
        if self._work.open_samples == 0:
            return self._sidecar.send("nothing")
        try:
            self._news.frozen = self._work.freeze(self._next_number()).number
            self._may_train = self._offered = False
            points.reached_in_trainer("frozen")
        except NotFinite:
            log.warning("the parameters are not finite any more; going back to the swarm's state")
            self._news.dropped.append(OPEN)
            self._sidecar.send("nothing")

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

    def _on_landed(self, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        header = Header.from_json(values["header"])
        landing = Landing(values["digest"], header, buffers[0])
        self._news.dropped += self._work.land(landing, header.included.get(self._peer_id, 0))
        self._news.settled += self._work.take_done()
        if self._joined:
            self._lost.landed(self._clock())
        self._joined, self._may_train, self._offered = True, False, False
        self._has_landed = True
        self._min_peers = 1  # who leaves later stops nobody, also not a sidecar that was started again
        points.reached_in_trainer("landed")
        self._last_step = 0.0

    # ---------------------------------------------------------------- the sidecar's life

    def _opening(self) -> tuple[SharedBuffer, dict[str, Any]]:
        """What a new sidecar begins with: the state that `params` last landed on, and who we are."""
        context, state = self._context, self._work.state
        last = context.last_known or {}
        return state.buffer, {
            "run": context.run.to_mapping(),
            "header": state.header.to_json(),
            "sizes": [self._schema.big_size, self._schema.size - self._schema.big_size],
            "strategy": self._strategy_path,
            "folder": str(self._folder),
            "peers": list(context.initial_peers),
            "has_landed": self._has_landed,
            "host_maddrs": list(context.peer.host_maddrs),
            "announce_maddrs": list(context.peer.announce_maddrs),
            "identity_path": str(context.peer.identity_file),
            "client_mode": context.peer.client_mode,
            "server_url": context.server_url,
            "last_known": {"digest": last["digest"], "samples": last["samples"]} if last else None,
            "last_holders": list(last.get("peers", ())),
            "min_peers": self._min_peers,
            "host_key": self._end.host_key,
            "extension": self._end.extension,
            "max_upload_mbit": context.peer.max_upload_mbit,
            "peer_name": context.peer.peer_name,
            "hardware": self._hardware,
            "name": context.peer.output_dir.rstrip("/").split("/")[-1],
            "debug": context.peer.debug,
            "log_format": context.peer.log_format,
        }

    def _restart(self) -> None:
        """The new one does not know of our frozen contribution: it is offered again once we have landed on what the swarm has now."""
        self._sidecar.restart()
        self._offered = self._joined = False


class _Lost:
    """The share of its time that a trainer spends on rounds, from one landing to the next; the last three weigh most."""

    def __init__(self) -> None:
        self.share = self.seconds = 0.0
        self._began: float | None = None

    def landed(self, now: float) -> None:
        if self._began is not None and now > self._began:
            share = min(self.seconds / (now - self._began), 1.0)
            self.share = 0.7 * self.share + 0.3 * share if self.share else share
        self._began, self.seconds = now, 0.0


class _News:
    def __init__(self) -> None:
        self.frozen: int | None = None
        self.settled: list[int] = []
        self.dropped: list[int] = []
        self.settlements: list[Settlement] = []

    def report(self, *, wait: bool, done: bool) -> SyncReport:
        if self.frozen in self.dropped:  # lost before its number was told: to whoever keeps the books, its samples are still open ones
            self.dropped[self.dropped.index(self.frozen)], self.frozen = OPEN, None
        return SyncReport(
            frozen=self.frozen,
            settled=tuple(self.settled),
            dropped=tuple(self.dropped),
            settlements=tuple(self.settlements),
            wait=wait,
            done=done,
        )
