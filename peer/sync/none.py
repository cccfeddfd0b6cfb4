"""`--sync none`: one machine alone. Every `target_batch_size` samples count as committed at once; nothing listens."""

from collections.abc import Mapping
from typing import Any

from peer.contracts import SyncContext, SyncReport
from swarm.errors import UserError
from swarm.run_config import RunConfig


def build(context: SyncContext) -> "NoSync":
    if context.peer.overlap:
        raise UserError("--overlap has nothing to overlap with: --sync none averages nothing.", fix="Remove --overlap, or join a swarm.")
    return NoSync(context.run)


class NoSync:
    """A swarm of one that never averages, so that schedules, checkpoints and acknowledgements work as in a real one."""

    peers = 1

    def __init__(self, run: RunConfig):
        self.target, self.total = run.target_batch_size, run.total_samples
        self.round = self.samples = 0
        self._waiting = 0
        self._number = 0
        self._frozen: int | None = None

    @property
    def _done(self) -> bool:
        return bool(self.total) and self.samples >= self.total

    def catch_up(self) -> SyncReport:
        """Done at once where the run that is resumed has ended: not one step more."""
        return SyncReport(done=self._done)

    def before_step(self) -> bool:
        return True

    def step(self, samples: int, loss: float | None = None) -> SyncReport:
        self._waiting += samples
        if self._frozen is not None:
            return self._commit(self._frozen)
        enough = self._waiting >= self.target or (self.total and self.samples + self._waiting >= self.total)
        if not (enough and self._waiting):
            return SyncReport(done=self._done)
        self._number += 1
        self._frozen = self._number
        return SyncReport(frozen=self._number, wait=True)

    def _commit(self, number: int) -> SyncReport:
        self.round, self.samples = self.round + 1, self.samples + self._waiting
        self._waiting, self._frozen = 0, None
        return SyncReport(final=(number,), done=self._done)

    def registered(self, number: int, receipt: str) -> None:
        """There is nobody to show it to."""

    def withdraw(self, number: int) -> SyncReport:
        """Nobody else's state can count these samples twice, so the work stays; the next step commits it."""
        return SyncReport(wait=True)

    def undo(self) -> SyncReport:
        """Alone nobody knows what was before: what was stepped stays, as `withdraw` leaves it."""
        return SyncReport()

    def rest(self, resting: bool) -> None:
        """There is nobody to offer anything to."""

    def measured(self, loss: float) -> None:
        """There is nobody to be told."""

    def leave(self, *, hurry: bool) -> SyncReport:
        """The samples waiting are done: their work is in the checkpoint that follows.

        They go on waiting for the round to fill, so that a resumed run closes its rounds, which set the learning rate,
        where an uninterrupted one does.
        """
        if not self._waiting:
            return SyncReport()
        self._number += 1
        return SyncReport(frozen=self._number, final=(self._number,))

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.round, "samples": self.samples, "waiting": self._waiting, "number": self._number}

    def load_state_dict(self, state: Mapping[str, Any]) -> SyncReport:
        """All work is in the parameters, which the checkpoint has: none is lost."""
        self.round, self.samples = state["round"], state["samples"]
        self._waiting, self._number = state["waiting"], state["number"]
        return SyncReport()

    def close(self, reason: str = "") -> None:
        pass
