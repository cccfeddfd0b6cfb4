"""One picture and its caption, checked: whatever comes out can be decoded by every peer; whatever cannot is a BadSample.

Pictures are fully decoded here, once, so that no peer meets a truncated file in the middle of a run.
"""

import io
import warnings
from typing import NamedTuple

from PIL import Image

from datasetserver.bare import Damaged, bare
from swarm.captions import Captions
from swarm.picture_file import FORMATS, has_mask, opened, orientation_of, upright_rgb, upright_rgba
from swarm.picture_folder import Pair


class Picture(NamedTuple):
    """An encoded upright picture, RGB or with a mask RGBA, of width x height pixels. change: what was done to make it one; empty when nothing.

    masked: whether it has one.
    """

    data: bytes
    width: int
    height: int
    change: str = ""
    masked: bool = False


class Sample(NamedTuple):
    """A picture and its captions, each of one line, ready for a shard."""

    picture: Picture
    captions: Captions
    weight: float = 1.0


def load_sample(pair: Pair) -> Sample:
    """The picture with the bytes that it has where they are upright RGB already, else as a PNG. Raises BadSample."""
    captions = pair.captions()
    return Sample(normalise(pair.read(), pair.masked), captions, pair.weight)


def normalise(data: bytes, masked: bool = False) -> Picture:
    """Decode a picture in full and return it as upright RGB, encoded, and nothing but its pixels. Raises BadSample.

    What is upright RGB keeps its encoding, without metadata; all else becomes a PNG. masked: transparency is a mask, and stays.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with opened(data) as image:
            image.load()
            orientation = orientation_of(image, data)
            masked = masked and has_mask(image)
            changes = _changes(image, orientation, masked)
            if not changes and (plain := _without_metadata(data, image)):
                return Picture(plain, *image.size, "metadata removed" if len(plain) < len(data) else "", masked)
            rgb = (upright_rgba if masked else upright_rgb)(image, orientation)
            return Picture(_as_png(rgb), *rgb.size, ", ".join(changes or ["damaged beside its pixels: written as PNG"]), masked)


def _without_metadata(data: bytes, image: Image.Image) -> bytes | None:
    """`data`, whose pixels are in `image`, without its metadata; None where it cannot be told apart from the pixels."""
    try:
        plain = bare(data, image.format)
        return plain if plain == data or _same_pixels(plain, image) else None
    except Damaged:
        return None


def _same_pixels(data: bytes, image: Image.Image) -> bool:
    """Whether `data`, which nobody has decoded so far, is that picture."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as again:
            return (again.mode, again.size, again.tobytes()) == (image.mode, image.size, image.tobytes())
    except Exception:  # as in `normalise`
        return False


def _changes(image: Image.Image, orientation: int, masked: bool) -> list[str]:
    """What must be done to make it upright RGB, or RGBA, in a format that compresses, in words; nothing for most pictures."""
    changes = []
    if image.format == "BMP":
        changes.append("BMP written as PNG")
    if (frames := getattr(image, "n_frames", 1)) > 1:
        changes.append(f"the first of {frames} frames")
    if image.mode != (mode := "RGBA" if masked else "RGB"):
        changes.append(f"{image.mode} made {mode}")
    if image.has_transparency_data and not masked:
        changes.append("put on white")
    if orientation != 1:
        changes.append("turned upright")
    return changes


def _as_png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    # Pixels only: no EXIF, profiles or comments. Level 4 takes a third to all of the time of 6, and 0 to 4 % more bytes.
    Image.frombytes(image.mode, image.size, image.tobytes()).save(out, "PNG", compress_level=4)
    return out.getvalue()
