"""What watching the live page costs the dataset server: its CPU seconds per watcher and minute.

    .venv/bin/python benchmarks/watching.py [--watchers 3] [--peers 8] [--seconds 60]

A real server with its DHT node; `--peers` real nodes publish records of peers whose speed, loss and waiting samples change once a second, as
those of peers that train do, so that every second has news. The watchers are plain readers of /v1/events in another process's threads, none of
them slow. CPU is user and system time of the server's process; that of its DHT node, a process of its own, is the same with and without watchers,
and shown beside it. `nobody` is the same server while nobody watches. The figure to judge is all of the server's time while it is
watched, divided by watchers and minutes; `more` counts only what the watchers add.
"""

import asyncio
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.common import argument_parser, print_result, print_table
from benchmarks.hosting import dataset_server
from swarm.errors import UserError, run_program
from swarm.protocol import PeersAnswer, RunAnswer
from tests.datasetserver.hosting import write_dataset

GOAL = 0.6
_START_SECONDS, _QUIET_SECONDS = 120.0, 5.0


def main(argv: list[str]) -> None:
    parser = argument_parser(__doc__, "watching.py")
    parser.add_argument("--watchers", type=int, default=3)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two measurements")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        write_dataset(folder / "data", 64)
        server = stack.enter_context(dataset_server(folder, "--dht", "--target_batch_size", "2048", "--total_samples", "1000000"))
        run = RunAnswer.model_validate_json(_get(server.url, "/v1/run"))
        stack.enter_context(publishing(folder, run, args.peers))
        deadline = time.monotonic() + _START_SECONDS
        while len(PeersAnswer.model_validate_json(_get(server.url, "/v1/peers")).peers) < args.peers:
            if time.monotonic() > deadline:
                raise UserError("The server does not see the peers.", fix="Try again on a quieter machine.")
            time.sleep(0.5)
        rows = [measure("nobody", server.process, args.seconds, [])]
        with watching(server.url, args.watchers) as counts:
            time.sleep(_QUIET_SECONDS)
            rows.append(measure(f"{args.watchers} watchers", server.process, args.seconds, counts))
    quiet, watched = rows
    minutes = args.watchers * watched["seconds"] / 60
    figure = watched["server_cpu_seconds"] / minutes
    more = (
        (watched["server_cpu_seconds"] / watched["seconds"] - quiet["server_cpu_seconds"] / quiet["seconds"]) * watched["seconds"] / minutes
    )
    print_table(rows)
    print(f"{figure:.3f} CPU seconds of the server per watcher-minute ({more:.3f} more than unwatched), at most {GOAL} wanted")
    print_result(
        {**vars(args), "benchmark": "watching", "rows": rows, "per_watcher_minute": round(figure, 4), "more": round(more, 4), "goal": GOAL}
    )


def measure(what: str, process: psutil.Process, seconds: float, counts: list[list[int]]) -> dict[str, Any]:
    """CPU seconds of the server and of its children meanwhile, and what each watcher received."""

    def now() -> tuple[float, float, list[list[int]]]:
        own, children = process.cpu_times(), [child.cpu_times() for child in process.children(recursive=True)]
        return own.user + own.system, sum(times.user + times.system for times in children), [list(count) for count in counts]

    began, (own, others, received) = time.monotonic(), now()
    time.sleep(seconds)
    own_after, others_after, received_after = now()
    row = {
        "who": what,
        "seconds": round(time.monotonic() - began, 2),
        "server_cpu_seconds": round(own_after - own, 3),
        "dht_node_cpu_seconds": round(others_after - others, 3),
    }
    if counts:
        events, sizes = zip(
            *([new - old for new, old in zip(*pair, strict=True)] for pair in zip(received_after, received, strict=True)), strict=True
        )
        row |= {"events_each": min(events), "kilobytes_each": round(min(sizes) / 1000)}
    return row


@contextmanager
def watching(url: str, count: int) -> Iterator[list[list[int]]]:
    """`count` readers of the stream; each one's [events, bytes] so far."""
    counts: list[list[int]] = [[0, 0] for _ in range(count)]
    streams = [urllib.request.urlopen(f"{url}/v1/events") for _ in range(count)]

    def read(stream: Any, mine: list[int]) -> None:
        try:
            for line in stream:
                mine[0] += line.startswith(b"data:")
                mine[1] += len(line)
        except (OSError, ValueError, AttributeError):  # closed under our hands: the measurement is over
            return

    threads = [threading.Thread(target=read, args=pair, daemon=True) for pair in zip(streams, counts, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        for stream in streams:
            stream.fp.raw._sock.shutdown(2)
        for thread in threads:
            thread.join(10)


@contextmanager
def publishing(folder: Path, run: RunAnswer, count: int) -> Iterator[None]:
    """`count` nodes that publish a record each second, in a thread of this process."""
    stop, failed = threading.Event(), []

    def work() -> None:
        try:
            asyncio.run(_publish(folder, run, count, stop))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
        if failed:
            raise failed[0]


async def _publish(folder: Path, run: RunAnswer, count: int, stop: threading.Event) -> None:
    from swarm.dht import SwarmNode
    from swarm.records import PeerRecord
    from swarm.run_config import RunConfig

    rng, digest = random.Random(0), RunConfig.from_mapping(run.run, where="the server").digest
    nodes = []
    try:
        for number in range(count):
            nodes.append(await SwarmNode.join(initial_peers=run.initial_peers, identity_path=folder / f"{number}.key"))
        while not stop.is_set():
            for number, node in enumerate(nodes):
                record = PeerRecord(
                    peer_id=node.peer_id, config=digest, schema="s" * 64, round=3, samples=6144, digest="d" * 64, parents=("e" * 64,) * 8,
                    waiting_samples=rng.randrange(256), samples_per_second=3 + rng.random(), loss=0.1 + rng.random() / 100,
                    sent_bytes=1_700_000_000, received_bytes=1_700_000_000, transfer_seconds=130.0, share_lost=0.05,
                    name=f"volunteer {number}", hardware="NVIDIA GeForce RTX 4090", maddrs=tuple((await node.maddrs())[:6]), time=time.time(),
                )  # fmt: skip
                await node.publish(run.run_id, record)
            await asyncio.sleep(1)
    finally:
        for node in nodes:
            await node.close()


def _get(url: str, path: str) -> bytes:
    with urllib.request.urlopen(url + path, timeout=30) as answer:
        return answer.read()


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
