"""What the swarm learned, for people: pictures drawn by the result, the loss while training, and result.json."""

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from benchmarks.common import commit, version
from scripts.demo.digits import SIDE, WORDS, caption

PER_DIGIT = 10
STEPS = 25
GUIDANCE = 3.0
SEED = 1
PACKAGES = ("distributed-diffusion", "torch", "diffusers", "transformers", "hivemind", "datasets", "aiohttp", "numpy")

NIGHT, PAPER, FAINT, WRONG = (17, 20, 28), (226, 229, 236), (128, 135, 150), (224, 82, 82)
TILE, GAP, MARGIN, HEAD = 64, 6, 28, 116


def draw(model: Path, *, device: str, batch: int = 20) -> list[Image.Image]:
    """PER_DIGIT pictures of each digit, digit after digit, by the plain diffusers pipeline; the same model draws the same ones."""
    from diffusers import StableDiffusionPipeline

    return draw_with(StableDiffusionPipeline.from_pretrained(model, safety_checker=None).to(device), batch=batch)


def draw_with(pipeline: Any, *, per_digit: int = PER_DIGIT, steps: int = STEPS, batch: int = 20) -> list[Image.Image]:
    import torch

    pipeline.set_progress_bar_config(disable=True)
    prompts = [caption(digit) for digit in asked_digits(per_digit)]
    random = torch.Generator("cpu").manual_seed(SEED)
    drawn = []
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        drawn += pipeline(some, height=SIDE, width=SIDE, num_inference_steps=steps, guidance_scale=GUIDANCE, generator=random).images
    return drawn


def asked_digits(per_digit: int = PER_DIGIT) -> np.ndarray:
    """(10 * per_digit,) the digit asked for in each picture that `draw` returns."""
    return np.repeat(np.arange(10), per_digit)


def accuracy_by_digit(read: np.ndarray, asked: np.ndarray) -> dict[str, float]:
    return {WORDS[digit]: float((read[asked == digit] == digit).mean()) for digit in range(10)}


def grid(drawn: Sequence[Image.Image], read: np.ndarray, asked: np.ndarray, *, title: str, subtitle: str) -> Image.Image:
    """A labelled picture: one column per digit; what the judge reads as another digit has a red frame and that digit beside it."""
    rows = max(int((asked == digit).sum()) for digit in range(10))
    pitch = TILE + GAP
    sheet = Image.new("RGB", (2 * MARGIN + 10 * pitch - GAP, HEAD + rows * pitch - GAP + MARGIN), NIGHT)
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, 20), title, fill=PAPER, font=ImageFont.load_default(24))
    pen.text((MARGIN, 54), subtitle, fill=FAINT, font=ImageFont.load_default(14))
    for digit in range(10):
        left = MARGIN + digit * pitch
        pen.text((left + TILE / 2, HEAD - 12), WORDS[digit], fill=PAPER, font=ImageFont.load_default(15), anchor="ms")
        for row, index in enumerate(np.flatnonzero(asked == digit)):
            top = HEAD + row * pitch
            sheet.paste(drawn[index].convert("RGB").resize((TILE, TILE), Image.Resampling.BICUBIC), (left, top))
            if read[index] != digit:
                pen.rectangle((left - 2, top - 2, left + TILE + 1, top + TILE + 1), outline=WRONG, width=2)
                pen.text((left + TILE - 4, top + TILE - 3), str(read[index]), fill=WRONG, font=ImageFont.load_default(15), anchor="rs")
    return sheet


def plot_loss(metrics: Mapping[str, Sequence[Mapping[str, Any]]], rounds: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Each peer's training loss over time, smoothed, with the moments at which the swarm averaged."""
    from matplotlib.figure import Figure

    times = [line["time"] for lines in metrics.values() for line in lines]
    began = min(times, default=0.0)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for line in rounds:
        axes.axvline(line["time"] - began, color="0.88", linewidth=0.8, zorder=0)
    for name, lines in metrics.items():
        counted = [line for line in lines if line["loss"] is not None]
        axes.plot([line["time"] - began for line in counted], smooth([line["loss"] for line in counted]), label=name)
    axes.set(xlabel="seconds (grey lines: the swarm averaged)", ylabel="training loss", title="What each peer saw while the swarm learned")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if metrics:
        axes.legend(frameon=False)
    figure.savefig(file, dpi=130)


def smooth(values: Sequence[float], keep: float = 0.7) -> list[float]:
    """Exponential moving average that starts at the first value."""
    smoothed: list[float] = []
    for value in values:
        smoothed.append(value if not smoothed else keep * smoothed[-1] + (1 - keep) * value)
    return smoothed


def versions(root: Path) -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": platform.machine(), "commit": commit(root) or "unknown"}
    return found | {name: version(name) or "not installed" for name in PACKAGES}


def write_json(values: Mapping[str, Any], file: Path) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
