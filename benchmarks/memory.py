"""How much memory averaging takes, against what is counted before it starts; and whether it grows with the rounds.

    .venv/bin/python benchmarks/memory.py            two peers, 50 M parameters, four ways to average; then 200 rounds with failures: some ten minutes
    .venv/bin/python benchmarks/memory.py --full     200 M parameters, 1,000 rounds
    .venv/bin/python benchmarks/memory.py --only parameters/fp16/disk --num_parameters 860000000       one way alone, without those rounds

Compute is a sleep (`benchmarks.sleeper`), all else is real. Memory is that of a peer's processes, trainer, sidecar and p2pd, without
the pages of files: of libraries each has fewer the more programs run here, and of a state on disk the kernel has them back when it wants. From its peak is taken what the same peer has with almost no
parameters, and the parameters themselves, which are there without averaging too.

For the growth a third peer joins, and is killed with all its processes in every tenth round: the rounds that it leaves fail at first.
"""

import contextlib
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.common import Peer, argument_parser, family, heed_sigterm, held, print_result, print_table, wait
from benchmarks.sleeper import toy_params
from peer.rooms import load_part
from peer.sync.engine.buffers import DISK, MEMORY
from peer.sync.engine.codec import WIRES, Wire
from peer.sync.engine.memory import SIDECAR_BYTES, host_bytes
from peer.sync.engine.vectors import Schema
from scripts.demo.results import read_lines
from swarm.advice import size
from swarm.errors import UserError, run_program
from swarm.run.strategy import strategies, swarms
from swarm.run_config import RunConfig

_EXAMPLES = {"SD 1.5 UNet": 859_520_964, "with its text encoder": 982_581_252}
WAYS = (("parameters", "fp16", MEMORY), ("parameters", "int8", MEMORY), ("diloco", "int8", MEMORY), ("parameters", "fp16", DISK))
FEW = 100_000
ROUNDS = 5
_LOOK_SECONDS = 0.05
_WAIT_SECONDS = 300.0
_ADDRESS = re.compile(r"--peers (/ip4/127\S+)")


