"""Samples for a simulated trainer: the product's own client of the dataset server, and what became of each sample that it gave.

Its thread is a task of the world's loop, and where it would wait for that the lock-step thread blocks.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.contracts import CommittedRound, Sample
from peer.data.dataset_server import DatasetServer
from simulation.server import URL, Session, SimKey
from swarm.bans import Bans
from swarm.end import End
from swarm.wrong_states import Accusation

if TYPE_CHECKING:
    from simulation.machine import Machine

_PATIENCE_SECONDS = 1.0
"""As in peer/samples/feed.py: then who waits for samples turns to the swarm."""


class Leaving(BaseException):
    """Raised where the trainer waits for a sample when it is told to leave, or its run is over."""


class Source:
    """As `contracts.Source`, as far as `Accounts` asks, of one boot of a machine. held: samples that it gave and that were not reported.

    turn: the trainer's, while it waits for a sample; whether the run is over. bans: to be told of the host's.
    """

    def __init__(self, machine: "Machine", end: End, bans: Bans, turn: Callable[[], bool]):
        self._machine, self.turn, self.held, self.drawn = machine, turn, set(), 0
        world, rng = machine.world, random.Random(machine.world.rng.getrandbits(64))
        self._server = DatasetServer(
            URL, world.run, bans=bans, key=SimKey(machine.peer), cache_dir=machine.disk.root() / "cache", cache_bytes=1 << 30,
            batch_samples=machine.batch, clock=world.loop.time, wall=machine.wall, rows=_rows,
            session=lambda: Session(world.server, machine), uniform=rng.uniform, background=Background(machine, self),
            end=end,
        )  # fmt: skip
        self._samples: Iterator[Sample] = iter(self._server)

    def draw(self, count: int) -> list[str]:
        """None when the trainer is told to leave meanwhile, or the run is over."""
        keys: list[str] = []
        try:
            while len(keys) < count:
                key = next(self._samples).key
                if key in self.held or key in keys:
                    self._machine.world.checks.breach(f"sample {key} was given twice", self._machine)
                keys.append(key)
        except (Leaving, StopIteration):
            self._server.give_back(keys)
            return []
        self.held.update(keys)
        self.drawn += count
        return keys

    def register(self, number: int, keys: Sequence[str]) -> str:
        self._machine.world.checks.ledger.registers(self._machine, number, keys)
        return self._server.register(number, keys)

    def report_final(self, committed_round: CommittedRound) -> None:
        self._server.report_final(committed_round)

    def report_proofs(self, accusations: Sequence[Accusation]) -> None:
        self._server.report_proofs(accusations)

    def acknowledge(self, keys: Sequence[str]) -> None:
        self._report(keys)
        self._server.acknowledge(keys)

    def give_back(self, keys: Sequence[str]) -> None:
        self._report(keys)
        self._server.give_back(keys)

    def close(self) -> None:
        self._server.close()

    def _report(self, keys: Sequence[str]) -> None:
        for key in keys:
            if key not in self.held:
                self._machine.world.checks.breach(f"sample {key} was reported twice", self._machine)
            self.held.discard(key)


def _rows(path: Path, samples: int) -> list[tuple[bytes, str]]:
    return [(b"", "")] * samples


class Background:
    """As `client.background.Background`."""

    def __init__(self, machine: "Machine", source: Source):
        self._machine, self._source, self._process, self._thread = machine, source, machine.trainer, machine.thread
        self._loop = machine.world.loop
        self._task: asyncio.Task | None = None
        self._starts = False

    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._starts = True

        def begin() -> None:
            self._task = self._process.spawn(main())

        self.call(begin)

    def call(self, func: Callable[[], object]) -> None:
        self._loop.call_soon(func, context=self._process.context.copy())

    def close(self) -> None:
        while self._starts and (self._task is None or not self._task.done()):
            self._thread.block(0.1)

    def condition(self) -> "Condition":
        return Condition(self._machine, self._source)

    def result(self, future: Future, seconds: float) -> Any:
        until = self._loop.time() + seconds
        waiting = [True]
        future.add_done_callback(lambda _: self._thread.wake() if waiting[0] else None)
        while not future.done() and (left := until - self._loop.time()) > 1e-9:
            self._thread.block(left)
        waiting[0] = False
        if not future.done():
            raise FutureTimeout
        return future.result(0)


class Condition:
    """As `threading.Condition`: loop and thread take turns, so nobody must be locked out."""

    def __init__(self, machine: "Machine", source: Source):
        self._machine, self._source, self._thread, self._waiting = machine, source, machine.thread, False

    def __enter__(self) -> "Condition":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self) -> None:
        """Until notified, or for a second: then it is the trainer's turn, and whoever waits looks whether there is something now."""
        if self._machine.leaves:
            raise Leaving
        self._waiting = True
        self._thread.block(_PATIENCE_SECONDS)
        notified, self._waiting = not self._waiting, False
        if self._machine.leaves or (not notified and self._source.turn()):
            raise Leaving

    def notify_all(self) -> None:
        if self._waiting:
            self._waiting = False
            self._thread.wake()
