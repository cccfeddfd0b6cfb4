"""How fast peers average a vector, and what it costs the CPU: every codec of ours against stock hivemind in the same run.

    .venv/bin/python benchmarks/averaging.py

Each peer is a process of its own with its own p2pd, all on loopback, one thread each. A round of ours is encode, all-reduce, decode; one of
hivemind's is its `DecentralizedAverager`'s all-reduce with `Float16Compression`, without its search for a group. MB and GB are of the
float32 vector, whatever the codec makes of it; CPU seconds are those of one peer, with its p2pd and all it started. Seconds: the
slowest peer's, median of the rounds. hivemind and our fp16, which the ratios are of, have their rounds in turns: a shared machine is now
faster, now slower. `s at 100 Mbit/s`: what the bytes sent take on such a link. `host bytes/float`: the peak of
a peer's memory beyond the vector, p2pd not counted. Run it alone: on two cores, peers share them. Its peers end with it, even when it is
killed.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, argument_parser, heed_sigterm, print_result, print_table

STOCK = "hivemind fp16"
WIRES = ("fp32", "int8", "int4")
SLOW_LINK_BYTES_PER_SECOND = 100e6 / 8
CASE_SECONDS = 600


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--floats", type=float, help="only vectors of N elements, to try something out")
    options = parser.parse_args()
    heed_sigterm()
    cases = [(2, 40_000_000), (4, 40_000_000), (2, 200_000_000)]
    if options.floats:
        cases = [(peers, int(options.floats)) for peers in (2, 4)]
    rows = []
    for peers, floats in cases:
        for wires, rounds in (((STOCK, "fp16"), 7), *(((wire,), 3) for wire in WIRES)):
            for row in measure(peers, floats, wires, rounds):
                rows.append(row)
                print(
                    f"measured {row['wire']}, {peers} peers, {floats / 1e6:g} M floats: {row['seconds']:.2f} s", file=sys.stderr, flush=True
                )
    print_table(rows)
    print_result(result(rows))


def result(rows: list[dict]) -> dict:
    """fp16 of ours over hivemind's, for each case; the worst case is the headline."""
    slow = "s at 100 Mbit/s"
    by_case = {(row["peers"], row["M floats"], row["wire"]): row for row in rows}
    pairs = {(peers, floats): (by_case[peers, floats, "fp16"], row) for (peers, floats, wire), row in by_case.items() if wire == STOCK}
    throughput = {f"{p} peers, {f:g} M": mine["MB/s"] / stock["MB/s"] for (p, f), (mine, stock) in pairs.items()}
    cpu = {f"{p} peers, {f:g} M": mine["CPU s/GB"] / stock["CPU s/GB"] for (p, f), (mine, stock) in pairs.items()}
    return {
        "ratio_throughput_fp16": min(throughput.values()),
        "ratio_cpu_fp16": max(cpu.values()),
        "digests_equal": all(row["digests"] == 1 for row in rows if row["wire"] != STOCK),
        "ratio_seconds_int8_fp16_at_100_mbits": max(by_case[p, f, "int8"][slow] / mine[slow] for (p, f), (mine, _) in pairs.items()),
        "throughput_by_case": throughput,
        "cpu_by_case": cpu,
        "rows": rows,
    }


def measure(peers: int, floats: int, wires: Sequence[str], rounds: int) -> list[dict]:
    """A row for each wire: `rounds` timed rounds, in turns, after one that is not timed. Rounds that did not reach all peers count for nothing."""
    with alarm(CASE_SECONDS), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="averaging-")))
        swarms = {wire: swarm(stack, peers, floats, wire, folder / f"{number}") for number, wire in enumerate(wires)}
        answers = {wire: [] for wire in wires}
        for number in range(1 + rounds):
            for wire, children in swarms.items():
                answers[wire].append(one_round(children, number))
        for child in (child for children in swarms.values() for child in children):
            child.say(stop=True)
            os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
    return [figures(peers, floats, wire, answers[wire][1:]) for wire in wires]


def swarm(stack: contextlib.ExitStack, peers: int, floats: int, wire: str, keys: Path) -> list["Child"]:
    """Peers that know each other; all end with `stack`."""
    children: list[Child] = []
    keys.mkdir()
    for index in range(peers):
        child = stack.enter_context(started())
        addresses = [other.address for other in children]
        child.say(index=index, peers=peers, floats=floats, wire=wire, addresses=addresses, key=str(keys / f"{index}.key"))
        hello = child.hear("address")
        child.address, child.peer = hello["address"], hello["peer"]
        children.append(child)
    for child in children:
        child.say(peers=[other.peer for other in children])
    return children


def figures(peers: int, floats: int, wire: str, rounds: Sequence[Sequence[dict]]) -> dict:
    """The row of a wire, from its peers' answers in each round."""
    done = [answers for answers in rounds if all(answer.get("complete", True) for answer in answers)]
    if not done:
        raise SystemExit(f"{wire}, {peers} peers, {floats / 1e6:g} M floats: no round was averaged by all peers")
    seconds = statistics.median(max(answer["seconds"] for answer in answers) for answers in done)
    cpu = statistics.median(statistics.mean(answer["cpu_seconds"] for answer in answers) for answers in done)
    row = {
        "peers": peers,
        "M floats": floats / 1e6,
        "wire": wire,
        "rounds": len(done),
        "seconds": seconds,
        "MB/s": 4 * floats / 1e6 / seconds,
        "CPU s/GB": cpu / (4 * floats / 1e9),
        "digests": max(len({answer["digest"] for answer in answers}) for answers in done),
    }
    if "up" in done[0][0]:
        sent = max(answer["up"] for answers in done for answer in answers)
        extra = max(answer["extra"] for answers in done for answer in answers)
        row |= {"MB sent": sent / 1e6, "s at 100 Mbit/s": sent / SLOW_LINK_BYTES_PER_SECOND, "host bytes/float": extra / floats}
    return row


@contextlib.contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the block when it takes longer: a peer that hangs ends the benchmark."""

    def late(*_: object) -> None:
        raise TimeoutError(f"one row took more than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def one_round(children: list["Child"], number: int) -> list[dict]:
    for child in children:
        child.hear("ready")
    for child in children:
        child.say(round=number)
    return [child.hear("digest") for child in children]


class Child:
    """A peer's process, and the lines it exchanges with us."""

    address = peer = ""

    def __init__(self, process: subprocess.Popen):
        self.process = process

    def say(self, **values: object) -> None:
        self.process.stdin.write(json.dumps(values) + "\n")
        self.process.stdin.flush()

    def hear(self, key: str) -> dict:
        """The next line that has `key`; others (a library's log) are passed over. Raises RuntimeError when the process has ended."""
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                values = json.loads(line)
                if isinstance(values, dict) and key in values:
                    return values
        raise RuntimeError("a peer ended early; above is its reason")


@contextlib.contextmanager
def started() -> Iterator[Child]:
    """A peer in a session of its own, which ends as a whole with the block: hivemind forks, and its forks outlive their parent."""
    command = [sys.executable, "-m", "benchmarks.averaging_peer"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HIVEMIND_LOGLEVEL": "ERROR"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True) as process:
        try:
            yield Child(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # nobody has reaped it yet, so the number is still its own


if __name__ == "__main__":
    main()
