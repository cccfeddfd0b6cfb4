"""Stable Diffusion 1.5 at its full size in a swarm of this machine, without a GPU: does it fit, agree and load?

    .venv/bin/python benchmarks/full_size.py

A dataset server and two peers train a LoRA of rank 16 at 256 px, with the program's own commands. The model has random weights and the real
one's sizes, so what it draws means nothing. Then the peers' results are compared to the bit, and plain diffusers loads one and draws.
Takes some ten minutes on two cores, 10 GB of disk and 12 GiB of memory; run it alone. Memory is that of a peer's processes, with pages that
several share counted once. The last line is JSON: `digests_equal`, `loads`, `seconds_per_step`, `peak_gib`.
"""

import argparse
import contextlib
import re
import statistics
import sys
import tempfile
import threading
from datetime import datetime
from itertools import pairwise
from pathlib import Path

if sys.path and sys.path[0] != (root := str(Path(__file__).resolve().parent.parent)):
    sys.path[0] = root

import psutil

from benchmarks.common import print_result, print_table
from benchmarks.gpu_sd15 import FULL, TINY, Setup, Sizes, prepare
from scripts.demo import results, swarm_run
from scripts.demo.display import Display
from swarm.errors import ExitCode, run_program

ROUNDS, TARGET = 3, 8
STALL_SECONDS = 900.0
"""A first round takes two minutes on two cores that are free: loading, encoding, and four steps of each peer."""
LOOK_SECONDS = 0.5
RUN = {"method": "lora", "rank": 16, "learning_rate": 1e-4, "ucg": 0.0, "wire": "fp16"}
FLAGS = ("--cache_latents", "--cache_text", "--gradient_checkpointing", "--print_loss")
_STEP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)Z .*: step=\d+ samples=", re.MULTILINE)


class Watch(threading.Thread):
    """The most memory that each peer's processes had together, in GiB, until `stop`."""

    def __init__(self, swarm: swarm_run.SwarmRun):
        super().__init__(daemon=True)
        self.peaks: dict[str, float] = {}
        self._swarm, self._stopped = swarm, threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            for name, program in [*self._swarm.peers.items()]:
                self.peaks[name] = max(self.peaks.get(name, 0.0), _memory(program.pid) / 2**30)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _memory(pid: int) -> int:
    total = 0
    with contextlib.suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                total += process.memory_full_info().pss
    return total


def measure(folder: Path, sizes: Sizes, resolution: int) -> dict[str, object]:
    """Two peers train to the end of a run. Raises UserError when one ends too early."""
    prepare(Setup(folder, sizes, "cpu"))
    (folder / "pictures").rename(folder / "dataset")
    plan = swarm_run.Plan(
        folder,
        total_samples=ROUNDS * TARGET,
        target_batch_size=TARGET,
        batch=1,
        settings={**RUN, "resolution": resolution},
        peer_flags=FLAGS,
        stall_seconds=STALL_SECONDS,
    )
    with Display() as display, swarm_run.SwarmRun(plan, display) as swarm:
        watch = Watch(swarm)
        watch.start()
        try:
            story = swarm.run()
        finally:
            watch.stop()
        held = swarm.held()
    models = [folder / name / "model" for name in held]
    seconds = [each for program in swarm.peers.values() for each in _between_steps(program.text())]
    return {
        "digests_equal": not results.unequal_rounds(held) and results.shared_rounds(held) > 0 and same_loras(models),
        "rounds_shared": results.shared_rounds(held),
        "loads": _draws(folder / "base", models[0], resolution),
        "seconds_per_step": statistics.median(seconds),
        "seconds": story.seconds_training,
        "peak_gib": max(watch.peaks.values()),
    }


def _between_steps(log: str) -> list[float]:
    """Seconds, whole ones: a step's own, and beside it a wait for a round in a few; the median has none."""
    times = [datetime.fromisoformat(found) for found in _STEP.findall(log)]
    return [(after - before).total_seconds() for before, after in pairwise(times)]


def same_loras(models: list[Path]) -> bool:
    """Whether all have the same LoRA, to the bit."""
    import torch
    from safetensors.torch import load_file

    first, *others = (load_file(model / "pytorch_lora_weights.safetensors") for model in models)
    return all(each.keys() == first.keys() and all(torch.equal(each[key], first[key]) for key in first) for each in others)


def _draws(base: Path, lora: Path, side: int) -> bool:
    """Whether plain diffusers draws something else with the LoRA than without it."""
    import numpy as np
    import torch
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(base, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)

    def latents() -> np.ndarray:
        rng = torch.Generator().manual_seed(0)
        return pipeline("a red square", num_inference_steps=2, height=side, width=side, generator=rng, output_type="latent").images.numpy()

    without = latents()
    pipeline.load_lora_weights(lora)
    drawn = latents()
    return bool(np.isfinite(drawn).all() and not np.array_equal(drawn, without))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny weights and pictures: tries it, measures nothing")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args()
    return run_program(lambda: run(TINY if options.tiny else FULL, 64 if options.tiny else 256), debug=options.debug)


def run(sizes: Sizes, resolution: int) -> int:
    with tempfile.TemporaryDirectory(prefix="full-size-") as folder:
        found = measure(Path(folder), sizes, resolution)
    print_table([{"": "SD 1.5, LoRA, two peers", **found}])
    print_result({**found, "tiny": sizes is TINY})
    return ExitCode.OK if found["digests_equal"] and found["loads"] else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
