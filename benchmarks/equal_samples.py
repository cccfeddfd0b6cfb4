"""What averaging costs in learning: swarms of two and of three peers against one machine, at equal samples, on real digits.

    .venv/bin/python benchmarks/equal_samples.py [--total_samples N]

Each run trains the quickstart's model from the same random weights on the same pictures. Judged twice: the loss on 297 digits that
no run ever saw, at fixed noise and fixed timesteps, and the share of 100 drawn digits that a judge of real digits reads right.
Takes about ten minutes on two cores; run it alone. Prints a table and, as its last line, one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch  # noqa: E402

from peer.contracts import PixelBatch  # noqa: E402
from peer.models import stable_diffusion  # noqa: E402
from peer.samples.encoding import Encoder  # noqa: E402
from scripts.demo import digits, quickstart, results, swarm_run, tiny_model  # noqa: E402
from scripts.demo.display import Display  # noqa: E402
from swarm.run_config import RunConfig  # noqa: E402

NOISES = 16
TARGET = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total_samples", type=int, default=65_536)
    total = parser.parse_args().total_samples
    quickstart.quiet_libraries()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="equal-samples-") as folder:
        base = Path(folder)
        quickstart.prepare(base)
        rows = {"untrained": judge(base / "base")}
        rows["one machine"] = alone(base, total)
        for peers in (2, 3):
            rows[f"{peers} peers"] = together(base, peers, total)
    print(f"\n{'':14}{'samples':>9}{'loss':>9}{'read right':>12}{'rounds':>8}{'seconds':>9}")
    for name, row in rows.items():
        print(f"{name:14}{row['samples']:9,}{row['loss']:9.4f}{row['accuracy']:12.0%}{row['rounds']:8}{row['seconds']:9.0f}")
    print(json.dumps(rows))


def judge(model: Path) -> dict:
    read = quickstart.judge(model)["result"]
    return {"accuracy": read["digit_accuracy"], "loss": loss(model), "samples": 0, "rounds": 0, "seconds": 0.0}


@torch.no_grad()
def loss(folder: Path) -> float:
    """Mean loss over the digits no run saw, NOISES draws of noise and timestep each, the same for every model."""
    model = stable_diffusion.load(folder, torch.device("cpu"), RunConfig())
    ink, labels = digits.load()
    unseen = slice(digits.TRAIN_COUNT, None)
    pixels = tiny_model.to_pixels(digits.pictures(ink[unseen]))
    batch = PixelBatch(pixels, [digits.caption(digit) for digit in labels[unseen]])
    rng = torch.Generator().manual_seed(1234)
    latents = Encoder(model)(batch, rng)
    return sum(float(model.loss(latents, rng).mean()) for _ in range(NOISES)) / NOISES


def alone(base: Path, total: int) -> dict:
    """One process, one core, no sync: what a user would run without a swarm."""
    output, settings = base / "alone", base / "run.toml"
    plan = swarm_run.Plan(base, total_samples=total, target_batch_size=TARGET)
    settings.write_text(swarm_run.run_settings(plan))
    flags = ["--config", settings, "--train_data_dir", base / "dataset", "--output_dir", output, "--train_batch_size", plan.batch]
    began = time.monotonic()
    command = [sys.executable, ROOT / "peer" / "finetune.py", *flags]
    subprocess.run([str(part) for part in command], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    return judge(output / "model") | {"samples": total, "seconds": seconds}


def together(base: Path, peers: int, total: int) -> dict:
    """A server and `peers` peers on this machine."""
    folder = base / f"swarm-{peers}"
    folder.mkdir()
    for shared in ("dataset", "base"):
        (folder / shared).symlink_to(base / shared)
    display = Display()
    plan = swarm_run.Plan(folder, peers, total, TARGET)
    with display, swarm_run.SwarmRun(plan, display) as swarm:
        story = swarm.run()
    rounds = results.distinct_rounds(swarm.held())
    figures = {"samples": rounds[-1]["samples"], "rounds": len(rounds), "seconds": story.seconds_training}
    return judge(folder / "peer-1" / "model") | figures


if __name__ == "__main__":
    main()
