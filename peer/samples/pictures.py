"""From the bytes of a picture to pixels of the size asked for. No torch here, so that decoding processes start fast and stay small."""

import io
import random
import signal
from dataclasses import dataclass

import numpy as np
from PIL import Image

from swarm.lifeline import die_with_parent

FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
MAX_PIXELS = 64 << 20
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF's orientation: what turns the pixels as people see the picture. Cameras write them as the sensor lay."""
_ON_ITS_SIDE = 5  # and above


class BadPicture(Exception):
    """The bytes are no picture that we read, and why."""


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


@dataclass(frozen=True)
class Framed:
    """pixels: (height, width, 3) uint8."""

    pixels: np.ndarray
    geometry: tuple[int, ...]
    """The upright picture's height and width; top and left of the crop in the resized (and mirrored) picture; the crop's height and width."""


def try_decode(data: bytes, frame: Frame) -> "Framed | BadPicture":
    """`decode`, or why it could not be done: an answer that travels between processes."""
    try:
        return decode(data, frame)
    except BadPicture as error:
        return error


def decode(data: bytes, frame: Frame) -> Framed:
    """The picture in its frame. Raises BadPicture."""
    rng = random.Random(frame.seed)
    picture, original = _open(data, (frame.width, frame.height))
    target = (frame.width, frame.height)
    scale = max(side / length for side, length in zip(target, picture.size, strict=True))
    if scale != 1:
        size = tuple(max(side, round(length * scale)) for side, length in zip(target, picture.size, strict=True))
        picture = picture.resize(size, Image.Resampling[frame.interpolation.upper()])
    space = [length - side for side, length in zip(target, picture.size, strict=True)]
    left, top = (length // 2 if frame.center_crop else rng.randint(0, length) for length in space)
    if space != [0, 0]:
        picture = picture.crop((left, top, left + frame.width, top + frame.height))
    pixels = np.asarray(picture)
    if frame.mirrored:
        pixels, left = pixels[:, ::-1], space[0] - left
    return Framed(pixels, (original[1], original[0], top, left, frame.height, frame.width))


def size_of(data: bytes) -> tuple[int, int] | None:
    """(width, height) of the upright picture as the file's header says; None when it is no picture of ours."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            return _turned(picture.size, _orientation(picture, data))
    except Exception:  # as below
        return None


def orientation_of(data: bytes) -> int:
    """EXIF's, 2 to 8; 1 where nothing is to be turned, or it is no picture of ours. The pixels are not decoded."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            return _orientation(picture, data)
    except Exception:  # as below
        return 1


def _orientation(picture: Image.Image, data: bytes) -> int:
    """data: the picture's. What is damaged in the EXIF does not make the picture one that cannot be trained on."""
    # Pillow decodes a whole PNG to look for EXIF behind its pixels.
    before_pixels = picture.format == "PNG" and b"eXIf" not in data
    try:
        exif = Image.Image.getexif(picture) if before_pixels else picture.getexif()
        found = exif.get(_ORIENTATION, 1)
    except Exception:  # SyntaxError, struct.error, ValueError, ...
        return 1
    return found if found in _UPRIGHT else 1


def _turned(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    return size[::-1] if orientation >= _ON_ITS_SIDE else size


def _open(data: bytes, covering: tuple[int, int]) -> tuple[Image.Image, tuple[int, int]]:
    """The upright picture in RGB, perhaps smaller than in the file but not than `covering`, and its (width, height) in the file."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            orientation = _orientation(picture, data)
            size = _turned(picture.size, orientation)
            if picture.width * picture.height > MAX_PIXELS:
                raise BadPicture(f"{picture.width}x{picture.height} pixels are more than {MAX_PIXELS}")
            picture.draft("RGB", _turned(covering, orientation))  # decodes a large JPEG at a half, quarter or eighth that still covers
            rgb = _on_white(picture) if picture.has_transparency_data else picture.convert("RGB")
            return (rgb.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else rgb), size
    except BadPicture:
        raise
    except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, struct.error, DecompressionBombError, ... on hostile bytes
        raise BadPicture(str(error).splitlines()[0][:120] if str(error) else type(error).__name__) from error


def _on_white(picture: Image.Image) -> Image.Image:
    """Transparent pixels hide arbitrary colours; what people see in a browser or a viewer is white behind."""
    rgba = picture.convert("RGBA")
    white = Image.new("RGB", rgba.size, "white")
    white.paste(rgba, mask=rgba.getchannel("A"))
    return white


def start_worker() -> None:
    """Prepare a decoding process: the trainer alone decides when it ends, and it does not outlive the trainer, however that dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
