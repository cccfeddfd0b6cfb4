"""`dd-generate`: pictures from a result, `dd-generate --model OUT --prompt "a handwritten seven" --num_images 4 --out pictures/`."""

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import UserError, run_program
from swarm.logs import setup_logging
from swarm.options import build, option, parse_flags

log = logging.getLogger(__name__)

_GUIDANCE = {"FluxPipeline": 3.5}
"""Where it is not 7.5, the models' usual one."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to draw."""

    model: str = option(
        "",
        "A result's folder or an --output_dir, whose LoRA or embedding finds its base model; a diffusers folder, a .safetensors or a Hub id.",
    )
    model_config: str = option("", "For a .safetensors --model: diffusers folder or Hub id whose configs and tokenizers it is read with.")
    lora: tuple[str, ...] = option((), "Files or folders of LoRA weights to put onto the model.")
    lora_scale: float = option(1.0, "How strongly they act.")
    embedding: tuple[str, ...] = option(
        (), "Files or folders of textual inversion embeddings: words that prompts may have.", aliases=("embeddings",)
    )
    prompt: tuple[str, ...] = option((), "What the pictures show; several prompts are drawn one after the other.", aliases=("prompts",))
    negative_prompt: str = option("", "What they shall not show; not for FLUX.")
    num_images: int = option(4, "Pictures of each prompt.")
    out: str = option("pictures", "Folder for the PNGs.")
    steps: int = option(25, "Denoising steps.", aliases=("num_inference_steps",))
    guidance: float | None = option(
        None,
        "How strongly the prompt guides; 1: not beyond the model's own prediction; default: 7.5, for FLUX 3.5.",
        aliases=("guidance_scale",),
    )
    seed: int = option(0, "Picture N is drawn from seed + N.")
    size: int = option(0, "Side in pixels; 0: the one the model was made for.")
    batch_size: int = option(8, "Pictures drawn at a time.")
    device: str = option("auto", "auto, cpu or cuda.")

    def __post_init__(self) -> None:
        for name in ("num_images", "steps", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}.", fix="Use 1 or more.")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="dd-generate", description="Draw pictures with a model, or with what was trained on it.")
    flags, _ = parse_flags(parser, argv, GenerateConfig)
    config = build(GenerateConfig, flags)
    if not config.model or not config.prompt:
        raise UserError("A model and a prompt are needed.", fix='For example: dd-generate --model output/model --prompt "a red square".')
    setup_logging()
    pipeline = load(config)
    for prompt in config.prompt:
        for path in draw(pipeline, prompt, config):
            print(path)


def load(config: GenerateConfig) -> Any:
    """The pipeline with all that was asked for in it, on its device. Raises UserError naming what does not load."""
    import torch

    from peer.exports import loading

    given = loading.result_in(Path(config.model).expanduser())
    about = loading.base_of(given)
    pipeline = (
        base(about.run.model, about.run.model_config)
        if about
        else base(str(given) if given.exists() else config.model, config.model_config)
    )
    if about:
        loading.add_result(pipeline, given)
    names = [f"lora_{number}" for number in range(len(config.lora))]
    for name, source in zip(names, config.lora, strict=True):
        loading.add_lora(pipeline, Path(source), name)
    own = ["default"] if about and about.run.method == "lora" else []
    if names or (own and config.lora_scale != 1):
        # --lora_scale is for the LoRAs of --lora; for a result's own where there are none.
        scales = [1.0 if names else config.lora_scale] * len(own) + [config.lora_scale] * len(names)
        pipeline.set_adapters([*own, *names], scales)
    for source in config.embedding:
        log.info("the word of %s is %s", source, loading.add_embedding(pipeline, Path(source)))
    if hasattr(pipeline, "unet"):
        from diffusers import DDIMScheduler

        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    # In fp16 FLUX draws black pictures.
    dtype = torch.float32 if device == "cpu" else torch.bfloat16 if type(pipeline).__name__ == "FluxPipeline" else torch.float16
    return pipeline.to(device, dtype=dtype)


def base(source: str, config: str) -> Any:
    """The pipeline of a folder, a file or a Hub id."""
    from peer.models.diffusion.pipeline import load_pipeline
    from peer.models.diffusion.source import locate
    from swarm.base_model import PIPELINES, family_of

    path = locate(source)
    family = family_of(path)
    return load_pipeline(next(kind for kind, name in PIPELINES.items() if name == family), path, config)


def draw(pipeline: Any, prompt: str, config: GenerateConfig) -> list[Path]:
    """Write `config.num_images` PNGs named by prompt and number; picture N does not depend on how many are drawn at a time."""
    import torch

    out, kind = Path(config.out), type(pipeline).__name__
    out.mkdir(parents=True, exist_ok=True)
    if config.negative_prompt and kind == "FluxPipeline":
        raise UserError("FLUX is guided without a negative prompt.", fix="Remove --negative_prompt.")
    options = {"negative_prompt": config.negative_prompt} if config.negative_prompt else {}
    paths: list[Path] = []
    for first in range(0, config.num_images, config.batch_size):
        numbers = range(first, min(first + config.batch_size, config.num_images))
        pipeline.set_progress_bar_config(
            desc=f"{prompt[:40]} {numbers[0] + 1}-{numbers[-1] + 1}/{config.num_images}", disable=not sys.stderr.isatty()
        )
        images = pipeline(
            [prompt] * len(numbers),
            num_inference_steps=config.steps,
            guidance_scale=_GUIDANCE.get(kind, 7.5) if config.guidance is None else config.guidance,
            height=config.size or None,
            width=config.size or None,
            generator=[torch.Generator().manual_seed(config.seed + number) for number in numbers],
            **{name: [value] * len(numbers) for name, value in options.items()},
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
