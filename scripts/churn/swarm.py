"""A dataset server and peers on this machine that can be killed piece by piece and started again."""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

from benchmarks.common import family
from scripts.churn import checks
from scripts.demo.processes import Program, end_all, kill
from scripts.demo.stand_in import write_model
from swarm.errors import ExitCode, UserError
from swarm.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0
LEAVE_SECONDS, SERVER_LEAVES_SECONDS = 120.0, 30.0
SAMPLE_SECONDS = 0.02
BATCH = 4
ROUND_SECONDS = 2.5
PICTURES = 400
_LEASE_SECONDS = 20


class Peer:
    """A peer's program, and what it wrote in all its lives."""

    def __init__(self, name: str, folder: Path, command: Sequence[str]):
        self.name, self.folder, self._command = name, folder, command
        self.lives = 0
        self.down_until = 0.0
        """When to start it again, by the monotonic clock; 0: it runs."""
        self.start()

    def start(self) -> None:
        self.program = Program(self.name, self._command, self.folder.with_suffix(".log"), {}, ROOT)
        self.lives, self.down_until, self.born = self.lives + 1, 0.0, time.time()

    def rounds(self) -> list[dict[str, Any]]:
        return checks.read_rounds(self.folder)

    def commits_since(self, when: float) -> list[float]:
        """Times (seconds since the epoch) at which this peer came to a new state after `when`."""
        return [line["time"] for line in self.rounds() if line["time"] > when]

    @property
    def up(self) -> bool:
        """Whether it runs and has come to a state in this life."""
        return not self.down_until and self.program.ended() is None and bool(self.commits_since(self.born))

    def family(self, name: str = "") -> list[psutil.Process]:
        """Its living processes whose command line contains `name`."""
        matching = []
        for process in family(self.program.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                if name in " ".join(process.cmdline()):
                    matching.append(process)
        return matching

    def kill(self) -> None:
        self.program.kill_tree()

    def kill_part(self, name: str) -> bool:
        """SIGKILL its sidecar or its p2pd; False when there is none just now."""
        parts = self.family(name)
        kill(parts[:1])
        return bool(parts)

    def send(self, number: signal.Signals) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


class Server:
    """`python -m datasetserver` on a port that it keeps over its lives."""

    def __init__(self, folder: Path, *, target: int, sync: str, flags: Sequence[str] = ()):
        self.folder, self.url = folder, f"http://127.0.0.1:{free_port()}"
        dataset, model = write_dataset(folder / "dataset", PICTURES), write_model(folder / "base")
        self._command = [sys.executable, "-m", "datasetserver", "--dataset", str(dataset), "--model", str(model)]
        self._command += ["--work_dir", str(folder / "server"), "--port", self.url.rpartition(":")[2], "--ingest_workers", "0"]
        self._command += ["--shard_samples", "32", "--lease_seconds", str(_LEASE_SECONDS), "--grace_seconds", str(_LEASE_SECONDS)]
        self._command += ["--resolution", "16", "--target_batch_size", str(target), "--sync", sync, *flags]
        self.start()

    def start(self) -> None:
        threads = threading.active_count() > 1
        self.program = Program("server", self._command, self.folder / "server.log", {}, ROOT, threads=threads)

    def wait(self) -> None:
        """Until it answers. Raises UserError when it does not."""
        deadline = time.monotonic() + START_SECONDS
        while self.ask("/v1/run") is None:
            if self.program.ended() is not None or time.monotonic() > deadline:
                raise UserError("The dataset server did not start.", fix=f"See {self.program.log}.", code=ExitCode.FAILED)
            time.sleep(0.1)

    def ask(self, path: str) -> dict[str, Any] | None:
        """None while it is away."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return json.load(answer)
        except (urllib.error.URLError, OSError, ValueError):
            return None

    def kill(self) -> None:
        self.program.kill_tree()

    @property
    def ledger(self) -> Path:
        return self.folder / "server" / "ledger.sqlite"


def peer_command(server: Server, folder: Path) -> list[str]:
    flags = ["--datasetserver", server.url, "--output_dir", str(folder), "--train_batch_size", str(BATCH)]
    flags += ["--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--sample_seconds", str(SAMPLE_SECONDS)]
    return [sys.executable, "-m", "scripts.churn.peer", *flags]


def until(true: Callable[[], bool], tend: Callable[[], None], seconds: float) -> bool:
    """Wait, tending the swarm meanwhile; False when it did not come true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        tend()
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def leave(peers: Sequence[Peer], server: Server) -> list[str]:
    """All leave in order, then the server; what was wrong with it."""
    for peer in peers:
        peer.program.terminate()
    deadline = time.monotonic() + LEAVE_SECONDS
    statuses = {peer: peer.program.wait(max(0.1, deadline - time.monotonic())) for peer in peers}
    server.program.terminate()
    server.program.wait(SERVER_LEAVES_SECONDS)
    return [f"{peer.name} left with status {status}: {peer.program.last_words(2)}" for peer, status in statuses.items() if status != 0]


def end(peers: Sequence[Peer], server: Server) -> list[str]:
    """Whatever happened before: nothing runs on. What had to be killed is said."""
    left = end_all([*(peer.program for peer in peers), server.program], seconds=SERVER_LEAVES_SECONDS)
    return [f"processes left: {', '.join(left)}"] if left else []


def write_dataset(folder: Path, count: int) -> Path:
    """`count` grey pictures of 16x16 pixels."""
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("L", (16, 16), number % 256).save(folder / f"{number:04}.png")
        (folder / f"{number:04}.txt").write_text(f"picture {number}", encoding="utf-8")
    return folder


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", type=Path, help="write the record there as JSON")
    parser.add_argument("--keep", type=Path, help="work in this folder, which must not exist, and leave logs and states there")


def conclude(verdict: Mapping[str, Any], counts: str, record: Path | None) -> int:
    """Print the faults and whether all holds, and write the record. Returns the exit status."""
    for what, faults in verdict["faults"].items():
        for fault in faults:
            print(f"FAULT ({what}): {fault}", flush=True)
    print(f"{counts}: {'all holds' if verdict['holds'] else 'it does not hold'}", flush=True)
    if record:
        record.write_text(json.dumps(verdict) + "\n", encoding="utf-8")
    return 0 if verdict["holds"] else 1


@contextlib.contextmanager
def work_folder(keep: Path | None) -> Iterator[Path]:
    """A new folder: `keep`, or one that is gone afterwards."""
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            yield Path(folder).resolve()
