"""`dd-generate`: pictures from a result, `dd-generate --model OUT --prompt "a handwritten seven" --num_images 4 --out pictures/`."""

import logging
import os
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarm.arguments import ArgumentParser
from swarm.errors import ExitCode, UserError, of_machine, run_program
from swarm.logs import setup_logging
from swarm.options import build, option, options, parse_flags
from swarm.run.method import method_named
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)


@options
class GenerateConfig:
    """What to draw."""

    model: str = option(
        "",
        "A result's folder or an --output_dir, whose LoRA or embedding finds its base model; a diffusers folder, a .safetensors or a Hub id.",
    )
    model_config: str = option("", "For a .safetensors --model: diffusers folder or Hub id with its configs, tokenizers and missing parts.")
    lora: tuple[str, ...] = option((), "Files or folders of LoRA weights to put onto the model.")
    lora_scale: float = option(1.0, "How strongly they act.")
    embedding: tuple[str, ...] = option(
        (), "Files or folders of textual inversion embeddings: words that prompts may have.", aliases=("embeddings",)
    )
    prompt: tuple[str, ...] = option((), "What the pictures show; several prompts are drawn one after the other.", aliases=("prompts",))
    negative_prompt: str = option("", "What they should not show, for families that use it.")
    num_images: int = option(4, "Pictures of each prompt.", ge=1)
    out: str = option("pictures", "Folder for the PNGs.")
    steps: int = option(25, "Denoising steps.", aliases=("num_inference_steps",), ge=1)
    guidance: float | None = option(
        None,
        "How strongly the prompt guides; 1: not beyond the model's own prediction; default: the family's own.",
        aliases=("guidance_scale",),
    )
    seed: int = option(0, "Picture N is drawn from seed + N.", ge=-(2**63))
    size: int = option(0, "Side in pixels; 0: the one the model was made for.", ge=0)
    batch_size: int = option(8, "Pictures drawn at a time.", ge=1)
    device: str = option("auto", "auto, cpu or cuda.")


def main(argv: Sequence[str]) -> None:
    parser = ArgumentParser(
        prog="dd-generate",
        description="Draw pictures with a model, or with what was trained on it.",
        examples=['dd-generate --model out/model --prompt "a red square" --num_images 4 --out drawn'],
    )
    flags, _ = parse_flags(parser, argv, GenerateConfig)
    config = build(GenerateConfig, flags)
    if not config.model or not config.prompt:
        raise UserError("A model and a prompt are needed.", fix='For example: dd-generate --model output/model --prompt "a red square".')
    setup_logging()
    _make(Path(config.out))
    model = load(config)
    for prompt, name in zip(config.prompt, names(config.prompt), strict=True):
        for path in draw(model, prompt, config, name):
            print(path)


def _make(out: Path) -> None:
    """The folder for the pictures, before minutes of loading. Raises UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(out, os.W_OK | os.X_OK) else "it may not be written"
    except FileExistsError:
        reason = "it is a file"
    except OSError as error:
        reason = error.strerror
    if reason:
        raise UserError(f"There can be no pictures in {out}: {reason}.", fix="Choose another --out.", code=ExitCode.DISK)


def load(config: GenerateConfig) -> Any:
    """The family's model with all that was asked for in it, on its device. Raises UserError naming what does not load."""
    import torch

    from peer.drawing.validation import check_steps
    from peer.results import loading

    device = _device(config.device)
    given = loading.result_in(Path(config.model).expanduser())
    needs = loading.base_of(given)
    model = base(needs.run if needs else run_of(given, config))
    check_steps(model.pipeline.scheduler, "steps", config.steps)
    pipeline, dtype = model.pipeline, torch.float32 if device.type == "cpu" else getattr(torch, model.facts.half)
    model.cast(dtype)  # in memory: in float32, FLUX.2 dev (226 GB) and Qwen-Image (118) would fit no GPU
    if needs:
        loading.add_result(pipeline, given)
    adapters = [f"lora_{number}" for number in range(len(config.lora))]
    for name, source in zip(adapters, config.lora, strict=True):
        loading.add_lora(pipeline, Path(source), name)
    own = ["default"] if needs and method_named(needs.run.method).adapter else []
    if own or adapters:  # without --lora, --lora_scale is the result's own
        pipeline.set_adapters([*own, *adapters], [1.0 if adapters else config.lora_scale] * len(own) + [config.lora_scale] * len(adapters))
    for source in config.embedding:
        log.info("the learned word of %s is %s", source, loading.add_embedding(pipeline, Path(source)))
    if model.facts.ddim:
        from peer.models.diffusion.noising import ddim

        pipeline.scheduler = ddim(pipeline.scheduler.config)
    model.cast(dtype)  # what was added
    if hasattr(model.vae, "use_slicing"):
        model.vae.enable_slicing()  # a batch is decoded one picture at a time: that takes more memory than the denoiser's steps
    model.move(device)
    return model