class WatchedPeer(Peer):
    """A sleeper whose processes are all killed at the end. peak: the most memory that all of them together had, in bytes."""

    def __init__(self, folder: Path, num_parameters: int, *options: str):
        own = ("--num_parameters", str(num_parameters), "--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--train_batch_size", "4")
        super().__init__(folder, *own, *options, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.peak = 0
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            self.peak = max(self.peak, self.memory())
            time.sleep(_LOOK_SECONDS)

    def memory(self) -> int:
        """In bytes."""
        return held(self.process.pid)[0]

    def round_seconds(self) -> list[float]:
        """Of each round, from a contribution's freezing to the trainer's standing on the new state."""
        frozen, found = None, []
        for event in read_lines(self.folder / "work.jsonl"):
            if event["event"] == "frozen":
                frozen = event["time"]
            elif event["event"] == "round" and frozen is not None:
                found.append(event["time"] - frozen)
                frozen = None
        return found

    def address(self) -> str:
        return wait("an address", lambda: _ADDRESS.search(self.log), [self], _WAIT_SECONDS).group(1)

    def kill(self) -> None:
        for process in family(self.process.pid):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._watching.join()


@contextlib.contextmanager
def swarm(folder: Path, num_parameters: int, *options: str) -> Iterator[list[WatchedPeer]]:
    """Two peers that have found each other."""
    peers = [WatchedPeer(folder / "one", num_parameters, "--found", *options)]
    try:
        peers.append(WatchedPeer(folder / "two", num_parameters, "--peers", peers[0].address(), *options))
        yield peers
    finally:
        for peer in peers:
            peer.kill()


def measure(folder: Path, sync: str, wire: str, state_on: str, num_parameters: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """The peak of a peer over `rounds` rounds of two, less that of one with few parameters."""
    run = RunConfig(model="sleeper", sync=sync, wire=wire)
    options = ("--sync", sync, "--wire", wire, "--samples_per_second", "20", "--target_batch_size", str(40 + num_parameters // 1_000_000))
    options += ("--state_on", state_on)
    peaks = {}
    for count in (FEW, num_parameters):
        with swarm(folder / f"{sync}-{wire}-{state_on}-{count}", count, *options) as peers:
            seconds = _WAIT_SECONDS + 2e-6 * count
            wait("the last round", lambda both=peers: averaged(both[0]) >= rounds and averaged(both[1]) >= rounds, peers, seconds)
            peaks[count] = max(peer.peak for peer in peers)
            seconds = statistics.median(seconds for peer in peers for seconds in peer.round_seconds())
    schema = Schema.of(toy_params(num_parameters))
    counted = sum(host_bytes(load_part("sync", sync).strategy(run), Wire.of(wire, schema), state_on=state_on).values())
    taken = peaks[num_parameters] - peaks[FEW] - 4 * schema.size
    return {
        "sync": sync,
        "wire": wire,
        "state on": state_on,
        "parameters": schema.size,
        "counted bytes/parameter": counted / schema.size,
        "measured bytes/parameter": taken / schema.size,
        "measured/counted": taken / counted,
        "with few parameters MB": peaks[FEW] / 1e6,
        "all but the parameters GB": (taken + peaks[FEW]) / 1e9,
        "seconds/round": seconds,
    }


def averaged(peer: Peer) -> int:
    return sum(line["how"] == "averaged" for line in peer.rounds())


def grow(folder: Path, rounds: int) -> dict[str, Any]:
    """Memory of the two that stay, early and late, while a third is killed again and again."""
    options = ("--samples_per_second", "200", "--target_batch_size", "64")
    with swarm(folder, 1_000_000, *options) as peers:
        one, killed, third = peers[0], 0, None
        looks: list[tuple[int, int]] = []
        try:
            until = time.monotonic() + 6 * rounds + _WAIT_SECONDS
            while (at := len(one.rounds())) < rounds:
                if time.monotonic() > until or any(peer.process.poll() is not None for peer in peers):
                    raise UserError(f"The swarm came to round {at} of {rounds} only.", fix="Look at the peers' logs.")
                looks.append((at, sum(peer.memory() for peer in peers) // 2))
                if third is None:
                    third, came = WatchedPeer(folder / f"third-{killed}", 1_000_000, "--peers", one.address(), *options), at
                elif at >= came + 10 and third.rounds():
                    third.kill()
                    third, killed = None, killed + 1
                time.sleep(0.5)
        finally:
            if third is not None:
                third.kill()
        failed = sum(peer.log.count("not averaged") for peer in peers)
    quarter = rounds // 4
    early = max((size for at, size in looks if quarter <= at < 2 * quarter), default=0)
    late = max((size for at, size in looks if at >= 3 * quarter), default=0)
    return {
        "rounds": rounds,
        "kills": killed,
        "failed attempts": failed,
        "second quarter MB": early / 1e6,
        "last quarter MB": late / 1e6,
        "growth kB/round": (late - early) / (2 * quarter) / 1e3,
    }


def table() -> str:
    """docs/hardware.md's table, in Markdown."""
    head = ["`--sync`", "`--wire`", "bytes per parameter", *_EXAMPLES]
    lines = [head, ["---"] * len(head)]
    for name in filter(swarms, strategies()):
        strategy = load_part("sync", name).strategy(RunConfig(model="", sync=name))
        for wire_name in WIRES:
            each = [sum(host_bytes(strategy, Wire(wire_name, count)).values()) for count in _EXAMPLES.values()]
            per_parameter = each[0] / next(iter(_EXAMPLES.values()))
            lines.append([f"`{name}`", f"`{wire_name}`", f"{per_parameter:.1f}", *(size(total + SIDECAR_BYTES) for total in each)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(argv: Sequence[str]) -> None:
    parser = argument_parser(__doc__, "memory")
    parser.add_argument("--full", action="store_true", help="200 M parameters and 1,000 rounds")
    parser.add_argument("--num_parameters", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0, help="of the part that looks for growth, or of --only")
    parser.add_argument("--only", choices=["/".join(way) for way in WAYS], help="measure this way alone")
    parser.add_argument("--counted", action="store_true", help="print docs/hardware.md's table only")
    flags = parser.parse_args(argv)
    if flags.counted:
        return print(table())
    num_parameters = flags.num_parameters or (200_000_000 if flags.full else 50_000_000)
    with tempfile.TemporaryDirectory(prefix="dd-memory-") as name:
        if flags.only:
            return print_result(measure(Path(name), *flags.only.split("/"), num_parameters, flags.rounds or ROUNDS))
        rows = [measure(Path(name), *way, num_parameters) for way in WAYS]
        print_table(rows)
        print()
        growth = grow(Path(name) / "growth", flags.rounds or (1000 if flags.full else 200))
        print_table([growth])
    print_result(
        {
            "bytes_per_parameter": {f"{row['sync']}/{row['wire']}/{row['state on']}": row["measured bytes/parameter"] for row in rows},
            "measured_over_counted": max(row["measured/counted"] for row in rows if row["state on"] == MEMORY),
            "growth_kb_per_round": growth["growth kB/round"],
            "growth": growth,
        }
    )


if __name__ == "__main__":
    heed_sigterm()
    sys.exit(run_program(lambda: main(sys.argv[1:])))
