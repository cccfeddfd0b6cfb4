"""A real dataset server for tests: its own process on a free port, or the same application in this process's loop."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from scripts.demo.stand_in import write_model
from swarm.ports import free_port
from tests.forking import ROOT, Forked


def until(true, seconds: float = 200.0) -> None:
    """Wait for what must become true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.05)


def write_dataset(folder: Path, count: int) -> Path:
    """`count` grey PNGs of 8x8 pixels, each with its number as caption."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("L", (8, 8), number % 256).save(folder / f"{number:04d}.png")
        (folder / f"{number:04d}.txt").write_text(f"picture {number}")
    return folder


class _Server(Forked):
    """A dataset server's process. Its attributes are those of `subprocess.Popen` that the tests use."""

    def __init__(self, argv: Sequence[str]):
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()
        with open(os.devnull) as nothing:
            files = nothing.fileno(), its_out, its_err
            super().__init__("datasetserver.__main__:cli", {"argv": [*argv]}, files, cwd=ROOT, environ={**os.environ})
        os.close(its_out)
        os.close(its_err)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)


class Host:
    """`dd-datasetserver` in a process of its own; `start` waits for its ready line. founds: whether it has a run of its own."""

    def __init__(self, folder: Path, *flags: str, samples: int = 40, shard_samples: int = 8, port: int = 0, founds: bool = True):
        self.dataset, self.model = write_dataset(folder / "data", samples), write_model(folder / "model")
        self.flags = ["--dataset", str(self.dataset), "--shard_samples", str(shard_samples)]
        self.flags += ["--model", str(self.model)] if founds else []
        self.flags += ["--ingest_workers", "0", *(flags if "--dht" in flags else ["--no_dht", *flags])]
        self.port, self.process, self.lines = port or free_port(), None, []
        self._chosen = not port

    def start(self) -> "Host":
        self.process = _Server([*self.flags, "--port", str(self.port)])
        watchdog = threading.Timer(240, self.process.kill)
        watchdog.start()
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("serving "):
                break
        else:
            watchdog.cancel()
            self._reap()
            if self._chosen and "Address already in use" in self.stderr:
                self.port = free_port()  # another test has taken it since it was found free
                return self.start()
            raise AssertionError(f"the server ended: {self.stderr}")
        watchdog.cancel()
        self._chosen = False  # a restart wants this one
        self.url = line.split()[1]
        self.port = int(self.url.rpartition(":")[2])
        return self

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self._reap()

    def stop(self) -> int:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self._reap()

    def _reap(self) -> int:
        if self.process is None:
            return 0
        status = self.process.wait(120)
        self.stderr = self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        self.process = None
        return status
