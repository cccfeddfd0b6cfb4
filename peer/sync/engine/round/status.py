"""What the others, and this peer's owner, see of it: its signed record, the run's record, and the figures of its rounds."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from peer.sync.engine.cell import Cell, Phase
from peer.sync.engine.net.neighbours import Neighbours
from peer.sync.engine.round import span
from peer.sync.engine.round.catch_up import CatchUp
from peer.sync.engine.round.heads import Heads
from peer.sync.engine.round.reduction import Traffic
from peer.sync.engine.round.rounds import Round
from peer.sync.engine.state import State
from peer.sync.engine.trainer.trainer import Trainer
from swarm import advice
from swarm.dht import SwarmNode
from swarm.end import End
from swarm.members import Members
from swarm.records import (
    ASSIST,
    AVERAGING,
    BANS_PER_RECORD,
    CATCHING_UP,
    DONE,
    FINDINGS_PER_RECORD,
    JOINING,
    LEAVING,
    MAX_NOTE,
    PAUSED,
    TRAIN,
    Finding,
    PeerRecord,
    RunRecord,
    words,
)
from swarm.run_config import RunConfig

_MAX_MADDRS = 6


def seen_as(phase: Phase, *, assists: bool, paused: bool) -> str:
    """What our record calls the phase; paused: by this machine's owner."""
    if phase is Phase.LEFT:
        return LEAVING
    if assists:
        return ASSIST
    if phase is Phase.TRAIN:
        return PAUSED if paused else TRAIN
    return {Phase.JOIN: JOINING, Phase.FETCH: CATCHING_UP, Phase.DONE: DONE}.get(phase, AVERAGING)


class Status:
    def __init__(
        self,
        run: RunConfig,
        node: SwarmNode,
        neighbours: Neighbours,
        end: End,
        members: Members,
        state: Cell[State],
        phase: Cell[Phase],
        trainer: Trainer,
        heads: Heads,
        catch_up: CatchUp,
        *,
        assists: bool = False,
        name: str = "",
        hardware: str = "",
        server_url: str = "",
        wall: Callable[[], float] = time.time,
        seal: Callable[[], str] = lambda: "",
        findings: Callable[[], Sequence[Finding]] = tuple,
    ):
        """seal: of the state that we stand on (certificates.py); findings: what an auditor found, the most important first."""
        self._seal, self._findings = seal, findings
        self._run_mapping = run.to_mapping()
        self._run, self._node, self._neighbours, self._end, self._members, self._wall = run, node, neighbours, end, members, wall
        self._state, self._phase, self._trainer, self._heads, self._catch_up = state, phase, trainer, heads, catch_up
        self._assists, self._name, self._hardware, self._server_url = assists, name, hardware, server_url
        self.note = ""
        """What last kept this peer from going on, for people to read."""
        self._group_size = self._averaged = 0
        self._traffic = Traffic()
        """Of the last averaged round."""
        self._moved = (0, 0)
        """Bytes up and down in those before it."""

    def had(self, done: Round) -> bool:
        """Count a round. Returns whether advice is due: after the first averaged one, the second, the fourth, the eighth...

        At first it is news, later it changes seldom.
        """
        self._group_size = len(done.group.members)
        if done.how != "averaged":
            return False
        self._moved = (self._moved[0] + self._traffic.up, self._moved[1] + self._traffic.down)
        self._traffic = done.mean.traffic
        self._averaged += 1
        return self._averaged.bit_count() == 1

    @property
    def rate(self) -> float:
        """Samples per second that we train."""
        return self._trainer.progress.samples_per_second

    @property
    def step_seconds(self) -> float:
        return self._trainer.progress.step_seconds

    def advice(self) -> str:
        progress = self._trainer.progress
        rate = progress.samples_per_second + sum([record.samples_per_second for record in self._neighbours.others()])
        traffic = advice.Traffic(self._traffic.up, self._traffic.down)
        return advice.measured(traffic, self._traffic.seconds, rate, progress.share_lost)

    def training(self) -> int:
        """Live peers that train, this one included."""
        return sum([record.phase != ASSIST for record in self._neighbours.others()]) + (not self._assists)

    def _said(self) -> str:
        waits = self._phase.value in (Phase.JOIN, Phase.FETCH)
        return (self._catch_up.words if waits else "") or self.note or self._catch_up.trouble

    def _note(self) -> str:
        return words(said, MAX_NOTE) if (said := self._said()) else ""

    def _phase_as_seen(self) -> str:
        return seen_as(self._phase.value, assists=self._assists, paused=self._trainer.progress.paused)

    def _waiting_samples(self) -> int:
        return min(self._trainer.progress.waiting, 2 * self._run.target_batch_size)

    def _samples_per_second(self) -> float:
        progress = self._trainer.progress
        return progress.samples_per_second if self._phase.value is Phase.TRAIN and not progress.waits else 0.0

    def record(self, maddrs: tuple[str, ...] = ()) -> PeerRecord:
        state, progress = self._state.value, self._trainer.progress
        header = state.header
        return PeerRecord(
            peer_id=self._node.peer_id,
            config=self._run.digest,
            schema=header.schema,
            round=header.round,
            samples=header.samples,
            digest=state.digest,
            parents=header.parents,
            backers=self._heads.backers(),
            waiting_samples=self._waiting_samples(),
            samples_per_second=self._samples_per_second(),
            loss=progress.loss,
            validation_loss=progress.validation_loss,
            validation_round=progress.validation_round,
            phase=self._phase_as_seen(),
            name=self._name,
            hardware=self._hardware,
            note=self._note(),
            group_size=self._group_size,
            sent_bytes=self._traffic.up,
            received_bytes=self._traffic.down,
            transfer_seconds=self._traffic.seconds,
            share_lost=progress.share_lost,
            client_mode=self._node.client_mode,
            maddrs=maddrs[:_MAX_MADDRS],
            time=self._wall(),
            bans=self._members.bans.some(BANS_PER_RECORD),
            membership=self._members.own,
            seal=self._seal(),
            findings=tuple(self._findings()[:FINDINGS_PER_RECORD]),
        )

    def seen(self) -> dict[str, Any]:
        """For this peer's owner: what it does, and the figures of the swarm by the names that `peer.figures.metrics.METRICS` has."""
        state, others, traffic = self._state.value, self._neighbours.others(), self._traffic
        return {
            "phase": self._phase_as_seen(),
            "note": self._note(),
            "round": state.header.round,
            "committed": state.header.samples,
            "peers": len(state.header.members),
            "live_peers": self.training(),
            "swarm_samples_per_second": self._samples_per_second() + sum([other.samples_per_second for other in others]),
            "round_waiting": self._waiting_samples() + sum([other.waiting_samples for other in others if other.digest == state.digest]),
            "round_target": span.round_samples(self._run, self._end, state.header),
            "sent_bytes": self._moved[0] + traffic.up,
            "received_bytes": self._moved[1] + traffic.down,
            "round_sent_bytes": traffic.up,
            "round_received_bytes": traffic.down,
            "transfer_seconds": traffic.seconds,
            "share_lost": self._trainer.progress.share_lost,
        }

    def run_record(self) -> RunRecord:
        state = self._state.value
        header = state.header
        head = {"digest": state.digest, "round": header.round, "samples": header.samples, "peers": [self._node.peer_id]}
        return RunRecord(
            run_id=self._run.run_id,
            run=self._run_mapping,
            server_url=self._server_url,
            head=head if header.round else None,
            extension=self._end.extension,
        )
