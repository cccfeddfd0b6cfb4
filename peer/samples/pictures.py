"""From the bytes of a picture to pixels of the size asked for. No torch here, so that decoding processes start fast and stay small."""

import random
import signal
from dataclasses import dataclass

import numpy as np
from PIL import Image

from swarm.picture_file import (
    MAX_PIXELS,
    BadSample,
    has_mask,
    is_deep_grey,
    opened,
    orientation_of,
    turned,
    upright_mask,
    upright_rgb,
    upright_rgba,
)


@dataclass(frozen=True)
class Frame:
    """What a picture is fitted into: resized until it covers width x height, cropped to that, and mirrored if asked."""

    width: int
    height: int
    center_crop: bool = True
    seed: str = ""
    """Where a crop that is not of the centre lies, whoever decodes and whenever."""
    mirrored: bool = False
    interpolation: str = "lanczos"
    masked: bool = False
    """Whether transparency says where the loss counts; else what is transparent is white."""


@dataclass(frozen=True)
class Framed:
    """pixels: (height, width, 3) uint8."""

    pixels: np.ndarray
    geometry: tuple[int, ...]
    """The upright picture's height and width; top and left of the crop in the resized (and mirrored) picture; the crop's height and width."""
    mask: np.ndarray | None = None
    """(height, width) uint8, 255 where the loss counts; None: everywhere."""


def try_decode(data: bytes, frame: Frame, mask: bytes = b"") -> "Framed | BadSample":
    """`decode`, or why it could not be done: an answer that travels between processes."""
    try:
        return decode(data, frame, mask)
    except BadSample as error:
        return error
    except MemoryError:  # of what comes after the file was read, such as resizing; a limit of the process (RLIMIT_AS) brings it
        return BadSample("there is not enough memory to resize it")


def decode(data: bytes, frame: Frame, mask: bytes = b"") -> Framed:
    """The picture in its frame. mask: a picture of where the loss counts, in place of its own transparency. Raises BadSample."""
    rng, target = random.Random(frame.seed), (frame.width, frame.height)
    with opened(data) as image:
        orientation = orientation_of(image, data)
        original = turned(image.size, orientation)
        image.draft("RGB", turned(target, orientation))  # decodes a large JPEG at a half, quarter or eighth that still covers
        own = frame.masked and not mask and has_mask(image)
        layers = _picture_and_mask(image, orientation) if own else [upright_rgb(image, orientation)]
    size = layers[0].size
    if mask:
        layers.append(upright_mask(mask, original).resize(size, Image.Resampling.BOX))
    scale = max(side / length for side, length in zip(target, size, strict=True))
    if scale != 1:
        size = tuple(max(side, round(length * scale)) for side, length in zip(target, size, strict=True))
        # To cover 2048x2048, a 20x1000 picture would get 210 million pixels. The crop keeps 4 million.
        if size[0] * size[1] > MAX_PIXELS:
            raise BadSample("{}x{} is too narrow for {}x{}: resized it would have {}x{} pixels".format(*original, *target, *size))
        layers = [layer.resize(size, Image.Resampling[frame.interpolation.upper()]) for layer in layers]
    space = [length - side for side, length in zip(target, size, strict=True)]
    left, top = (length // 2 if frame.center_crop else rng.randint(0, length) for length in space)
    if space != [0, 0]:
        layers = [layer.crop((left, top, left + frame.width, top + frame.height)) for layer in layers]
    found = [np.asarray(layer) for layer in layers]
    if frame.mirrored:
        found, left = [layer[:, ::-1] for layer in found], space[0] - left
    return Framed(found[0], (original[1], original[0], top, left, frame.height, frame.width), *found[1:])


def _picture_and_mask(image: Image.Image, orientation: int) -> list[Image.Image]:
    """Apart: resized as one picture, what the mask hides would become black."""
    rgba = upright_rgba(image, orientation)
    return [rgba.convert("RGB"), rgba.getchannel("A")]


def size_of(data: bytes) -> tuple[int, int] | None:
    """(width, height) of the upright picture as the file's header says; None when it is no picture of ours."""
    try:
        with opened(data) as image:
            return turned(image.size, orientation_of(image, data))
    except BadSample:
        return None


def read_otherwise(data: bytes) -> list[int]:
    """How its pixels are read otherwise than by Pillow alone: EXIF's orientation, 2 to 8, and 16 for a grey of 16 bits; usually empty."""
    try:
        with opened(data) as image:
            return [*([turn] if (turn := orientation_of(image, data)) != 1 else []), *([16] if is_deep_grey(image) else [])]
    except BadSample:
        return []


def start_worker() -> None:
    """Prepare a decoding process: the trainer alone decides when it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # Ctrl-C and a closed terminal reach the whole process group
        signal.signal(number, signal.SIG_IGN)
