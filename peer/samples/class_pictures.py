"""Prior preservation, as in DreamBooth (arXiv:2208.12242, section 3.3): every picture is trained together with one of its class as the
model itself draws it, so that learning one dog does not turn all dogs into it.
"""

import dataclasses
import functools
import io
import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from peer.config import PeerConfig
from peer.contracts import Model, Sample
from peer.drawing.validation import untouched
from peer.machine.device import Precision, RankGroup
from swarm.digest import digest_model
from swarm.errors import ExitCode, UserError
from swarm.files import replace
from swarm.picture_folder import IMAGE_SUFFIXES
from swarm.run.method import method_named
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

_DRAWN = "class.json"


@dataclass(frozen=True)
class Drawing:
    """How class pictures are drawn: the prompt, the model's digest, the side in pixels. Kept in `class.json` beside them."""

    prompt: str
    model: str
    """'': unknown, as earlier versions kept it of a run alone."""
    side: int

    def __str__(self) -> str:
        return f"'{self.prompt}' of {self.side} px, by model {self.model[:16] or 'unknown'}"

    def check(self, folder: Path) -> None:
        """Raise UserError where other pictures were drawn into `folder`: they would be trained under this prompt. A user's own have no class.json."""
        try:
            before = Drawing(**json.loads((folder / _DRAWN).read_bytes()))
        except (OSError, ValueError, TypeError):  # there is none, or it is not ours
            return
        if before not in (self, dataclasses.replace(self, model="")) and any(folder.glob("class-*.png")):
            raise UserError(f"{folder} holds pictures of {before}, not of {self}.", fix="Choose another --class_data_dir.")

    def keep(self, folder: Path) -> None:
        _write(folder / _DRAWN, json.dumps(dataclasses.asdict(self)).encode())


