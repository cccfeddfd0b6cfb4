"""What a round and knowing of each other cost as peers become more: 2, 4, 8 and 16 real ones on this machine, without a model.

    .venv/bin/python benchmarks/scale.py [--full]

Every peer has its real sidecar and p2pd; all trainers are threads of one process, and their compute is a sleep. The model is small and a
round takes ROUND_SECONDS at every size, so what grows is what peers cost each other. Per number of peers, over rounds after the first two:

    commit s        median seconds from the first peer's closing its contribution, which it does when it sees the target reached, to the
                    last peer's commit
    overrun s       median seconds of the swarm's work in a round beyond the target: how late it was seen
    CPU s           of sidecar and p2pd, per peer and round, and both per peer and second
    DHT             reads and writes per peer and second, the calls to other nodes that they take, and the KiB of records that come in
    messages        on our own streams, per peer and round (payload in KiB)
    memory MiB      of sidecar and p2pd per peer, shared pages once

docs/internals.md goes on from these figures to 1,000 peers. Last line: JSON with a row per number of peers under `peers`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if sys.path and sys.path[0] != str(ROOT):
    sys.path[0] = str(ROOT)

import psutil  # noqa: E402

from benchmarks.common import argument_parser, print_result, print_table  # noqa: E402
from swarm.errors import ExitCode, UserError, run_program  # noqa: E402
from swarm.lifeline import die_with_parent  # noqa: E402

SIZES = (2, 4, 8, 16)
ROUND_SECONDS = 8.0
SAMPLES_PER_SECOND = 20.0
"""Of one peer; a step is one sample, so that a round's overrun is seen to 50 ms."""
PARAMETERS = 100_000
WARM_UP, ROUNDS, FULL_ROUNDS = 2, 6, 30
START_SECONDS = 240.0


# -------------------------------------------------------------------- the process with all trainers


def train(count: int, folder: Path) -> None:
    """Run `count` peers in threads until this process is ended."""
    die_with_parent()
    import torch

    from benchmarks.sleeper import Sleeper
    from peer.config import PeerConfig
    from peer.sync.engine.trainer import sidecar_process
    from swarm.logs import setup_logging
    from swarm.run_config import RunConfig

    torch.set_num_threads(1)
    setup_logging()
    sidecar_process.subprocess = _CountedSidecars()  # type: ignore[assignment]
    run = RunConfig(model="scale", target_batch_size=int(count * SAMPLES_PER_SECOND * ROUND_SECONDS))
    listen = ("/ip4/127.0.0.1/tcp/0",)
    founder: tuple[str, ...] = ()
    threads = []
    for number in range(count):
        config = PeerConfig(output_dir=str(folder / str(number)), host_maddrs=listen, peers=founder)
        sleeper = Sleeper(run, config, num_parameters=PARAMETERS, samples_per_second=SAMPLES_PER_SECOND)
        threads.append(threading.Thread(target=sleeper.train, daemon=True))
        threads[-1].start()
        if not number:
            founder = (_address(folder / "log"),)
    for thread in threads:
        thread.join()


class _CountedSidecars:
    """`subprocess`, but that sidecars are started with their counters."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen:
        swapped = ["benchmarks.counted_sidecar" if part == "peer.sync.engine.trainer.sidecar" else part for part in command]
        return subprocess.Popen(swapped, **options)


def _address(log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        words = log.read_text(encoding="utf-8", errors="replace").split()
        if "--peers" in words:
            return words[words.index("--peers") + 1]
        time.sleep(0.1)
    raise UserError("The first peer did not start.", fix=f"See {log}.", code=ExitCode.FAILED)


# -------------------------------------------------------------------- what is measured


class Look:
    """Counters of all sidecars and p2pds at one moment."""

    def __init__(self, trainer: psutil.Process, folder: Path):
        self.time = time.time()
        self.cpu: Counter[str] = Counter()
        self.memory = 0
        for process in trainer.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self.cpu["p2pd" if process.name() == "p2pd" else "sidecar"] += times.user + times.system
                self.memory += process.memory_full_info().pss
        self.counts: Counter[str] = Counter()
        for path in folder.glob("sidecar-*.json"):
            self.counts.update(json.loads(path.read_text(encoding="utf-8")))


def round_times(held: Sequence[Sequence[dict]], work: Sequence[Sequence[dict]], rounds: Sequence[int]) -> list[float]:
    """Seconds from the first closing of a contribution in a round to the last peer's state of it, for each of `rounds`."""
    seconds = []
    for number in rounds:
        lines = [line for peer in held for line in peer if line["round"] == number]
        members = {(peer, contribution) for line in lines for peer, contribution, _ in line["members"]}
        owners = [peer[0]["peer"] for peer in held]
        closed = [e["time"] for owner, events in zip(owners, work, strict=True) for e in events
                  if e["event"] == "frozen" and (owner, e["number"]) in members]  # fmt: skip
        if closed and len(lines) == len(held):
            seconds.append(max(line["time"] for line in lines) - min(closed))
    return seconds


