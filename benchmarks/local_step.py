"""Images per second of this trainer alone, against what one would use instead: diffusers' own train_text_to_image.py.

    .venv/bin/python benchmarks/local_step.py [--reference PATH] [--turns 8]

--reference: a copy of that script (examples/text_to_image in diffusers' repository; it needs torchvision and tensorboard). Without it, a plain
loop that does what the script does step by step, and the result says so. Both train the same model with Stable Diffusion 1's topology, at a
fraction of its widths, on the same 128 px pictures in float32 with AdamW, batch 2, all cores, each in a process of its own. They take turns, --turns of them, so that a slow minute of
the machine falls on all. Timed from step 10, when every picture was seen once, to the last; so with --cache_latents and --cache_text the
caches are full. Prints a table and, as its last line, one JSON object: each ratio is the median of the turns' ratios, its interval holds 95 % of
what a median of as many turns drawn from these comes to, and the CPU seconds are those of a whole process.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline
from PIL import Image
from tqdm import trange

from benchmarks.common import ROOT, argument_parser, print_result, print_table, start
from scripts.demo import quickstart, results
from swarm.errors import UserError

BATCH, SIDE, FROM_STEP, STEPS = 2, 128, 10, 30
PICTURES = BATCH * FROM_STEP
LIMIT_SECONDS = 600
_BAR = re.compile(rb"(\d+)/%d " % STEPS)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--reference", type=Path, help="copy of diffusers' train_text_to_image.py; without: a plain loop")
    parser.add_argument("--turns", type=int, default=8, help="of each row [8]")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    return start(parser, lambda options: plain_loop(options.plain) if options.plain else measure(options))


def measure(options: argparse.Namespace) -> None:
    if options.reference and not options.reference.is_file():
        raise UserError(f"There is no file {options.reference}.", fix="Give a copy of diffusers' train_text_to_image.py, or leave it out.")
    if options.turns < 1:
        raise UserError(f"turns is {options.turns}.", fix="Use 1 or more.")
    found: dict[str, list[float]] = {"reference": [], "ours": [], "ours, caches": []}
    cpu: dict[str, list[float]] = {row: [] for row in found}
    with tempfile.TemporaryDirectory(prefix="local-step-") as name:
        folder = Path(name)
        prepare(folder)
        for _ in range(options.turns):
            for row, speeds in found.items():
                before = cpu_seconds()
                speeds.append(theirs(folder, options.reference) if row == "reference" else ours(folder, cached=row != "ours"))
                cpu[row].append(cpu_seconds() - before)
                print(f"{row}: {speeds[-1]:.3f} images/s, {cpu[row][-1]:.1f} s of CPU", file=sys.stderr, flush=True)
                shutil.rmtree(folder / "out")
    ratios = {row: [speed / base for speed, base in zip(speeds, found["reference"], strict=True)] for row, speeds in found.items()}
    medians, intervals = ({row: of(each) for row, each in ratios.items()} for of in (statistics.median, interval))
    print_table(
        [
            {
                "": row, "images/s": statistics.median(found[row]), "CPU s": statistics.median(cpu[row]), "ratio": medians[row],
                "from": intervals[row][0], "to": intervals[row][1],
            }
            for row in found
        ]
    )  # fmt: skip
    names = {"ours": "no_cache", "ours, caches": "cached"}
    result = {f"ratio_{name}": medians[row] for row, name in names.items()} | {f"interval_{name}": intervals[row] for row, name in names.items()}
    print_result({**result, "reference": describe(options.reference), "images_per_second": found, "cpu_seconds": cpu})


def interval(ratios: Sequence[float], draws: int = 10_000) -> list[float]:
    """Where 95 % of the medians of as many values lie that are drawn from these again and again, always the same ones."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return [medians[draws // 40], medians[-draws // 40 - 1]]


def cpu_seconds() -> float:
    """Of the processes that this one has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def describe(script: Path | None) -> str:
    """What we are compared with: the script's digest and what it ran with."""
    if script is None:
        return "a plain loop that does what diffusers' train_text_to_image.py does"
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("diffusers", "accelerate", "torchvision"))
    return f"{script.name}, sha256 {hashlib.sha256(script.read_bytes()).hexdigest()[:16]}, {versions}"


def ours(folder: Path, *, cached: bool) -> float:
    """Images per second of our trainer, by the times in its metrics.jsonl, which has a line every ten steps."""
    options = {
        "model": folder / "base", "train_data_dir": folder / "captioned", "output_dir": folder / "out", "resolution": SIDE,
        "train_batch_size": BATCH, "seed": 0, "ucg": 0, "total_samples": STEPS * BATCH, "optimizer": "adamw", "learning_rate": 1e-5,
        "mixed_precision": "no",
    }  # fmt: skip
    caches = ["--cache_latents", "--cache_text"] if cached else []
    run([ROOT / "peer" / "finetune.py", *(f"--{key}={value}" for key, value in options.items()), "--center_crop", *caches])
    return speed({line["step"]: line["time"] for line in results.read_lines(folder / "out" / "metrics.jsonl")})


