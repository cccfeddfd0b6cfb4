"""Stable Diffusion 1.5 at its full size on a GPU: pictures per second and peak memory, and whether it fits on a card of 12 GB.

    .venv/bin/python benchmarks/gpu_sd15.py                        all rows, at most 15 minutes; needs a CUDA GPU, 20 GB of disk, 16 GiB of memory
    .venv/bin/python benchmarks/gpu_sd15.py --tiny --device cpu    the same rows with tiny weights, to try them: these figures mean nothing

The model has random weights and the real one's sizes, pictures are 512 px. Each row is the program's own trainer, put together from a
command line as a peer's is, in a process of its own: one that runs out of memory says so, and the next goes on. Only checkpoints are left
out. Timed after warming up, which includes each picture once where caches are filled, between two synchronizations with the GPU.

Peak memory is what PyTorch's allocator gave out (`peak`) and held (`reserved`) from the start to the end, loading included; CUDA's own
context, some 0.4 GiB, is beside it. So a capped row may hold 1 GiB less than its card has.

Against: the original's table (its README; A100, full, 8-bit Adam, float32 with TF32, VAE and text encoder in the loop: 3.05 images/s and 17.4 GB at
batch 1, 4.6 and 37 GB at 4, 5.7 and 63 GB at 8) and MosaicML's 36 images/s per A100 (SD 2 base at 512 px, latents precomputed).
"""

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel

from benchmarks.common import argument_parser, print_result, print_table, start
from benchmarks.on_gpu import Way, about_gpu, check_gpu, in_a_process, say
from peer.models.diffusion.source import quiet
from scripts.demo import quickstart, tiny_model
from swarm.errors import ExitCode

BATCHES = (16, 8, 1, 4)
SEED = {1: (3.05, 17.4), 4: (4.6, 37.0), 8: (5.7, 63.0)}
"""The original's images/s and GB on an A100, by batch."""
MOSAIC = 36.0
LIMIT_SECONDS = 14 * 60.0
"""Of all rows; the rest of 15 minutes is for making the model, and for the last row to end."""
ROW_SECONDS = 240.0
_CAPTIONS = ("a red square", "a green square", "a blue square", "a white square")


@dataclass(frozen=True)
class Sizes:
    """Of a Stable Diffusion 1: the UNet's and the VAE's widths by level, and the text encoder's width and layers."""

    unet: tuple[int, ...] = (320, 640, 1280, 1280)
    vae: tuple[int, ...] = (128, 256, 512, 512)
    text: int = 768
    text_layers: int = 12
    text_heads: int = 12
    side: int = 512
    """Of a picture, in pixels."""
    pictures: int = 32
    warm_steps: int = 6
    steps: int = 3
    """To measure, at the least."""
    seconds: float = 8.0
    """To measure for, at the least."""


FULL = Sizes()
TINY = Sizes(
    unet=(32, 32, 64, 64), vae=(32,) * 4, text=32, text_layers=2, text_heads=4, side=64, pictures=2, warm_steps=1, steps=1, seconds=0.0
)


@dataclass(frozen=True)
class Row:
    """One way to train: the program's flags, and how much of the GPU it may use."""

    name: str
    batch: int
    flags: tuple[str, ...]
    card_gb: int = 0
    """Of the card that it is to fit on; 0: whatever there is."""

    @property
    def cap_gib(self) -> float:
        """What its allocator may hold; 0: no limit."""
        return self.card_gb - 1.0 if self.card_gb else 0.0

    @property
    def cached(self) -> bool:
        return "--cache_latents" in self.flags


CACHES = ("--cache_latents", "--cache_text")
EIGHT_BIT = ("--optimizer", "adamw8bit")
CHECKPOINTING = ("--gradient_checkpointing",)


def rows() -> list[Row]:
    """The most wanted first: where time runs out, the last are left out."""
    ways = {
        "8-bit, caches": (*EIGHT_BIT, *CACHES),
        "8-bit": EIGHT_BIT,
        "8-bit, caches, checkpointing": (*EIGHT_BIT, *CACHES, *CHECKPOINTING),
        "caches": ("--optimizer", "adamw", *CACHES),
    }
    capped = [
        Row("full on 12 GB", 1, (*EIGHT_BIT, *CACHES, *CHECKPOINTING), card_gb=12),
        Row("LoRA on 8 GB", 1, ("--method", "lora", "--rank", "16", *EIGHT_BIT, *CACHES, *CHECKPOINTING), card_gb=8),
    ]
    plain = [Row(name, batch, flags) for name, flags in ways.items() for batch in BATCHES]
    compiled = [Row("8-bit, caches, compile", batch, (*EIGHT_BIT, *CACHES, "--compile")) for batch in BATCHES]
    return plain[: len(BATCHES)] + capped + plain[len(BATCHES) :] + compiled


@dataclass(frozen=True)
class Setup:
    """Where a row finds its model and pictures, and where it runs."""

    folder: Path
    sizes: Sizes
    device: str

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny weights and pictures: tries the rows, measures nothing")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --tiny [cuda]")
    parser.add_argument("--rows", default="", help="only those with this word in their name")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS / 60, metavar="MINUTES", help="for all rows; the last are left out [%(default)g]")
    return start(parser, lambda options: measure_all(options.device, TINY if options.tiny else FULL, options.rows, 60 * options.limit))


