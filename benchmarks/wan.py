"""How much of the time peers compute when only home lines join them: 100 Mbit/s, 40 ms each way.

    sudo .venv/bin/python benchmarks/wan.py [--full]

Peers live in network namespaces (links.py); compute is a sleep (sleeper.py). The model is SCALE times smaller than SD 1.5 and the cards as
much faster, so that bytes per second of compute are those of SD 1.5, full, on an RTX 3090-class card, and a round takes seconds. Waits
that do not shrink with it (round trips, matchmaking) weigh SCALE times more here than in a real run, and so do N peers on few cores.

Utilisation of a peer = samples of its contributions that were committed * seconds per sample / time, from the moment it closed its
contribution to the first round with all peers to the moment it closed its last one that was committed; a row's is the mean over peers.
For hivemind.Optimizer, which commits even when averaging failed: samples * seconds per sample / time between its epochs.

Bytes per sample: all that crossed the links, per sample committed, at the size of the real model. Rows in whose busiest second the hub
carried more than 80 % of what it can carry on this machine, or was late itself, are marked invalid. Last line: JSON with `utilisation` and `bytes_per_sample`.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, argument_parser, heed_sigterm, print_result, print_table
from benchmarks.links import Link, Net, Traffic, ceiling, given, linked
from scripts.demo.results import read_lines
from swarm.errors import ExitCode, UserError, run_program

MODEL_PARAMETERS = 983_000_000
"""SD 1.5 with its text encoder."""
IMAGES_PER_SECOND = 3.05
"""SD 1.x, full, 8-bit Adam, 512 px, batch 1, on an A100 (the seed repository's README). A 3090 is no faster, so its share would be larger."""
ROUND_SAMPLES = 2048
SCALE = 25
BATCH = 16
"""0.2 s of compute: a sixtieth of a round of two peers."""
LINK = Link(megabits=100, delay_ms=40)
ROUNDS = 4
"""Measured per row, after the first with all peers."""
ROW_SECONDS = 300.0
VALID_SHARE = 0.8
VALID_LATE_MS = 10.0
"""A quarter of the delay: a hub that is later than that for one packet in a hundred had too little of the machine."""


@dataclass(frozen=True)
class Row:
    sync: str
    wire: str
    overlap: bool
    peers: int

    @property
    def name(self) -> str:
        return f"{self.sync}/{self.wire}/{'overlap' if self.overlap else 'blocking'}"

    @property
    def key(self) -> str:
        """In the JSON: as `name`, with the number of peers where it is not two."""
        return self.name if self.peers == 2 else f"{self.name} x{self.peers}"


HIVEMIND = "hivemind.Optimizer"
_SHORT = {
    2: [
        ("parameters", "fp16", False),
        ("diloco", "int8", False),
        ("diloco", "int8", True),
        ("diloco", "int4", True),
        (HIVEMIND, "fp16", True),
    ],
    4: [("diloco", "int8", True), ("diloco", "int4", True), (HIVEMIND, "fp16", True)],
}
_EACH = [(sync, wire, overlap) for sync in ("parameters", "diloco") for wire in ("fp16", "int8", "int4") for overlap in (False, True)]
_EACH += [("gradients", "int8", False), (HIVEMIND, "fp16", True)]
ROWS = [Row(*kind, peers) for peers, kinds in _SHORT.items() for kind in kinds]
FULL_ROWS = [Row(*kind, peers) for peers in (2, 4, 8) for kind in _EACH]


class Peers:
    """The peers of one row, each at its host."""

    def __init__(self, net: Net, row: Row, folder: Path):
        self._net, self.row, self.folder = net, row, folder
        self._processes: list[subprocess.Popen] = []

    def start(self) -> None:
        self._start_one(0, None)
        founder = self._founder()
        for host in range(1, self.row.peers):
            self._start_one(host, founder)

    def _start_one(self, host: int, founder: str | None) -> None:
        listen = f"/ip4/{self._net.hosts[host].address}/tcp/31337"
        rate = IMAGES_PER_SECOND * SCALE
        sizes = ["--num_parameters", MODEL_PARAMETERS // SCALE, "--samples_per_second", rate]
        if self.row.sync == HIVEMIND:
            flags = ["benchmarks.hivemind_peer", "--folder", self.folder / str(host), "--listen", listen, "--batch", BATCH]
            flags += ["--target", ROUND_SAMPLES, *(["--peer", founder] if founder else [])]
        else:
            flags = ["benchmarks.sleeper", "--output_dir", self.folder / str(host), "--host_maddrs", listen, "--train_batch_size", BATCH]
            flags += ["--target_batch_size", ROUND_SAMPLES, "--sync", self.row.sync, "--wire", self.row.wire]
            flags += [*(["--overlap"] if self.row.overlap else []), *(["--peers", founder] if founder else [])]
        command = self._net.command(host, [sys.executable, "-m", *map(str, [*flags, *sizes])])
        with (self.folder / f"{host}.log").open("ab") as log:
            self._processes.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def _founder(self) -> str:
        log, deadline = self.folder / "0.log", time.monotonic() + 240
        while time.monotonic() < deadline:
            self.check()
            found = re.search(r"--peers (/ip4/10\.\S+)", log.read_text(encoding="utf-8", errors="replace"))
            if found:
                return found[1]
            time.sleep(0.2)
        raise UserError("The first peer did not start.", fix=f"See {log}.", code=ExitCode.FAILED)

    def check(self) -> None:
        """Raises UserError when a peer has ended."""
        for host, process in enumerate(self._processes):
            if process.poll() is not None:
                words = (self.folder / f"{host}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
                raise UserError(
                    f"Peer {host} of {self.row.key} ended: {' '.join(words)}", fix="Look for its error above.", code=ExitCode.FAILED
                )

    def read(self, name: str) -> list[list[dict[str, Any]]]:
        """The lines of that file of every peer, up to the last whole one."""
        return [read_lines(self.folder / str(host) / name) for host in range(self.row.peers)]

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# -------------------------------------------------------------------- what is measured


def joint(rounds: Sequence[dict[str, Any]], peers: int) -> list[dict[str, Any]]:
    """The committed rounds from the first with all peers on, each once, by their number."""
    by_round = {line["round"]: line for line in rounds}
    ordered = [by_round[number] for number in sorted(by_round)]
    first = next((i for i, line in enumerate(ordered) if len(line["members"]) == peers), len(ordered))
    return ordered[first:]


def utilisation(peer: str, events: Sequence[dict[str, Any]], rounds: Sequence[dict[str, Any]], samples_per_second: float) -> float:
    """Share of its time that `peer` spent on samples in `rounds` after the first of them; 0 if it is in fewer than two."""
    mine = [number for line in rounds for name, number, _ in line["members"] if name == peer]
    frozen = {event["number"]: event for event in events if event["event"] == "frozen" and event["number"] in set(mine)}
    if len(frozen) < 2:
        return 0.0
    first, *later = [frozen[number] for number in sorted(frozen)]
    return sum(event["samples"] for event in later) / samples_per_second / (later[-1]["time"] - first["time"])


def epochs_utilisation(events: Sequence[dict[str, Any]], samples_per_second: float) -> float:
    """The same for hivemind.Optimizer, from its first change of epoch to its last."""
    if len(events) < 2:
        return 0.0
    samples = events[-1]["trained"] - events[0]["trained"]
    return samples / samples_per_second / (events[-1]["time"] - events[0]["time"])


def measure(row: Row, most_megabits: float) -> dict[str, Any]:
    """Run one row and return its line of the table; raises UserError when a peer ends."""
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="wan-")))
        net = closing.enter_context(linked(row.peers, LINK))
        peers = Peers(net, row, folder)
        closing.callback(peers.end)
        peers.start()
        if not _wait(peers, 1):
            return {"row": row.key, "peers": row.peers, "valid": "no: no round of all"}
        net.traffic()
        began = _committed(peers)
        whole = _wait(peers, 1 + ROUNDS)
        traffic, samples = net.traffic(), _committed(peers) - began
        shares = _shares(peers)
    return line_of(row, shares, traffic, samples, most_megabits, whole=whole)