class ClassPictures:
    """The first `count` pictures of a folder by name; which of them accompanies a sample is decided by the seed and the sample's key.

    Rank 0's: they travel with the samples, since other ranks' machines need not have the folder. Raises UserError when there is none.
    """

    def __init__(self, folder: Path, prompt: str, *, count: int, seed: int):
        self._prompt, self._seed = prompt, seed
        self._paths = pictures_in(folder)[:count]
        if not self._paths:
            raise UserError(f"{folder} holds no pictures of the class.", fix="Raise --num_class_images: then they are drawn.")

    def beside(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        return tuple(map(self._beside, samples))

    def _beside(self, sample: Sample) -> Sample:
        path = random.Random(f"class:{self._seed}:{sample.key}").choice(self._paths)
        try:
            return Sample(f"{path.name} with {sample.key}", path.read_bytes(), self._prompt)
        except OSError:
            return Sample(f"{path.name} with {sample.key}", b"", self._prompt)  # left out, and warned of, like any that is no picture


def check_prior(peer: PeerConfig, run: RunConfig) -> None:
    if peer.with_prior_preservation and not method_named(run.method).changes_model:
        raise UserError(
            f"with_prior_preservation has nothing to preserve: {run.method} changes nothing of the model.",
            fix="Remove --with_prior_preservation.",
        )


def prepare(
    model: Model, run: RunConfig, peer: PeerConfig, precision: Precision, group: RankGroup, stopping: Callable[[], bool], source: Path
) -> ClassPictures | None:
    """Rank 0's pictures of the class that accompany this peer's own, those that are missing drawn with the base model; None on other ranks.

    source: where that is, whose digest nobody has worked out alone.
    """
    folder, count = Path(peer.class_data_dir), peer.num_class_images
    if peer.base_precision != "auto" and group.broadcast_object(bool(_missing(folder, count)) if group.is_main else None):
        raise UserError(
            f"{folder} lacks pictures of the class, and with --base_precision {peer.base_precision} this peer would draw them with rounded weights.",
            fix=f"Give a --class_data_dir that holds {count}, or start once without --base_precision.",
        )
    sizes = {"count": count, "batch": peer.train_batch_size, "denoising_steps": peer.validation_inference_steps}
    asks = group.is_main and bool(_missing(folder, count) or (folder / _DRAWN).exists())  # a digest takes a minute: not for a user's own pictures
    digest = run.model_digest or (digest_model(source) if asks else "")
    wanted = Drawing(peer.class_prompt, digest, run.resolution)
    draw_class_pictures(model, folder, wanted, seed=run.seed, precision=precision, group=group, stopping=stopping, **sizes)
    return ClassPictures(folder, peer.class_prompt, count=count, seed=run.seed) if group.is_main else None


def draw_class_pictures(
    model: Model,
    folder: Path,
    wanted: Drawing,
    *,
    count: int,
    batch: int,
    denoising_steps: int,
    seed: int,
    precision: Precision,
    group: RankGroup,
    stopping: Callable[[], bool],
) -> None:
    """Fill rank 0's `folder` up to `count` pictures. Each has a seed of its own, so that drawing that was interrupted goes on with the same ones.

    All ranks call it, and each draws `batch` at a time. Raises SystemExit when someone asks to stop meanwhile, which may be for hours on a
    CPU; and UserError when the pictures cannot be written, or others were drawn into `folder`.
    """
    if group.is_main:
        wanted.check(folder)
    missing = group.broadcast_object(_missing(folder, count) if group.is_main else None)
    if missing and group.is_main:
        log.info("drawing %d pictures of '%s' into %s", len(missing), wanted.prompt, folder)
        wanted.keep(folder)

    @functools.cache
    def told(pictures: int) -> dict[str, Any]:
        """What the text encoders say of the prompt, asked once: --offload would bring them for each batch."""
        return {**model.prompt_arguments([wanted.prompt] * pictures), **model.drawn_with}

    for first in _progress(range(0, len(missing), batch * group.world), group):
        if group.broadcast_object(stopping()):
            log.info("stopped before all pictures of the class were drawn; the next start draws the rest")
            raise SystemExit(ExitCode.OK)
        # Shares of equal length: a rank that waits for more than ten minutes for the others takes them for lost.
        own = missing[first : first + batch * group.world][group.rank :: group.world]
        drawn = group.gather([*zip(own, _draw(model, told, own, wanted.side, denoising_steps, seed, precision), strict=True)] if own else [])
        for number, picture in chain.from_iterable(drawn) if group.is_main else ():
            _write(folder / _name(number), picture)


def pictures_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in IMAGE_SUFFIXES) if folder.is_dir() else []


def _missing(folder: Path, count: int) -> list[int]:
    """Numbers of the pictures to draw. Raises UserError when they cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_room(folder, "made", error) from None
    there = {path.name for path in pictures_in(folder)}
    free = [number for number in range(count) if _name(number) not in there]
    return free[: max(0, count - len(there))]


def _write(path: Path, data: bytes) -> None:
    try:
        replace(path, data)
    except OSError as error:
        raise _no_room(path, "written", error) from None


def _no_room(path: Path, done: str, error: OSError) -> UserError:
    return UserError(f"{path} cannot be {done}: {error.strerror}.", fix="Choose another --class_data_dir.", code=ExitCode.DISK)


def _name(number: int) -> str:
    return f"class-{number:05}.png"


def _draw(
    model: Model, told: Callable[[int], dict[str, Any]], numbers: Sequence[int], side: int, steps: int, seed: int, precision: Precision
) -> list[bytes]:
    """Each as a PNG. told: the pipeline's arguments for a number of pictures: what they show."""
    with torch.no_grad(), precision.autocast(), untouched(model, precision.device):
        generators = [torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**64) for number in numbers]
        pictures = model.pipeline(**told(len(numbers)), num_inference_steps=steps, height=side, width=side, generator=generators).images
    files = [io.BytesIO() for _ in pictures]
    for picture, file in zip(pictures, files, strict=True):
        picture.save(file, "PNG")
    return [file.getvalue() for file in files]


def _progress(steps: range, group: RankGroup):
    from tqdm import tqdm

    return tqdm(steps, desc="class pictures", disable=None if group.is_main and steps else True)
