"""`dd-generate`: pictures from a result, `dd-generate --model OUT --prompt "a handwritten seven" --num_images 4 --out pictures/`."""

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import UserError, run_program
from swarm.logs import setup_logging
from swarm.options import build, option, parse_flags

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to draw."""

    model: str = option("", "Folder of a result (or of an --output_dir), or a Hub id.")
    prompt: tuple[str, ...] = option((), "What the pictures show; several prompts are drawn one after the other.", aliases=("prompts",))
    num_images: int = option(4, "Pictures of each prompt.")
    out: str = option("pictures", "Folder for the PNGs.")
    steps: int = option(25, "Denoising steps.", aliases=("num_inference_steps",))
    guidance: float = option(7.5, "How strongly the prompt guides; 1: not beyond the model's own prediction.", aliases=("guidance_scale",))
    seed: int = option(0, "Picture N is drawn from seed + N.")
    size: int = option(0, "Side in pixels; 0: the one the model was made for.")
    batch_size: int = option(8, "Pictures drawn at a time.")
    device: str = option("auto", "auto, cpu or cuda.")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="dd-generate", description="Draw pictures with a Stable Diffusion result.")
    flags, _ = parse_flags(parser, argv, GenerateConfig)
    config = build(GenerateConfig, flags)
    if not config.model or not config.prompt:
        raise UserError("A model and a prompt are needed.", fix='For example: dd-generate --model output/model --prompt "a red square".')
    setup_logging()
    pipeline = load(config)
    for prompt in config.prompt:
        for path in draw(pipeline, prompt, config):
            print(path)


def load(config: GenerateConfig):
    """The pipeline, on its device. Raises UserError when `config.model` is none."""
    import torch
    from diffusers import DDIMScheduler

    from peer.models import stable_diffusion
    from peer.models.diffusion.source import locate
    from swarm.run_config import RunConfig

    folder = locate(config.model)
    if (folder / "model" / "model_index.json").is_file():
        folder = folder / "model"
    name = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    pipeline = stable_diffusion.load(folder, torch.device(name), RunConfig()).pipeline
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
    if name != "cpu":
        pipeline.to(dtype=torch.float16)
    return pipeline


def draw(pipeline, prompt: str, config: GenerateConfig) -> list[Path]:
    """Write `config.num_images` PNGs named by prompt and number; picture N does not depend on how many are drawn at a time."""
    import torch

    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for first in range(0, config.num_images, config.batch_size):
        numbers = range(first, min(first + config.batch_size, config.num_images))
        pipeline.set_progress_bar_config(
            desc=f"{prompt[:40]} {numbers[0] + 1}-{numbers[-1] + 1}/{config.num_images}", disable=not sys.stderr.isatty()
        )
        images = pipeline(
            [prompt] * len(numbers),
            num_inference_steps=config.steps,
            guidance_scale=config.guidance,
            height=config.size or None,
            width=config.size or None,
            generator=[torch.Generator().manual_seed(config.seed + number) for number in numbers],
        ).images
        for number, image in zip(numbers, images, strict=True):
            paths.append(out / f"{slug(prompt)}-{number:03}.png")
            image.save(paths[-1])
    return paths


def slug(prompt: str) -> str:
    """A file name that a person recognises the prompt in."""
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "picture"


def cli() -> int:
    return run_program(lambda: main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(cli())