def _device(wanted: str) -> Any:
    """Raises UserError for one that is not there."""
    import torch

    from peer.models.diffusion.source import first_line

    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)
        torch.empty(0, device=device)
        return device
    except (RuntimeError, AssertionError) as error:  # AssertionError: of a PyTorch that was built without CUDA
        if of_machine(error):
            raise
        raise UserError(f"--device {wanted} does not work here: {first_line(error)}", fix="Use auto, cpu or cuda.") from error


def run_of(given: Path, config: GenerateConfig) -> RunConfig:
    """What is known of a whole pipeline: of a result of ours how its run read captions, of another model nothing."""
    from peer.results.result import read_result

    about = read_result(given) if given.is_dir() else None
    place = {"model": str(given) if given.exists() else config.model, "model_config": config.model_config}
    return replace(about.run if about else RunConfig(), **place)


def base(run: RunConfig) -> Any:
    """The run's base model: a folder, a file or a Hub id; on the CPU, as it is in its files."""
    from peer.models.diffusion.source import locate
    from peer.rooms import load_part
    from swarm.base_model import AUTO, family_of
    from swarm.founding import with_defaults, with_family

    path = locate(run.model)
    if run.family == AUTO:  # no result of ours, which has all options of its run
        run = with_defaults(with_family(run, path))
    return load_part("models", family_of(path)).load(path, None, run)


def draw(model: Any, prompt: str, config: GenerateConfig, name: str) -> list[Path]:
    """Write `config.num_images` PNGs, `name` and a number; picture N does not depend on how many are drawn at a time."""
    import torch

    pipeline, out = model.pipeline, Path(config.out)
    if config.negative_prompt and not model.facts.negative_prompts:
        raise UserError(f"{model.facts.title} takes no negative prompt.", fix="Remove --negative_prompt.")
    paths: list[Path] = []
    for first in range(0, config.num_images, config.batch_size):
        numbers = range(first, min(first + config.batch_size, config.num_images))
        pipeline.set_progress_bar_config(
            desc=f"{prompt[:40]} {numbers[0] + 1}-{numbers[-1] + 1}/{config.num_images}", disable=not sys.stderr.isatty()
        )
        with torch.no_grad(), _of_size(config.size):
            images = pipeline(
                **told(model, [prompt] * len(numbers), config.negative_prompt),
                num_inference_steps=config.steps,
                **{model.facts.guided_by: model.facts.guidance, **model.drawn_with, **_guidance(model, config)},
                height=config.size or None,
                width=config.size or None,
                generator=[torch.Generator().manual_seed((config.seed + number) % 2**64) for number in numbers],
            ).images
        for number, image in zip(numbers, images, strict=True):
            paths.append(out / f"{name}-{number:03}.png")
            image.save(paths[-1])
    return paths


@contextmanager
def _of_size(size: int) -> Iterator[None]:
    """Within it, a size that the pipeline refuses is a UserError: each family's knows best what it can draw."""
    try:
        yield
    except ValueError as error:
        found = re.search(r"divisible by (\d+)", str(error))
        if not size or not found:
            raise
        multiple = int(found[1])
        raise UserError(
            f"size is {size}, but this model needs a multiple of {multiple}.", fix=f"Use {size // multiple * multiple or multiple}."
        ) from error


def told(model: Any, prompts: Sequence[str], negative: str) -> dict[str, Any]:
    """What the pipeline is called with, so that it reads prompts as captions were read in training."""
    arguments = dict(model.prompt_arguments(prompts))
    if negative:
        arguments |= {
            f"negative_{name}": value for name, value in model.prompt_arguments([negative] * len(prompts)).items() if name[:8] != "negative"
        }
    return {name: _in(model.pipeline.dtype, value) for name, value in arguments.items()}


def _in(dtype: Any, value: Any) -> Any:
    """In `dtype`, a tensor or a list of them, as some pipelines take texts."""
    return [_in(dtype, each) for each in value] if isinstance(value, list) else value.to(dtype)


def _guidance(model: Any, config: GenerateConfig) -> dict[str, float]:
    return {} if config.guidance is None else {model.facts.guided_by: config.guidance}


def names(prompts: Sequence[str]) -> list[str]:
    """A file name for each, by which a person recognises the prompt; all begin with the prompt's number where two would be the same."""
    found = [_slug(prompt) for prompt in prompts]
    return found if len({*found}) == len(found) else [f"{number}-{name}" for number, name in enumerate(found, 1)]


def _slug(prompt: str) -> str:
    """Its letters, marks and digits of any script. File systems take 255 bytes, eCryptfs 143: 120 leave room for numbers."""
    kept = (char if unicodedata.category(char)[0] in "LMN" else "-" for char in unicodedata.normalize("NFC", prompt.lower()))
    text = re.sub("-+", "-", "".join(kept)).strip("-")[:60]
    return text.encode()[:120].decode(errors="ignore") or "picture"


def cli() -> int:
    return run_program(lambda: main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(cli())
