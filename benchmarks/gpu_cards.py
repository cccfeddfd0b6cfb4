"""The rows that benchmarks/device_memory.py counts, on a GPU that may give out no more than their card has: peak memory, and pictures per second.

    .venv/bin/python benchmarks/gpu_cards.py                         the rows of examples/; a CUDA GPU, 50 GB of disk, 64 GiB of memory, some 20 minutes
    .venv/bin/python benchmarks/gpu_cards.py --rows FLUX "SDXL, lora"   all rows with such a word in their name
    .venv/bin/python benchmarks/gpu_cards.py --models FOLDER --make  makes their models only, for a later run with the same folder
    .venv/bin/python benchmarks/gpu_cards.py --tiny --device cpu     the same rows with tiny weights, to try them: these figures mean nothing

Models have random weights in bf16 and the real ones' sizes; each row is the program's own trainer in a process of its own (benchmarks/on_gpu.py). Its
allocator may hold what the card has less 1 GB, so a row that ends fits. `counted` is the count of the same options (benchmarks/records/device_memory.json),
`ratio` measured over counted. Pictures per second are this GPU's, not the card's: the model's parts and captions move as the options say. GB are 10^9 bytes.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from PIL import Image

from benchmarks.cards import RANK, ROWS, SPARE, Row, read_table
from benchmarks.common import argument_parser, print_result, print_table, start
from benchmarks.device_memory import SIZES, Size, at_full_size, filled, rows_of_examples
from benchmarks.on_gpu import GIB, Way, about_gpu, check_gpu, in_a_process, say
from peer.models.diffusion.source import quiet
from scripts.demo import quickstart
from swarm.errors import ExitCode, UserError
from tests import tiny

ROW_SECONDS = 240.0
PICTURES = 8


@dataclass(frozen=True)
class Setup:
    """Where models lie, and where rows run."""

    models: Path
    pictures: Path
    out: Path
    device: str
    tiny: bool


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--rows", nargs="+", default=[], metavar="WORD", help="those with one of these words in their name [those of examples/]")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="make models there, and keep them [a folder that is removed, one model at a time]")
    parser.add_argument("--make", action="store_true", help="make the models only")
    parser.add_argument("--tiny", action="store_true", help="tiny weights and pictures: tries the rows, measures nothing")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --tiny [cuda]")
    return start(parser, run)


def run(options: argparse.Namespace) -> int:
    rows = chosen(options.rows)
    if options.make and not options.models:
        raise UserError("--make is given without --models, so what it makes would be removed.", fix="Add --models FOLDER.")
    if not (options.make or (options.tiny and options.device == "cpu")):
        check_gpu(options.device, instead="--tiny --device cpu tries its rows without.")
    quickstart.quiet_libraries()
    quiet()
    with tempfile.TemporaryDirectory(prefix="gpu-cards-") as name:
        setup = Setup(options.models or Path(name) / "models", Path(name) / "pictures", Path(name) / "out", options.device, options.tiny)
        if options.make:
            for size in dict.fromkeys(row.size for row in rows):
                made(size, setup)
            return ExitCode.OK
        found = [in_table(row, answer) for row, answer in measured(rows, setup, keep=options.models is not None)]
    print_table(found)
    print_result({"rows": found, "tiny": setup.tiny, **about_gpu(setup.device)})
    return ExitCode.FAILED if any(one["failed"] for one in found) else ExitCode.OK


def chosen(words: Sequence[str]) -> list[Row]:
    """Rows of one model follow each other. Raises UserError when no row has such a word in its name."""
    rows = [row for row in ROWS if any(word.lower() in row.name.lower() for word in words)] if words else rows_of_examples()
    if not rows:
        raise UserError(f"No row has '{words[0]}' in its name.", fix=f"There are: {'; '.join(row.name for row in ROWS)}.")
    return rows


def measured(rows: Sequence[Row], setup: Setup, keep: bool) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row and what it took. A model lies on the disk while its rows run, or stays where it is to be kept."""
    for size in dict.fromkeys(row.size for row in rows):
        model = made(size, setup)
        with pictures_of(SIZES[size], setup) as pictures:
            for row in (row for row in rows if row.size == size):
                answer = in_a_process(way(row, model, pictures, setup), ROW_SECONDS)
                say(" ".join([row.name, *(f"{key}={value}" for key, value in answer.items())]))
                yield row, answer
                shutil.rmtree(setup.out, ignore_errors=True)
        if not keep:
            shutil.rmtree(model)