def _wait(peers: Peers, rounds: int) -> bool:
    """Until every peer has seen `rounds` rounds from the first with all on; False when that takes too long."""
    deadline = time.monotonic() + ROW_SECONDS
    while min(_progress(peers)) < rounds:
        peers.check()
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _progress(peers: Peers) -> list[int]:
    if peers.row.sync == HIVEMIND:  # its first epochs may have been made alone
        return [max(len(events) - 1, 0) for events in peers.read("work.jsonl")]
    return [len(joint(rounds, peers.row.peers)) for rounds in peers.read("rounds.jsonl")]


def _committed(peers: Peers) -> int:
    """Samples in the swarm's state."""
    if peers.row.sync == HIVEMIND:
        return sum(events[-1]["trained"] for events in peers.read("work.jsonl"))
    return max(rounds[-1]["samples"] for rounds in peers.read("rounds.jsonl"))


def _shares(peers: Peers) -> list[float]:
    rate, events = IMAGES_PER_SECOND * SCALE, peers.read("work.jsonl")
    if peers.row.sync == HIVEMIND:
        return [epochs_utilisation(mine[1:], rate) for mine in events]
    held = peers.read("rounds.jsonl")
    rounds = joint([line for lines in held for line in lines], peers.row.peers)
    return [utilisation(lines[-1]["peer"], mine, rounds, rate) for lines, mine in zip(held, events, strict=True)]