def measure_all(device: str, sizes: Sizes, word: str = "", seconds: float = LIMIT_SECONDS) -> int:
    check(device, sizes)
    began = time.monotonic()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gpu-sd15-") as name:
        setup = Setup(Path(name), sizes, device)
        say("making the model and its pictures")
        prepare(setup)
        for row in (row for row in rows() if word in row.name):
            left = seconds - (time.monotonic() - began)
            answer = in_a_process(way(row, setup), min(left, ROW_SECONDS)) if left > 20 else {"note": "no time was left"}
            found.append({"row": row.name, "batch": row.batch, **answer})
            say(" ".join(f"{key}={value}" for key, value in found[-1].items()))
    print_table([in_table(one) for one in found])
    print_result({"rows": found, **verdict(found), "tiny": sizes is TINY, **about_gpu(device)})
    return ExitCode.FAILED if any(one.get("failed") for one in found) else ExitCode.OK


def check(device: str, sizes: Sizes) -> None:
    """Raises UserError when the rows cannot run there."""
    if device == "cpu" and sizes is TINY:
        return
    check_gpu(device, instead="--tiny --device cpu tries its rows without.")


def in_table(one: dict[str, Any]) -> dict[str, Any]:
    """A row of the printed table: with the original's figures beside it where they are of the same."""
    seed = SEED.get(one["batch"]) if one["row"] == "8-bit" else None
    shown = {"": one["row"], "batch": one["batch"], "images/s": one.get("images_per_second", "")}
    shown |= {"peak GiB": one.get("peak_gib", ""), "reserved GiB": one.get("reserved_gib", "")}
    shown |= {"A100 then": seed[0] if seed else "", "GB then": seed[1] if seed else "", "note": one.get("note", "")}
    return shown


def verdict(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios to the others' figures, which are of an A100, and whether the capped rows fit."""
    speeds = {(one["row"], one["batch"]): one["images_per_second"] for one in found if one.get("images_per_second")}
    best = max(speeds.values(), default=0.0)
    over = {str(batch): speeds["8-bit", batch] / speed for batch, (speed, _) in SEED.items() if ("8-bit", batch) in speeds}
    fits = {one["row"]: bool(one.get("images_per_second")) for one in found if one.get("cap_gib")}
    return {"ratio_to_the_original": over, "best_ratio_to_mosaic": best / MOSAIC, "fits": fits}


def way(row: Row, setup: Setup) -> Way:
    """The peer's command line of a row. Pictures are decoded beside the training, as whoever has a GPU would do it."""
    sizes, folder = setup.sizes, setup.folder
    options = {
        "model": folder / "base", "train_data_dir": folder / "pictures", "output_dir": folder / "out", "cache_dir": folder / "cache",
        "resolution": sizes.side, "train_batch_size": row.batch, "seed": 0, "ucg": 0, "learning_rate": 1e-6, "lr_scheduler": "constant",
        "total_samples": 10**9, "checkpoints_total_limit": 1, "dataloader_num_workers": 4 if setup.on_gpu else 0, "device": setup.device,
    }  # fmt: skip
    given = (*(f"--{name}={value}" for name, value in options.items()), "--center_crop", *row.flags)
    # Caches are full once every picture was seen.
    once = -(-sizes.pictures // row.batch) if row.cached else 0
    return Way(
        f"{row.name}, batch {row.batch}", given, setup.device, cap_gib=row.cap_gib, warm_steps=max(once, sizes.warm_steps), steps=sizes.steps,
        seconds=sizes.seconds, eager=sizes is TINY,
    )  # fmt: skip


# -------------------------------------------------------------------- the model and its pictures


def prepare(setup: Setup) -> None:
    quickstart.quiet_libraries()
    quiet()
    torch.manual_seed(0)
    build(setup.sizes).save_pretrained(setup.folder / "base")
    folder, rng, side = setup.folder / "pictures", random.Random(0), setup.sizes.side
    folder.mkdir()
    for number in range(setup.sizes.pictures):
        coarse = Image.frombytes("RGB", (20, 16), rng.randbytes(20 * 16 * 3))
        coarse.resize((side * 5 // 4, side), Image.Resampling.BICUBIC).save(folder / f"{number:03}.jpg", quality=90)
        (folder / f"{number:03}.txt").write_text(_CAPTIONS[number % len(_CAPTIONS)], encoding="utf-8")


def build(sizes: Sizes, captions: Sequence[str] = _CAPTIONS) -> StableDiffusionPipeline:
    """Random weights: 860 million in the UNet, 84 in the VAE and 123 in the text encoder at full size, as Stable Diffusion 1.5 has them."""
    tokenizer = tiny_model.make_tokenizer(captions)
    text = CLIPTextConfig(
        vocab_size=49408, hidden_size=sizes.text, intermediate_size=4 * sizes.text, num_hidden_layers=sizes.text_layers,
        num_attention_heads=sizes.text_heads, max_position_embeddings=77, projection_dim=sizes.text,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=sizes.vae, down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4, layers_per_block=2, sample_size=sizes.side, scaling_factor=0.18215,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=sizes.side // 8, block_out_channels=sizes.unet, cross_attention_dim=sizes.text, attention_head_dim=8
    )
    return StableDiffusionPipeline(
        vae=vae, text_encoder=CLIPTextModel(text), tokenizer=tokenizer, unet=unet, scheduler=DDPMScheduler(**tiny_model.SCHEDULE, clip_sample=False, steps_offset=1),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
