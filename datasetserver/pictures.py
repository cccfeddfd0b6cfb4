"""One picture and its caption, checked: whatever comes out can be decoded by every peer; whatever cannot is a BadSample.

Pictures are fully decoded here, once, so that no peer meets a truncated file in the middle of a run.
"""

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from datasetserver.bare import Damaged, bare
from swarm.picture_folder import Captions, one_line
from swarm.protocol import MAX_CAPTION_BYTES

FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
MAX_FILE_BYTES = 256 << 20
MAX_PIXELS = 100_000_000
MAX_SIDE_PIXELS = 32_768
_ORIENTATION = 0x0112


class BadSample(Exception):
    """A picture or caption that cannot be trained on; the text says why."""


class Picture(NamedTuple):
    """An encoded upright RGB picture of width x height pixels. change: what was done to make it one; empty when nothing."""

    data: bytes
    width: int
    height: int
    change: str = ""


@dataclass(frozen=True)
class Piece:
    """`size` bytes of a file from `offset` on: a member of a tar."""

    path: Path
    offset: int
    size: int


class Sample(NamedTuple):
    """A picture and its captions, each of one line, ready for a shard."""

    picture: Picture
    captions: Captions


def load_sample(
    image: Path | Piece | bytes, caption: Path | Piece | Captions | None, *, spare: str = "", empty_ok: bool = False
) -> Sample:
    """The picture with the bytes that it has where they are upright RGB already, else as a PNG. Raises BadSample.

    image: itself or where it is; caption, spare, empty_ok: as in `datasetserver.sources.Pair`.
    """
    captions = _captions(caption, spare, empty_ok)
    return Sample(normalise(_read(image, MAX_FILE_BYTES, "larger than")), captions)


def _captions(caption: Path | Piece | Captions | None, spare: str, empty_ok: bool) -> Captions:
    """At least one, together no longer than a shard's caption may be. Raises BadSample."""
    texts = (read_text(caption),) if isinstance(caption, Path | Piece) else caption or ()
    captions = tuple(filter(None, map(one_line, texts))) or tuple(filter(None, [one_line(spare)]))
    if not captions and not empty_ok:
        raise BadSample("no caption: there is no .txt or .caption file of that name" if caption is None else "caption is empty")
    if len("\n".join(captions).encode()) > MAX_CAPTION_BYTES:
        raise BadSample(f"caption is longer than {MAX_CAPTION_BYTES >> 10} KiB")
    return captions or ("",)


def read_text(place: Path | Piece) -> str:
    """Raises BadSample for a file that is too long or not UTF-8."""
    try:
        return _read(place, MAX_CAPTION_BYTES, "caption is longer than").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample(f"caption is not UTF-8 (byte {error.start})") from None


def _read(place: Path | Piece | bytes, most: int, too_long: str) -> bytes:
    """Its bytes; BadSample when there are more than `most` or they cannot be had."""
    try:
        if isinstance(place, Path):
            if not place.is_file():  # reading a pipe would wait for ever
                raise BadSample("no file, or a link that leads nowhere")
            place = Piece(place, 0, place.stat().st_size)
        if (len(place) if isinstance(place, bytes) else place.size) > most:
            raise BadSample(f"{too_long} {most >> 10} KiB")
        return place if isinstance(place, bytes) else _piece(place)
    except OSError as error:
        raise BadSample(f"cannot be read: {error.strerror or error}") from None


def _piece(piece: Piece) -> bytes:
    with piece.path.open("rb") as file:
        file.seek(piece.offset)
        data = file.read(piece.size)
    if len(data) < piece.size:
        raise BadSample("became shorter while it was read")
    return data


def normalise(data: bytes) -> Picture:
    """Decode a picture in full and return it as upright RGB, encoded, and nothing but its pixels. Raises BadSample.

    What is upright RGB keeps its encoding, without metadata; all else becomes a PNG.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                # Checked before decoding: the header of a bomb is cheap, its pixels are not.
                if image.width * image.height > MAX_PIXELS:
                    raise BadSample(f"{image.width}x{image.height} is more than {MAX_PIXELS:,} pixels")
                if max(image.size) > MAX_SIDE_PIXELS:
                    raise BadSample(f"{image.width}x{image.height}: a side is longer than {MAX_SIDE_PIXELS:,} pixels")
                image.load()
                changes = _changes(image)
                if not changes and (plain := _without_metadata(data, image)):
                    return Picture(plain, *image.size, "metadata removed" if len(plain) < len(data) else "")
                rgb = _to_rgb(image if _orientation(image) == 1 else ImageOps.exif_transpose(image))
                return Picture(_as_png(rgb), *rgb.size, ", ".join(changes or ["damaged beside its pixels: written as PNG"]))
    except BadSample:
        raise
    except UnidentifiedImageError:
        raise BadSample(f"is none of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError as error:
        raise BadSample(f"decompression bomb: {error}") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error, MemoryError, ...
        raise BadSample(f"cannot be decoded: {error or type(error).__name__}") from None


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


def _changes(image: Image.Image) -> list[str]:
    """What must be done to make it upright RGB in a format that compresses, in words; nothing for most pictures."""
    changes = []
    if image.format == "BMP":
        changes.append("BMP written as PNG")
    if (frames := getattr(image, "n_frames", 1)) > 1:
        changes.append(f"the first of {frames} frames")
    if image.mode != "RGB":
        changes.append(f"{image.mode} made RGB")
    if image.has_transparency_data:
        changes.append("put on white")
    if _orientation(image) != 1:
        changes.append("turned upright")
    return changes


def _orientation(image: Image.Image) -> int:
    """EXIF's; 1 where the EXIF is damaged, which makes no picture one that cannot be trained on."""
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # SyntaxError, struct.error, ...: Pillow keeps JPEG's to itself, and raises those of PNG and WebP
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """RGB with alpha on white; 16-bit greys keep their upper byte, which Pillow's own conversion would clip."""
    if image.mode.startswith("I"):
        import numpy as np

        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype("uint8"))
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _as_png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    # Pixels only: no EXIF, profiles or comments. Level 4 takes a third to all of the time of 6, and 0 to 4 % more bytes.
    Image.frombytes("RGB", image.size, image.tobytes()).save(out, "PNG", compress_level=4)
    return out.getvalue()