def line_of(row: Row, shares: Sequence[float], traffic: Traffic, samples: int, most_megabits: float, *, whole: bool) -> dict[str, Any]:
    load = traffic.busiest_megabits / most_megabits
    faults = [
        *(["a round took too long"] if not whole else []),
        *([f"hub at {load:.0%}"] if load > VALID_SHARE else []),
        *([f"hub {traffic.late_ms:.0f} ms late"] if traffic.late_ms > VALID_LATE_MS else []),
    ]
    return {
        "row": row.key,
        "peers": row.peers,
        "utilisation": round(statistics.mean(shares), 4),
        "worst peer": round(min(shares), 4),
        "bytes_per_sample": round(traffic.megabytes * 1e6 * SCALE / max(samples, 1)),
        "samples": samples,
        "busiest Mbit/s": round(traffic.busiest_megabits),
        "late ms": traffic.late_ms,
        "dropped": traffic.dropped,
        "valid": f"no: {', '.join(faults)}" if faults else "yes",
    }


def main(argv: Sequence[str]) -> None:
    parser = argument_parser(__doc__, "wan.py")
    parser.add_argument("--full", action="store_true", help="all rows, with 2, 4 and 8 peers")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    args = parser.parse_args(argv)
    rows = [row for row in (FULL_ROWS if args.full else ROWS) if args.only in row.key]
    most = {count: ceiling(count) for count in sorted({row.peers for row in rows})}
    link = given(LINK)
    print(
        f"SD 1.5 full: {MODEL_PARAMETERS / 1e6:.0f} M parameters, {IMAGES_PER_SECOND} images/s per card, {ROUND_SAMPLES} samples a round; "
        f"model and times 1/{SCALE}.\nLink: {link['megabits']:.0f} of {LINK.megabits:.0f} Mbit/s by TCP, round trip {link['round_trip_ms']:.0f} ms. "
        f"The hub's ceiling here: {', '.join(f'{rate:,.0f} Mbit/s with {count} hosts' for count, rate in most.items())}.",
        flush=True,
    )
    lines = []
    for row in rows:
        lines.append(measure(row, most[row.peers]))
        print(json.dumps(lines[-1]), flush=True)
    print_table(lines)
    figures = {name: {line["row"]: line[name] for line in lines if name in line} for name in ("utilisation", "bytes_per_sample")}
    invalid = [line["row"] for line in lines if line["valid"] != "yes"]
    print_result({**figures, "invalid": invalid, "round_samples": ROUND_SAMPLES, "scale": SCALE, "ceiling_megabits": most})


if __name__ == "__main__":
    heed_sigterm()
    sys.exit(run_program(lambda: main(sys.argv[1:])))