def way(row: Row, model: Path, pictures: Path, setup: Setup) -> Way:
    """A row's command line: the options of benchmarks/cards.py, and no more than its card has. A tiny model may take what there is."""
    options = {
        "model": model, "train_data_dir": pictures, "output_dir": setup.out, "cache_dir": setup.out / "cache", "device": setup.device,
        "resolution": 16 if setup.tiny else SIZES[row.size].side, "seed": 0, "learning_rate": 1e-6, "lr_scheduler": "constant", "total_samples": 10**9,
        "checkpoints_total_limit": 1, "method": row.method, "train_batch_size": row.batch, "mixed_precision": "bf16", "weights": row.weights,
        "optimizer": row.optimizer, "base_precision": row.base, "blocks_to_swap": row.swap,
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in options.items()] + ["--gradient_checkpointing"]
    flags += [f"--rank={RANK}"] * (row.method == "lora") + ["--offload"] * (row.offload and setup.device != "cpu") + ["--fused_step", "--clip_grad=tensor"] * row.fused
    timed = {"warm_steps": 1, "steps": 1, "seconds": 0.0} if setup.tiny else {"warm_steps": PICTURES, "steps": 2 * PICTURES}
    return Way(row.name, tuple(flags), setup.device, cap_gib=(row.card - SPARE) * 1e9 / GIB, **timed)


def in_table(row: Row, answer: dict[str, Any]) -> dict[str, Any]:
    """A row of the printed table, in GB."""
    counted = read_table().get(row)
    need = counted.need(row.offload) if counted else None
    peak, held = (answer[key] * GIB / 1e9 if key in answer else None for key in ("peak_gib", "reserved_gib"))
    return {
        "row": row.name,
        "card": row.card,
        "fits": "images_per_second" in answer,
        "counted": need,
        "peak": peak,
        "reserved": held,
        "ratio": peak / need if peak and need else None,
        "images_per_second": answer.get("images_per_second"),
        "note": answer.get("note", ""),
        "failed": bool(answer.get("failed")),
    }


# -------------------------------------------------------------------- models and pictures


def made(size: str, setup: Setup) -> Path:
    """The folder of a model at its full size, or a tiny one of its family: made, unless it is there."""
    folder = setup.models / "".join(letter if letter.isalnum() else "_" for letter in size)
    if not folder.exists():
        say(f"making {size} in {folder}")
        unfinished = folder.with_suffix(".unfinished")
        (tiny.build(SIZES[size].family) if setup.tiny else with_numbers(SIZES[size])).save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def with_numbers(size: Size) -> Any:
    """Its pipeline at full size with random weights in bf16, the VAE's as its class begins."""
    pipeline = at_full_size(size, lambda part: filled(part, torch.bfloat16))
    pipeline.vae = size.vae().to(torch.bfloat16)
    return pipeline


@contextmanager
def pictures_of(size: Size, setup: Setup) -> Iterator[Path]:
    """A folder of captioned pictures, as large as the model draws them."""
    rng, side = random.Random(0), 16 if setup.tiny else size.side
    setup.pictures.mkdir()
    for number in range(PICTURES):
        coarse = Image.frombytes("RGB", (16, 16), rng.randbytes(16 * 16 * 3))
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(setup.pictures / f"{number}.jpg", quality=90)
        (setup.pictures / f"{number}.txt").write_text(f"a photo of a toy {number}", encoding="utf-8")
    yield setup.pictures
    shutil.rmtree(setup.pictures)


if __name__ == "__main__":
    sys.exit(main())
