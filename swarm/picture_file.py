"""A picture's bytes, whoever reads them: the formats, how large one may be, which way is up, and what is RGB of it. One rule for hosts and peers."""

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
MAX_PIXELS = 100_000_000
MAX_SIDE_PIXELS = 32_768
MAX_RATIO = 50
"""Of the longer side to the shorter: to cover 512x512, a 1x30000 picture of 196 bytes would be resized to 7.9 billion pixels, some 31 GB."""
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


class BadSample(Exception):
    """A picture or caption that cannot be trained on; the text says why."""


@contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """The picture in `data`, not decoded yet. Raises BadSample for what is none of ours, and for whatever goes wrong within the block."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            # Checked before decoding: the header of a bomb is cheap, its pixels are not.
            if image.width * image.height > MAX_PIXELS:
                raise BadSample(f"{image.width}x{image.height} is more than {MAX_PIXELS:,} pixels")
            if max(image.size) > MAX_SIDE_PIXELS:
                raise BadSample(f"{image.width}x{image.height}: a side is longer than {MAX_SIDE_PIXELS:,} pixels")
            if max(image.size) > MAX_RATIO * min(image.size):
                raise BadSample(f"{image.width}x{image.height} is too narrow: one side is more than {MAX_RATIO} times the other")
            yield image
    except BadSample:
        raise
    except UnidentifiedImageError:
        raise BadSample(f"is none of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError as error:
        raise BadSample(f"decompression bomb: {error}") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error, MemoryError, ...
        raise BadSample(f"cannot be decoded: {(str(error).splitlines() or [type(error).__name__])[0][:120]}") from None


def orientation_of(image: Image.Image, data: bytes) -> int:
    """EXIF's, 1 to 8; 1, like in browsers, for a number that it does not have, and where the EXIF is damaged. data: the image's."""
    # Pillow decodes a whole PNG to look for EXIF behind its pixels.
    before_pixels = image.format == "PNG" and b"eXIf" not in data
    try:
        exif = Image.Image.getexif(image) if before_pixels else image.getexif()
        found = exif.get(_ORIENTATION, 1)
    except Exception:  # SyntaxError, struct.error, ValueError, ...: Pillow keeps JPEG's to itself, and raises those of PNG and WebP
        return 1
    return found if found in _UPRIGHT else 1


def turned(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """(width, height) of the upright picture; and from that the file's."""
    return size[::-1] if orientation >= _ON_ITS_SIDE else size


def is_deep_grey(image: Image.Image) -> bool:
    """Whether it has one channel of more than 8 bits."""
    return image.mode.startswith("I")


def upright_rgb(image: Image.Image, orientation: int, behind: str = "white") -> Image.Image:
    """Transparent pixels hide arbitrary colours; what people see in a browser is white behind. 16-bit greys keep their upper byte."""
    if is_deep_grey(image):  # Pillow's own conversion would make white of all that is 255 and more
        import numpy as np

        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype("uint8"))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, behind), image)
    rgb = image.convert("RGB")
    return rgb.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else rgb


def has_mask(image: Image.Image) -> bool:
    """Whether its transparency can be read as a mask."""
    return image.has_transparency_data and not is_deep_grey(image)


def upright_rgba(image: Image.Image, orientation: int) -> Image.Image:
    """Of a picture that has a mask: with it as the alpha channel, and the colours that it hides as they are."""
    rgba = image.convert("RGBA")
    return rgba.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else rgba


def with_mask(data: bytes, mask: bytes) -> bytes:
    """A PNG of the picture in `data`, upright, with the picture in `mask` as its alpha channel. Raises BadSample."""
    with opened(data) as image:
        picture = upright_rgb(image, orientation_of(image, data))
    picture.putalpha(upright_mask(mask, picture.size))
    out = io.BytesIO()
    picture.save(out, "PNG", compress_level=1, compress_type=zlib.Z_RLE)  # as small as level 4 in a third of the time
    return out.getvalue()


def upright_mask(mask: bytes, size: tuple[int, int]) -> Image.Image:
    """The picture in `mask` in greys, upright; what is transparent in it is black. size: of the upright picture that it is for. Raises BadSample."""
    try:
        with opened(mask) as image:
            alpha = upright_rgb(image, orientation_of(image, mask), behind="black").convert("L")
    except BadSample as reason:
        raise BadSample(f"its mask {reason}") from None
    if alpha.size != size:
        raise BadSample("its mask has {}x{} pixels, and the picture {}x{}".format(*alpha.size, *size))
    return alpha