def theirs(folder: Path, script: Path | None) -> float:
    """Images per second of diffusers' script, or of the plain loop, by when its progress bar said that it was at a step."""
    if script is None:
        return speed(run([Path(__file__), "--plain", folder]))
    options = {
        "pretrained_model_name_or_path": folder / "base", "train_data_dir": folder / "listed", "output_dir": folder / "out", "resolution": SIDE,
        "train_batch_size": BATCH, "seed": 0, "max_train_steps": STEPS, "learning_rate": 1e-5, "lr_warmup_steps": 0, "mixed_precision": "no",
        "cache_dir": folder / "cache",
    }  # fmt: skip
    return speed(run([script, *(f"--{key}={value}" for key, value in options.items()), "--center_crop"]))


def speed(seen: Mapping[int, float]) -> float:
    """Images per second between step FROM_STEP and the last. seen: step -> seconds."""
    return (STEPS - FROM_STEP) * BATCH / (seen[STEPS] - seen[FROM_STEP])


def run(command: Sequence[object]) -> dict[int, float]:
    """When each step was first seen on the program's progress bar. Raises UserError when it fails or does not end."""
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {"HF_HUB_OFFLINE": "1"}
    text, seen = b"", {}
    with subprocess.Popen(
        [sys.executable, *map(str, command)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ
    ) as program:
        limit = threading.Timer(LIMIT_SECONDS, program.kill)
        limit.start()
        try:
            while piece := os.read(program.stderr.fileno(), 1 << 16):
                text += piece
                for step in _BAR.findall(text[-len(piece) - 16 :]):
                    seen.setdefault(int(step), time.monotonic())
        finally:
            limit.cancel()
            program.kill()
    if program.returncode:
        raise UserError(
            f"{command[0]} ended with exit status {program.returncode}:\n{text.decode(errors='replace')[-1500:]}", fix="Mend that."
        )
    return seen


def prepare(folder: Path) -> None:
    """The model, and its pictures twice: each with a .txt beside it for us, in one list for the script.

    Random weights in Stable Diffusion 1's topology: a fifth of the UNet's widths, a quarter of the VAE's and of the text encoder's.
    """
    from benchmarks.gpu_sd15 import Sizes, build  # here: the plain loop's CPU seconds are not to count this

    quickstart.quiet_libraries()
    torch.manual_seed(0)
    sizes = Sizes(unet=(64, 128, 256, 256), vae=(32, 64, 128, 128), text=192, side=SIDE)
    build(sizes, [" ".join(["a", "picture", "number", *map(str, range(PICTURES))])]).save_pretrained(folder / "base")
    rng = random.Random(0)
    (folder / "captioned").mkdir()
    (folder / "listed").mkdir()
    rows = []
    for number in range(PICTURES):
        coarse = Image.frombytes("RGB", (16, 12), rng.randbytes(16 * 12 * 3))
        coarse.resize((256, 192), Image.Resampling.BICUBIC).save(folder / "captioned" / f"{number}.jpg", quality=90)
        (folder / "captioned" / f"{number}.txt").write_text(f"a picture number {number}", encoding="utf-8")
        (folder / "listed" / f"{number}.jpg").symlink_to(folder / "captioned" / f"{number}.jpg")
        rows.append({"file_name": f"{number}.jpg", "text": f"a picture number {number}"})
    (folder / "listed" / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def plain_loop(folder: Path) -> None:
    """What the script does at every step, and no more: decode, VAE, text encoder, UNet, backward, clip, AdamW."""
    pipeline = StableDiffusionPipeline.from_pretrained(folder / "base", safety_checker=None)
    unet, vae, text_encoder, tokenizer = pipeline.unet.train(), pipeline.vae, pipeline.text_encoder, pipeline.tokenizer
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    scheduler, optimizer = DDPMScheduler.from_config(pipeline.scheduler.config), torch.optim.AdamW(unet.parameters(), lr=1e-5)
    files = sorted((folder / "captioned").glob("*.jpg"))
    (folder / "out").mkdir()
    for step in trange(STEPS, desc="Steps", disable=False):
        some = [files[(step * BATCH + i) % len(files)] for i in range(BATCH)]
        pixels = torch.stack([pixels_of(file) for file in some])
        ids = tokenizer(
            [file.with_suffix(".txt").read_text(encoding="utf-8") for file in some],
            max_length=tokenizer.model_max_length, padding="max_length", truncation=True, return_tensors="pt",
        ).input_ids  # fmt: skip
        latents = vae.encode(pixels).latent_dist.sample() * vae.config.scaling_factor
        noise, timesteps = torch.randn_like(latents), torch.randint(0, scheduler.config.num_train_timesteps, (BATCH,))
        predicted = unet(scheduler.add_noise(latents, noise, timesteps), timesteps, text_encoder(ids)[0], return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(predicted.float(), noise.float(), reduction="mean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def pixels_of(file: Path) -> torch.Tensor:
    """(3, SIDE, SIDE) in [-1, 1]: the short side resized, the middle cropped."""
    picture = Image.open(file).convert("RGB")
    scale = SIDE / min(picture.size)
    picture = picture.resize([round(length * scale) for length in picture.size], Image.Resampling.BILINEAR)
    left, top = ((length - SIDE) // 2 for length in picture.size)
    square = np.asarray(picture.crop((left, top, left + SIDE, top + SIDE)), dtype=np.float32)
    return torch.from_numpy(square).permute(2, 0, 1) / 127.5 - 1


if __name__ == "__main__":
    sys.exit(main())
