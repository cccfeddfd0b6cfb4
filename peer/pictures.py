"""From the bytes of a picture to a square of pixels. No torch here, so that decoding processes start fast and stay small."""

import io
import random
import signal

import numpy as np
from PIL import Image

from swarm.lifeline import die_with_parent

FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
MAX_PIXELS = 64 << 20


class BadPicture(Exception):
    """The bytes are no picture that we read, and why."""


def try_square(data: bytes, side: int, **options) -> "np.ndarray | BadPicture":
    """`decode_square`, or why it could not be done: an answer that travels between processes."""
    try:
        return decode_square(data, side, **options)
    except BadPicture as error:
        return error


def decode_square(data: bytes, side: int, *, center_crop: bool, random_flip: bool, seed: str) -> np.ndarray:
    """(side, side, 3) uint8: the picture's short side is resized to `side`, a square is cropped, half are mirrored if asked.

    seed: decides crop and flip, whoever decodes and whenever. Raises BadPicture.
    """
    rng = random.Random(seed)
    picture = _open(data, side)
    scale = side / min(picture.size)
    if scale != 1:
        size = tuple(max(side, round(length * scale)) for length in picture.size)
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    space = [length - side for length in picture.size]
    left, top = (length // 2 if center_crop else rng.randint(0, length) for length in space)
    if space != [0, 0]:
        picture = picture.crop((left, top, left + side, top + side))
    pixels = np.asarray(picture)
    return pixels[:, ::-1] if random_flip and rng.random() < 0.5 else pixels


def _open(data: bytes, side: int) -> Image.Image:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise BadPicture(f"{picture.width}x{picture.height} pixels are more than {MAX_PIXELS}")
            picture.draft("RGB", (side, side))  # decodes a large JPEG at a half, quarter or eighth that still covers `side`
            return _on_white(picture) if picture.has_transparency_data else picture.convert("RGB")
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
