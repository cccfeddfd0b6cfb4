"""An encoded picture without what was written beside its pixels: the place where it was taken, cameras, comments, thumbnails.

Nothing is encoded again. What says how the pixels look (colour profiles, gamma, Adobe's transform) stays; all else goes, known or not, also what
follows the picture's end. Formats: ITU T.81 annex B (JPEG), the PNG specification, chapter 11, and Google's WebP container specification.
"""

import re
from collections.abc import Iterator

_PNG_KEPT = {b"tRNS", b"cHRM", b"gAMA", b"iCCP", b"sBIT", b"sRGB", b"cICP", b"mDCV", b"cLLI", b"bKGD", b"hIST", b"pHYs"}
_WEBP_KEPT = {b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ICCP"}
_WEBP_SAID = 0x08 | 0x04  # the flags of VP8X for EXIF and XMP
_JPEG_KEPT = {0xE0: b"JFIF\0", 0xE2: b"ICC_PROFILE\0", 0xEE: b"Adobe"}  # APPn, and what it must begin with
_SOI, _EOI, _SOS, _APP0, _APP15, _COM = 0xD8, 0xD9, 0xDA, 0xE0, 0xEF, 0xFE
# Within a scan FF is followed by 00 where it is data, by D0 to D7 where the decoder may begin anew, and by FF where it is filling.
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


class Damaged(Exception):
    """The file's structure is none of its format's."""


def bare(data: bytes, format: str) -> bytes:
    """`data`, a PNG, JPEG or WEBP of one frame, with nothing but its pixels. Raises Damaged."""
    try:
        return {"PNG": _png, "JPEG": _jpeg, "WEBP": _webp}[format](data)
    except (IndexError, ValueError, AttributeError) as error:
        raise Damaged(str(error)) from None


def _png(data: bytes) -> bytes:
    return data[:8] + b"".join(chunk for kind, chunk in _png_chunks(data) if kind[0:1].isupper() or kind in _PNG_KEPT)


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kinds and all bytes of the chunks, up to the end of the picture."""
    at, kind = 8, b""
    while kind != b"IEND":
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        kind = data[at + 4 : at + 8]
        if end > len(data):
            raise ValueError("a chunk is cut off")
        yield kind, data[at:end]
        at = end


def _webp(data: bytes) -> bytes:
    kept = b"".join(_webp_chunks(data))
    return b"RIFF" + (4 + len(kept)).to_bytes(4, "little") + b"WEBP" + kept


def _webp_chunks(data: bytes) -> Iterator[bytes]:
    at, last = 12, 8 + int.from_bytes(data[4:8], "little")
    while at < min(last, len(data)):
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        end = at + 8 + size + size % 2
        if at + 8 + size > len(data):
            raise ValueError("a chunk is cut off")
        if kind == b"VP8X":
            yield data[at : at + 8] + bytes([data[at + 8] & ~_WEBP_SAID]) + data[at + 9 : end]
        elif kind in _WEBP_KEPT:
            yield data[at:end].ljust(end - at, b"\0")
        at = end


def _jpeg(data: bytes) -> bytes:
    return data[:2] + b"".join(segment for marker, segment in _jpeg_segments(data) if _stays(marker, segment))


def _stays(marker: int, segment: bytes) -> bool:
    if marker in _JPEG_KEPT:
        return segment[4:].startswith(_JPEG_KEPT[marker])
    return not _APP0 <= marker <= _APP15 and marker != _COM


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Markers and all bytes of the segments after the first marker, scans with their data, up to the end of the picture."""
    at, marker = 2, _SOI
    while marker != _EOI:
        while data[at + 1] == 0xFF:  # filling
            at += 1
        marker, end = data[at + 1], at + 2
        if data[at] != 0xFF or marker < 0xC0:
            raise ValueError(f"no marker at byte {at}")
        if marker != _EOI:
            end += max(2, int.from_bytes(data[end : end + 2], "big"))
        if marker == _SOS:
            end = _AFTER_SCAN.search(data, end).start()
        if end > len(data):
            raise ValueError("a segment is cut off")
        yield marker, data[at:end]
        at = end
