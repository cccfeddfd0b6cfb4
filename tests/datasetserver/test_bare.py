"""Pictures leave the host without the place where they were taken: no metadata, the same pixels, no new encoding."""

import io
import random
import struct
import zlib

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, PngImagePlugin

from datasetserver.bare import Damaged, bare
from datasetserver.pictures import normalise
from swarm.picture_file import MAX_RATIO, BadSample
from tests.datasetserver.test_ingest import decoded, encoded

GPS, SECRET = 0x8825, b"Secret Street 7"
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def exif():
    said = Image.Exif()
    said[0x010E] = SECRET.decode()
    said.get_ifd(GPS)[2] = (48.0, 8.0, 14.0)
    return said


def text():
    said = PngImagePlugin.PngInfo()
    said.add_text("Comment", SECRET.decode())
    said.add_itxt("XML:com.adobe.xmp", SECRET.decode())
    return said


def picture(width, height, seed):
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))


WAYS = {
    "png": ("PNG", {"pnginfo": text()}),
    "baseline": ("JPEG", {"comment": SECRET, "xmp": SECRET}),
    "progressive": ("JPEG", {"progressive": True, "quality": 30, "comment": SECRET}),
    "restarts": ("JPEG", {"restart_marker_rows": 1, "subsampling": 0}),
    "lossy": ("WEBP", {"xmp": SECRET}),
    "lossless": ("WEBP", {"lossless": True, "xmp": SECRET}),
}


def with_metadata(image, way):
    format, options = WAYS[way]
    return encoded(image, format, exif=exif(), icc_profile=PROFILE, **options)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(WAYS)), st.integers(1, 70), st.integers(1, 70), st.integers(1, 200))
def test_metadata_goes_and_pixels_and_profile_stay(way, width, height, noise):
    assume(max(width, height) <= MAX_RATIO * min(width, height))
    data = with_metadata(picture(width, height, noise), way)
    before = decoded(data)
    assert before.getexif().get_ifd(GPS) and SECRET in data
    result = normalise(data + SECRET)
    after = decoded(result.data)
    assert (result.width, result.height, result.change) == (width, height, "metadata removed")
    assert SECRET not in result.data and not after.getexif() and "xmp" not in after.info
    assert (after.format, after.tobytes(), after.info["icc_profile"]) == (before.format, before.tobytes(), PROFILE)
    assert bare(result.data, after.format) == result.data and normalise(result.data).change == ""


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(WAYS)), st.data())
def test_what_is_damaged_keeps_its_pixels_too_or_is_no_picture(way, draw):
    data = bytearray(with_metadata(picture(24, 24, 50), way))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    data = bytes(data[: draw.draw(st.integers(len(data) // 2, len(data)))])
    try:
        result = normalise(data)
    except BadSample:
        return
    if result.change in ("", "metadata removed"):
        assert decoded(result.data).tobytes() == decoded(data).tobytes()
    assert decoded(result.data).mode == "RGB" and not decoded(result.data).getexif()


@pytest.mark.parametrize(("format", "data"), [("PNG", b""), ("JPEG", b"\xff\xd8"), ("JPEG", b"\xff\xd8abcd"), ("WEBP", b"RIFF\x99\0\0\0WEBPVP8 \x99")])
def test_no_structure_is_damaged(format, data):
    if format == "WEBP":
        assert bare(data[:12], format)
    with pytest.raises(Damaged):
        bare(data, format)


def test_a_picture_whose_structure_only_its_decoder_understands_is_written_as_png():
    data = encoded(picture(16, 16, 50), "JPEG")
    data = data[:20] + b"\xff\x00" + data[20:]
    result = normalise(data)
    assert decoded(result.data).format == "PNG" and result.change == "damaged beside its pixels: written as PNG"
    assert decoded(result.data).tobytes() == decoded(data).tobytes()


def test_chunks_that_nobody_knows_go_with_the_rest():
    data, said = encoded(picture(8, 8, 50)), b"prVt" + SECRET
    chunk = struct.pack(">I", len(SECRET)) + said + struct.pack(">I", zlib.crc32(said))
    assert normalise(data[:33] + chunk + data[33:]).data == data
    assert Image.open(io.BytesIO(data)).size == (8, 8)
