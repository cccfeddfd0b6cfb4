"""Rank 0's strategy, as all ranks of the launch see it: the same answers and, whenever the swarm changed them, the same parameters."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from peer.contracts import Params, Sync, SyncReport
from peer.machine.device import RankGroup


class RankedSync:
    """A Sync whose every method is called by all ranks together; only rank 0 has the `inner` one and talks to the swarm."""

    def __init__(self, inner: Sync | None, group: RankGroup, params: Params, *, moves: bool = True):
        """moves: whether the strategy ever changes the parameters; alone, all ranks have the same ones anyway."""
        assert (inner is not None) == group.is_main
        self._moves = moves
        self._inner, self._group, self._params = inner, group, params
        self.round = self.samples = 0
        self.peers = 1
        self._mirror(lambda: SyncReport())

    def catch_up(self) -> SyncReport:
        report = self._mirror(lambda: self._inner.catch_up())
        self._group.broadcast_(list(self._params.values()))
        return report

    def before_step(self) -> bool:
        return self._group.broadcast_object(self._inner.before_step() if self._inner else None)

    def step(self, samples: int, loss: float | None = None) -> SyncReport:
        return self._mirror(lambda: self._inner.step(samples, loss))

    def registered(self, number: int, receipt: str) -> None:
        if self._inner:
            self._inner.registered(number, receipt)

    def withdraw(self, number: int) -> SyncReport:
        return self._mirror(lambda: self._inner.withdraw(number), moved=True)

    def undo(self) -> SyncReport:
        return self._mirror(lambda: self._inner.undo(), moved=True)

    def rest(self, resting: bool) -> None:
        if self._inner:
            self._inner.rest(resting)

    def measured(self, loss: float) -> None:
        if self._inner:
            self._inner.measured(loss)

    def leave(self, *, hurry: bool) -> SyncReport:
        return self._mirror(lambda: self._inner.leave(hurry=hurry))

    def _mirror(self, ask: Callable[[], SyncReport], *, moved: bool = False) -> SyncReport:
        """Rank 0 asks its strategy; all ranks take over the answer, its position and, unless nothing happened, the parameters.

        moved: the parameters are others now, though neither the answer nor the position may show it. To wait moves nothing: who waits asks
        twice a second, and the parameters of SDXL are 10 GB.
        """
        before, state = (self.round, self.samples), self.state_dict()
        told = None
        if self._inner:
            report = ask()
            moved = moved or replace(report, wait=False) != SyncReport() or self.state_dict() != state
            told = (report, moved, self._inner.round, self._inner.samples, self._inner.peers)
        report, moved, self.round, self.samples, self.peers = self._group.broadcast_object(told)
        if self._moves and (moved or (self.round, self.samples) != before):
            self._group.broadcast_(list(self._params.values()))
        return report

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict() if self._inner else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> SyncReport:
        return self._mirror(lambda: self._inner.load_state_dict(state))
