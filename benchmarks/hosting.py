"""A dataset server for benchmarks: in a process of its own, on a free port of this machine; with a DHT if it is asked for (--dht)."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from PIL import Image

from benchmarks.common import ROOT
from scripts.demo.stand_in import write_model
from swarm.errors import UserError

END_SECONDS = 60.0


@dataclass(frozen=True)
class Serving:
    """A server that serves."""

    url: str
    process: psutil.Process


@contextlib.contextmanager
def serving(*flags: str | Path, prefix: Sequence[str] = ()) -> Iterator[Serving]:
    """`python -m datasetserver` with these flags; prefix: what goes before the command. Raises UserError."""
    command = [*prefix, sys.executable, "-m", "datasetserver", *map(str, flags), "--port", "0"]
    command += [] if "--dht" in flags else ["--no_dht"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env)
    try:
        ready = next((line for line in process.stdout if line.startswith("serving ")), None)
        if ready is None:
            raise UserError("The dataset server did not start.", fix="See its messages above.")
        yield Serving(ready.split()[1], psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(END_SECONDS)
        process.stdout.close()


@contextlib.contextmanager
def dataset_server(folder: Path, *flags: str | Path, prefix: Sequence[str] = ()) -> Iterator[Serving]:
    """Serves `folder`/data for a run of its own, works in `folder`/work; prefix: as in `serving`."""
    own = ("--dataset", folder / "data", "--work_dir", folder / "work", "--model", write_model(folder / "model"), "--ingest_workers", "0")
    with serving(*own, *flags, prefix=prefix) as server:
        yield server


def write_noise(folder: Path, count: int) -> None:
    """A dataset of pictures of 1 MB each: noise, which keeps its size as PNG."""
    folder.mkdir()
    for number in range(count):
        Image.frombytes("RGB", (666, 500), os.urandom(999_000)).save(folder / f"{number:04}.png", compress_level=0)
        (folder / f"{number:04}.txt").write_text("noise")
