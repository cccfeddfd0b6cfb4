"""A dataset server for benchmarks: in a process of its own, on a free port of this machine, without a DHT."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.common import ROOT
from swarm.errors import UserError

END_SECONDS = 60.0


@contextlib.contextmanager
def dataset_server(folder: Path, *flags: str) -> Iterator[str]:
    """Serves `folder`/data, works in `folder`/work; its URL, once it serves. Raises UserError."""
    command = [sys.executable, "-m", "datasetserver", "--dataset", str(folder / "data"), "--work_dir", str(folder / "work"), "--port", "0"]
    command += ["--model", str(write_model(folder / "model")), "--no_dht", "--ingest_workers", "0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        ready = next((line for line in process.stdout if line.startswith("serving ")), None)
        if ready is None:
            raise UserError("The dataset server did not start.", fix="See its messages above.")
        yield ready.split()[1]
    finally:
        process.terminate()
        process.wait(END_SECONDS)
        process.stdout.close()


def write_model(folder: Path) -> Path:
    """The least that has a model's digest: the server never loads one."""
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    save_file({"weight": np.zeros(1, np.float32)}, folder / "unet" / "diffusion_pytorch_model.safetensors")
    return folder
