"""A peer whose compute is a sleep: real rounds, real sidecar, no model. What a benchmark of the swarm runs instead of a trainer.

    python -m benchmarks.sleeper --output_dir OUT --num_parameters 1000000 --samples_per_second 50 --target_batch_size 512 ...

Takes the run's and the peer's own options besides. Trains until the run ends or SIGTERM comes, then leaves in order. Writes
OUT/work.jsonl, one line per event with `time` (seconds since the epoch):

    {"event": "frozen", "number": n, "samples": samples in it}       the moment a contribution is closed
    {"event": "final" | "dropped", "number": n, "samples": ...}    what became of it (0: the samples not yet frozen)
    {"event": "round", "round": n, "samples": in the state}          the trainer stands on a new state
    {"event": "ended", "trained": samples}
"""

import argparse
import itertools
import json
import signal
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peer.config import PeerConfig
from peer.contracts import SyncContext, SyncReport
from peer.rooms import load_part
from swarm.errors import run_program
from swarm.logs import setup_logging
from swarm.options import build, parse_flags
from swarm.run_config import RunConfig

ROW, ROWS = 1024, 1024
"""Width of a toy tensor, and its most rows: 4 MiB, as in a UNet."""
MOVED = 4
MOVE = 1e-4
"""How far one step moves a parameter; nothing is learned, but codecs and outer steps get values of a likely size."""


class Sleeper:
    """One peer; several may live in threads of one process, if all are made in a thread that outlives them."""

    def __init__(self, run: RunConfig, peer: PeerConfig, *, num_parameters: int, samples_per_second: float):
        self._folder = Path(peer.output_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._batch, self._seconds = peer.train_batch_size, peer.train_batch_size / samples_per_second
        params = toy_params(num_parameters)
        context = SyncContext(run=run, peer=peer, params=params, output_dir=self._folder, initial_peers=peer.peers)
        self._params, self._target = list(params.values()), run.target_batch_size
        generator = torch.Generator().manual_seed(zlib.crc32(peer.output_dir.encode()))
        # One row for all rows of a tensor: values as varied as a codec's blocks need them, at no cost in memory.
        self._moves = [torch.randn(parameter.shape[-1], generator=generator) * MOVE for parameter in self._params]
        self._steps_locally = run.sync != "gradients"
        """As the strategy says; where the gradients themselves are averaged, all tensors need one."""
        self._turns = itertools.cycle(range(len(self._params)))
        self._open, self._contributions, self._round, self._trained = 0, {}, 0, 0
        self._log = (self._folder / "work.jsonl").open("a", encoding="utf-8", buffering=1)
        self.sync = load_part("sync", run.sync).build(context)

    def train(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """Until the run is over or `stopping()`; leaves in order."""
        try:
            report = self._follow(self.sync.catch_up())
            while not report.done and not stopping():
                while (report.wait or report.frozen is not None) and not stopping():
                    report = self._follow(self.sync.step(0))
                if report.done or stopping():
                    break
                self._step()
                report = self._follow(self.sync.step(self._batch, 1.0))
            report = self._follow(self.sync.leave(hurry=stopping()))
            while report.wait:
                report = self._follow(self.sync.leave(hurry=stopping()))
        finally:
            self.sync.close()
            self._say("ended", trained=self._trained)
            self._log.close()

    @torch.no_grad()
    def _step(self) -> None:
        """A few tensors move, by turns: a GPU moves them all, but would not take the memory bandwidth of all peers on this machine."""
        until = time.monotonic() + self._seconds
        moved = [next(self._turns) for _ in range(min(MOVED, len(self._params)))] if self._steps_locally else range(len(self._params))
        for index in moved:
            self._params[index].grad = self._moves[index].expand_as(self._params[index]).clone()
        self._steps_locally = self.sync.before_step()
        for index in moved if self._steps_locally else ():
            self._params[index].add_(self._params[index].grad)
            self._params[index].grad = None
        time.sleep(max(0.0, until - time.monotonic()))
        self._trained += self._batch
        self._open += self._batch

    def _follow(self, report: SyncReport) -> SyncReport:
        if report.frozen is not None:
            self._contributions[report.frozen], self._open = self._open, 0
            self._say("frozen", number=report.frozen, samples=self._contributions[report.frozen])
        for event, numbers in (("final", report.final), ("dropped", report.dropped)):
            for number in numbers:
                self._say(event, number=number, samples=self._take(number))
        if self.sync.round != self._round:
            self._round = self.sync.round
            self._say("round", round=self._round, samples=self.sync.samples)
        return report

    def _take(self, number: int) -> int:
        if number:
            return self._contributions.pop(number, 0)
        samples, self._open = self._open, 0
        return samples

    def _say(self, event: str, **values: Any) -> None:
        self._log.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")


def toy_params(count: int) -> dict[str, nn.Parameter]:
    """About `count` values: large tensors and a small one, as a model has; the same for every peer."""
    # In place: what a product left behind in the heap was at times three quarters of all values (benchmarks/memory.py saw it).
    generator = torch.Generator().manual_seed(0)
    rows = [min(ROWS, count // ROW - start) for start in range(0, count // ROW, ROWS)]
    params = {f"w{i}": nn.Parameter(torch.empty(size, ROW).normal_(0, 0.02, generator=generator)) for i, size in enumerate(rows)}
    return {**params, "b": nn.Parameter(torch.zeros(7))}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="sleeper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_parameters", type=int, default=100_000)
    parser.add_argument("--samples_per_second", type=float, default=50.0)
    run_flags, peer_flags, own = parse_flags(parser, argv, RunConfig, PeerConfig)
    torch.set_num_threads(1)
    run, peer = build(RunConfig, {"model": "sleeper", **run_flags}), build(PeerConfig, peer_flags)
    setup_logging(debug=peer.debug, name=Path(peer.output_dir).name)
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    Sleeper(run, peer, **own).train(lambda: bool(stopping))


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