def figures(count: int, before: Look, after: Look, held: Sequence[Sequence[dict]], work: Sequence[Sequence[dict]]) -> dict[str, Any]:
    """One row of the table, from two looks and what peers wrote."""
    lines = {line["round"]: line for peer in held for line in peer if before.time < line["time"] <= after.time}
    seconds, rounds = after.time - before.time, max(len(lines), 1)
    per_second = {name: (after.counts[name] - before.counts[name]) / count / seconds for name in after.counts}
    cpu = {name: (after.cpu[name] - before.cpu[name]) / count for name in ("sidecar", "p2pd")}
    times = round_times(held, work, sorted(lines))
    target = count * SAMPLES_PER_SECOND * ROUND_SECONDS
    overrun = [(sum(m[2] for m in line["members"]) - target) / (count * SAMPLES_PER_SECOND) for line in lines.values()]
    return {
        "peers": count,
        "rounds": len(lines),
        "whole groups": sum(len(line["members"]) == count for line in lines.values()),
        "commit s": round(statistics.median(times), 3) if times else None,
        "worst commit s": round(max(times), 3) if times else None,
        "overrun s": round(statistics.median(overrun), 3) if overrun else None,
        "sidecar CPU s/round": round(cpu["sidecar"] / rounds, 3),
        "p2pd CPU s/round": round(cpu["p2pd"] / rounds, 3),
        "CPU s/s": round(sum(cpu.values()) / seconds, 4),
        "DHT reads/s": round(per_second.get("dht_reads", 0), 3),
        "DHT writes/s": round(per_second.get("dht_writes", 0), 3),
        "DHT calls/s": round(per_second.get("dht_find_calls", 0) + per_second.get("dht_store_calls", 0), 3),
        "DHT KiB/s": round(per_second.get("dht_bytes", 0) / 1024, 1),
        "streams/round": round(per_second.get("streams", 0) * seconds / rounds, 1),
        "messages/round": round(per_second.get("messages", 0) * seconds / rounds, 1),
        "payload KiB/round": round(per_second.get("message_bytes", 0) * seconds / rounds / 1024, 1),
        "memory MiB": round(after.memory / count / 2**20),
        "machine busy": round(psutil.cpu_percent() / 100, 2),
    }


def measure(count: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--trainers", str(count), "--folder", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COUNTS_DIR": name}
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        family: list[psutil.Process] = []
        try:
            trainer = psutil.Process(process.pid)
            first = _wait(process, folder, count, lambda lines: len(lines["members"]) == count, START_SECONDS)
            _wait(process, folder, count, lambda line: line["round"] >= first + WARM_UP, START_SECONDS)
            psutil.cpu_percent()
            before = Look(trainer, folder)
            _wait(process, folder, count, lambda line: line["round"] >= first + WARM_UP + rounds, rounds * 60)
            after = Look(trainer, folder)
            family = trainer.children(recursive=True)
            return figures(count, before, after, _read(folder, count, "rounds.jsonl"), _read(folder, count, "work.jsonl"))
        finally:
            process.kill()
            process.wait()
            psutil.wait_procs(family, timeout=15)


def _wait(process: subprocess.Popen, folder: Path, count: int, true: Any, seconds: float) -> int:
    """Until every peer holds a state of which `true(line of rounds.jsonl)`; its round. Raises UserError when that takes too long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        found = [next((line["round"] for line in lines if true(line)), None) for lines in _read(folder, count, "rounds.jsonl")]
        if None not in found:
            return max(found)
        time.sleep(0.2)
    words = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
    raise UserError(f"{count} peers did not come that far: {' '.join(words)}", fix="Is the machine busy otherwise?", code=ExitCode.FAILED)


def _read(folder: Path, count: int, name: str) -> list[list[dict[str, Any]]]:
    held = []
    for number in range(count):
        path = folder / str(number) / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        held.append([json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")])
    return held


def main(argv: Sequence[str]) -> None:
    parser = argument_parser(__doc__, "scale.py")
    parser.add_argument("--full", action="store_true", help=f"{FULL_ROUNDS} rounds at each size instead of {ROUNDS}")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--trainers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.trainers:
        return train(args.trainers, args.folder)
    rows = []
    for count in args.sizes:
        rows.append(measure(count, FULL_ROUNDS if args.full else ROUNDS))
        print(json.dumps(rows[-1]), flush=True)
    print_table(rows)
    print_result({"peers": {str(row["peers"]): row for row in rows}, "round_seconds": ROUND_SECONDS, "parameters": PARAMETERS})


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
