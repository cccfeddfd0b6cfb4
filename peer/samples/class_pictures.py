"""Prior preservation, as in DreamBooth (arXiv:2208.12242, section 3.3): every picture is trained together with one of its class as the
model itself draws it, so that learning one dog does not turn all dogs into it.
"""

import io
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from peer.contracts import Model, Sample
from peer.drawing.validation import untouched
from peer.machine.device import Precision, RankGroup
from swarm.errors import ExitCode, UserError
from swarm.files import replace

log = logging.getLogger(__name__)

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


class ClassPictures:
    """The first `count` pictures of a folder by name; which of them accompanies a sample is decided by the seed and the sample's key.

    weight: of their losses. Raises UserError when there is none.
    """

    def __init__(self, folder: Path, prompt: str, *, count: int, weight: float, seed: int):
        self.weight, self._prompt, self._seed = weight, prompt, seed
        self._paths = pictures_in(folder)[:count]
        if not self._paths:
            raise UserError(f"{folder} holds no pictures of the class.", fix="Raise --num_class_images: then they are drawn.")

    def beside(self, sample: Sample) -> Sample:
        path = random.Random(f"class:{self._seed}:{sample.key}").choice(self._paths)
        try:
            return Sample(f"{path.name} with {sample.key}", path.read_bytes(), self._prompt)
        except OSError:
            return Sample(f"{path.name} with {sample.key}", b"", self._prompt)  # left out, and warned of, like any that is no picture


def draw_class_pictures(
    model: Model,
    folder: Path,
    prompt: str,
    *,
    count: int,
    batch: int,
    side: int,
    denoising_steps: int,
    seed: int,
    precision: Precision,
    group: RankGroup,
) -> None:
    """Fill `folder` up to `count` pictures. Each has a seed of its own, so that drawing that was interrupted goes on with the same ones.

    All ranks call it; rank 0 draws, `batch` at a time, and the others wait for that long at most.
    """
    missing = group.broadcast_object(_missing(folder, count) if group.is_main else None)
    if missing and group.is_main:
        log.info("drawing %d pictures of '%s' into %s", len(missing), prompt, folder)
    for first in _progress(range(0, len(missing), batch), group):
        if group.is_main:
            numbers = missing[first : first + batch]
            for number, picture in zip(numbers, _draw(model, prompt, numbers, side, denoising_steps, seed, precision), strict=True):
                file = io.BytesIO()
                picture.save(file, "PNG")
                replace(folder / _name(number), file.getvalue())
        group.barrier()


def pictures_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in _SUFFIXES) if folder.is_dir() else []


def _missing(folder: Path, count: int) -> list[int]:
    """Numbers of the pictures to draw. Raises UserError when they cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}.", fix="Choose another --class_data_dir.", code=ExitCode.DISK) from None
    there = {path.name for path in pictures_in(folder)}
    free = [number for number in range(count) if _name(number) not in there]
    return free[: max(0, count - len(there))]


def _name(number: int) -> str:
    return f"class-{number:05}.png"


def _draw(model: Model, prompt: str, numbers: Sequence[int], side: int, steps: int, seed: int, precision: Precision) -> Sequence:
    with torch.no_grad(), precision.autocast(), untouched(model, precision.device):
        generators = [torch.Generator().manual_seed(seed * 1_000_003 + number) for number in numbers]
        return model.pipeline([prompt] * len(numbers), num_inference_steps=steps, height=side, width=side, generator=generators).images


def _progress(steps: range, group: RankGroup):
    from tqdm import tqdm

    return tqdm(steps, desc="class pictures", disable=None if group.is_main and steps else True)
