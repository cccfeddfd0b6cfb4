"""How soon a newcomer's first contribution is in a state: three peers train over slow links, a fourth comes.

    .venv/bin/python benchmarks/join.py        20 Mbit/s and 40 ms each way, a state of 60 MB (diloco, int4): some six minutes
    .venv/bin/python benchmarks/join.py --megabits 100 --num_parameters 75000000        a state of 600 MB

Compute is a sleep (`benchmarks.sleeper`), all else is real: processes, sidecars, p2pd, links of `benchmarks.links`. Time runs from the
start of the newcomer's process, Python's imports included, until another peer's rounds.jsonl has a state with its contribution.
The second time one of the three is killed in the middle of the download. Aim: 1.25 x (state bytes / link rate) + 15 s.
"""

import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Peer, argument_parser, heed_sigterm, print_result, print_table, wait
from benchmarks.links import Link, Net, linked
from swarm.errors import run_program

DONORS = 3
BYTES_PER_PARAMETER = 8
"""A state of `diloco`: the anchor and its momentum, float32 each."""
FIRST_ROUND = 6
"""The newcomer comes then: up to 4 rounds of these sizes could be repeated from the base model, without a download."""
SAMPLES_PER_SECOND = 40.0
_ADDRESS = re.compile(r"--peers (\S+/ip4/10\.77\S+|/ip4/10\.77\S+)")
_WAIT_SECONDS = 120.0


class HostedPeer(Peer):
    """One process of the benchmark, at a host of `net`."""

    def __init__(self, net: Net, host: int, folder: Path, options: Sequence[str]):
        self.began = time.time()
        super().__init__(folder, "--host_maddrs", f"/ip4/{net.hosts[host].address}/tcp/31337", *options, within=net.command(host, []))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(folder: Path, link: Link, num_parameters: int, round_seconds: float, *, kill: bool) -> dict[str, Any]:
    """One newcomer's way into the swarm; `kill`: one of the donors dies in the middle of the download."""
    ideal = num_parameters * BYTES_PER_PARAMETER * 8e-6 / link.megabits
    options = [
        "--num_parameters", str(num_parameters), "--samples_per_second", str(SAMPLES_PER_SECOND), "--train_batch_size", "4",
        "--target_batch_size", str(int(DONORS * SAMPLES_PER_SECOND * round_seconds)), "--sync", "diloco", "--wire", "int4",
    ]  # fmt: skip
    peers: list[HostedPeer] = []
    with linked(DONORS + 1, link) as net:
        try:
            peers.append(HostedPeer(net, 0, folder / "peer-0", [*options, "--found"]))
            address = wait("the first peer's address", lambda: _ADDRESS.search(peers[0].log), peers, _WAIT_SECONDS).group(1)
            for host in range(1, DONORS):
                peers.append(HostedPeer(net, host, folder / f"peer-{host}", [*options, "--peers", address]))
            together = 3 * FIRST_ROUND * round_seconds + _WAIT_SECONDS
            wait(f"round {FIRST_ROUND} of all three", lambda: any(_is_underway(line) for line in peers[0].rounds()), peers, together)
            newcomer = HostedPeer(net, DONORS, folder / "newcomer", [*options, "--peers", address])
            if kill:
                wait("the download", lambda: "fetching state=" in newcomer.log, [newcomer], _WAIT_SECONDS)
                time.sleep(ideal / 2)
                peers.pop().end()
            peers.append(newcomer)
            others, patience = peers[:-1], 10 * (ideal + round_seconds) + _WAIT_SECONDS
            line = wait("the first contribution", lambda: _first_contribution(others, newcomer), peers, patience)
            seconds = line["time"] - newcomer.began
        finally:
            for peer in peers:
                peer.end()
    fetched = re.findall(r"fetched .*? seconds=(\S+) bytes=(\d+) holders=(\d+) replayed=(\d+)", newcomer.log)
    return {
        "donor killed": "yes" if kill else "no",
        "megabits": link.megabits,
        "state MB": num_parameters * BYTES_PER_PARAMETER / 1e6,
        "round s": round_seconds,
        "ideal s": ideal,
        "fetched s": sum(float(seconds) for seconds, *_ in fetched),
        "fetched MB": sum(int(num_bytes) for _, num_bytes, *_ in fetched) / 1e6,
        "holders": max((int(holders) for *_, holders, _ in fetched), default=0),
        "rounds replayed": sum(int(replayed) for *_, replayed in fetched),
        "first contribution s": seconds,
        "aim s": 1.25 * ideal + 15,
        "ratio": seconds / ideal,
    }


def _is_underway(line: dict[str, Any]) -> bool:
    return line["round"] >= FIRST_ROUND and len(line["members"]) == DONORS


def _first_contribution(others: Sequence[Peer], newcomer: Peer) -> dict[str, Any] | None:
    own = newcomer.rounds()
    if not own:
        return None
    lines = [line for peer in others for line in peer.rounds() if any(member[0] == own[0]["peer"] for member in line["members"])]
    return min(lines, key=lambda line: line["time"], default=None)


def main(argv: Sequence[str]) -> None:
    parser = argument_parser(__doc__, "join")
    parser.add_argument("--megabits", type=float, default=20.0, help="of each peer's line, in both directions [20]")
    parser.add_argument("--num_parameters", type=int, default=7_500_000)
    parser.add_argument("--round_seconds", type=float, default=0.0, help="of compute, for each round [half of the download's]")
    flags = parser.parse_args(argv)
    link, num_parameters = Link(flags.megabits, delay_ms=40.0), flags.num_parameters
    ideal = num_parameters * BYTES_PER_PARAMETER * 8e-6 / link.megabits
    round_seconds = flags.round_seconds or ideal / 2
    rows = []
    with tempfile.TemporaryDirectory(prefix="dd-join-") as folder:
        for kill in (False, True):
            rows.append(measure(Path(folder) / str(kill), link, num_parameters, round_seconds, kill=kill))
    print_table(rows)
    print_result(
        {
            "seconds_to_first_contribution": rows[0]["first contribution s"],
            "seconds_of_transfer_ideal": ideal,
            "ratio": rows[0]["ratio"],
            "ratio_with_donor_killed": rows[1]["ratio"],
            "seconds_aim": rows[0]["aim s"],
            "rows": rows,
        }
    )


if __name__ == "__main__":
    heed_sigterm()
    sys.exit(run_program(lambda: main(sys.argv[1:])))
