"""A corpus of hostile files, made here. None stops the ingest, none gets through as it is, and the report says why for each."""

import os
import struct
import zlib

import pytest
from PIL import Image

from datasetserver.ingest import Policy, ingest
from swarm.picture_folder import MAX_CAPTION_BYTES, MAX_FILE_BYTES
from tests.datasetserver.hosting import write_dataset
from tests.datasetserver.test_ingest import decoded, encoded, samples_of

NOISE = Image.effect_noise((32, 32), 50).convert("RGB")
GOOD = encoded(NOISE)
JPEG = encoded(NOISE, "JPEG")


def png(*chunks):
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def header(width, height, depth=8, colour=2):
    return b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)


def pixels(data):
    return b"IDAT", zlib.compress(data, 9)


def text_bomb():
    """A compressed text of 64 MiB in a picture of one pixel."""
    squeeze = zlib.compressobj(9)
    data = b"".join(squeeze.compress(bytes(1 << 20)) for _ in range(64)) + squeeze.flush()
    return png(header(1, 1), (b"zTXt", b"Comment\0\0" + data), pixels(bytes(4)), (b"IEND", b""))


def animated(format, **options):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    return encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)


def sixteen_bits():
    """An RGB PNG with 16 bits per channel, which Pillow cannot write."""
    rows = b"".join(b"\0" + struct.pack(">HHH", 0x8000, 0xFFFF, 0) * 4 for _ in range(4))
    return png(header(4, 4, depth=16), pixels(rows), (b"IEND", b""))


def large_file(path):
    with path.open("wb") as file:
        file.write(GOOD)
        file.truncate(MAX_FILE_BYTES + 1)  # sparse: takes no space on the disk


REJECTED = {
    "bomb_pixels.png": (lambda: encoded(Image.new("1", (20_000, 20_000))), "pixels"),
    "bomb_header.png": (png(header(60_000, 60_000), pixels(b""), (b"IEND", b"")), "pixels"),
    "bomb_text.png": (text_bomb, "cannot be decoded"),
    "bomb_bmp.bmp": (struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 54, 0, 0, 54, 40, 40_000, 40_000, 1, 24, 0, 0, 0, 0, 0, 0), "pixels"),
    "side_wide.png": (encoded(Image.new("1", (50_000, 1))), "a side is longer"),
    "side_high.jpg": (encoded(Image.new("L", (1, 50_000)), "JPEG"), "a side is longer"),
    "narrow.png": (encoded(Image.new("1", (2, 2000))), "2x2000 is too narrow: one side is more than 50 times the other"),
    "zero.png": (png(header(0, 5), pixels(b""), (b"IEND", b"")), "is none of"),
    "cut.png": (GOOD[: len(GOOD) // 2], "cannot be decoded"),
    "cut.jpg": (JPEG[: len(JPEG) // 2], "cannot be decoded"),
    "cut_header.png": (GOOD[:20], ""),
    "no_pixels.png": (png(header(8, 8), (b"IEND", b"")), "cannot be decoded"),
    "wrong_sum.png": (GOOD[:60] + bytes([GOOD[60] ^ 1]) + GOOD[61:], "cannot be decoded"),
    "empty.png": (b"", "is none of"),
    "zeros.jpg": (bytes(5000), "is none of"),
    "text.png": (b"this is no picture", "is none of"),
    "page.jpg": (b"<html><body>404</body></html>", "is none of"),
    "vector.png": (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "is none of"),
    "program.webp": (b"RIFF\x10\0\0\0WEBPVP8 " + bytes(8), ""),
    "gif.png": (encoded(NOISE, "GIF"), "is none of"),
    "tiff.jpg": (encoded(NOISE, "TIFF"), "is none of"),
    "icon.png": (encoded(NOISE, "ICO"), "is none of"),
    "postscript.jpg": (encoded(NOISE, "EPS"), "is none of"),
    "portable.bmp": (encoded(NOISE, "PPM"), "is none of"),
    "zip.png": (b"PK\x03\x04" + bytes(100), "is none of"),
    "large.png": (large_file, "larger than"),
}

CHANGED = {
    "animated.png": (animated("PNG"), "the first of 3 frames"),
    "animated.webp": (animated("WEBP", lossless=True), "the first of 3 frames"),
    "cmyk.jpg": (encoded(NOISE.convert("CMYK"), "JPEG"), "CMYK made RGB"),
    "grey16.png": (encoded(Image.new("I;16", (4, 4), 0x8000)), "made RGB"),
    "palette.png": (encoded(NOISE.convert("P", palette=Image.Palette.ADAPTIVE), transparency=0), "put on white"),
    "alpha.png": (encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 128))), "put on white"),
    "bitmap.bmp": (encoded(NOISE, "BMP"), "BMP written as PNG"),
    "tail.png": (GOOD + b"<?php system($_GET['x']); ?>", "metadata removed"),
    "bits.png": (encoded(NOISE.convert("1")), "1 made RGB"),
    "alpha.webp": (encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 99)), "WEBP", lossless=True), "RGBA made RGB, put on white"),
}

TAKEN = {
    "still.webp": encoded(NOISE, "WEBP"),
    "lying.png": JPEG,
    "lying.jpg": GOOD,
    "rgb48.png": sixteen_bits(),
}

CAPTIONS = {
    "latin.png": ("café".encode("latin-1"), "not UTF-8"),
    "utf16.png": ("words".encode("utf-16"), "not UTF-8"),
    "surrogate.png": (b"\xed\xa0\x80", "not UTF-8"),
    "overlong.png": (b"\xc0\xaf", "not UTF-8"),
    "blank.png": (b" \t\r\n\x00", "empty"),
    "nothing.png": (b"", "empty"),
    "endless.png": (b"x" * (MAX_CAPTION_BYTES + 1), "longer than"),
    "swells.png": ("\U0001d164".encode() * (MAX_CAPTION_BYTES // 4), "longer than"),  # three times as long once it is composed
    "markup.png": (b"<script>alert(1)</script>", None),
    "emoji.png": ("👩‍🎨 paints".encode(), None),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    folder = write_dataset(root / "data", 6)
    everything = {**{name: data for name, (data, _) in {**REJECTED, **CHANGED}.items()}, **TAKEN, **dict.fromkeys(CAPTIONS, GOOD)}
    for name, data in everything.items():
        path = folder / name
        if data is large_file:
            large_file(path)
        else:
            path.write_bytes(data() if callable(data) else data)
        path.with_name(name + "words").write_text(name)
    for name in everything:  # many stems are there twice: each picture's own folder keeps the captions apart
        home = folder / name.replace(".", "_")
        home.mkdir()
        (folder / name).rename(home / name)
        (folder / f"{name}words").rename((home / name).with_suffix(".txt"))
    for name, (words, _) in CAPTIONS.items():
        (folder / name.replace(".", "_") / name).with_suffix(".txt").write_bytes(words)
    outside = write_dataset(root / "elsewhere", 2)
    (folder / "out.png").symlink_to(outside / "0000.png")
    (folder / "out.txt").write_text("somebody else's picture")
    (folder / "words.png").write_bytes(GOOD)
    (folder / "words.txt").symlink_to("/etc/hostname")
    (folder / "circle.png").symlink_to("circle.png")
    (folder / "circle.txt").write_text("round")
    (folder / "linked").symlink_to(outside)
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    (folder / "pipe.txt").write_text("a pipe")
    return folder


@pytest.fixture(scope="module")
def result(corpus, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    return ingest(corpus, work, workers=2, shard_samples=8), work


def path_of(name):
    return f"{name.replace('.', '_')}/{name}"


def test_every_hostile_file_is_left_out_with_its_reason(result):
    reasons = dict(result[0].rejected)
    expected = {path_of(name): why for name, (_, why) in REJECTED.items()}
    expected |= {path_of(name): why for name, (_, why) in CAPTIONS.items() if why}
    expected |= {"out.png": "out of the folder", "words.txt": "out of the folder", "words.png": "no caption", "pipe.png": "no file"}
    expected |= {"circle.png": "no file"}
    assert set(reasons) == set(expected)
    for name, why in expected.items():
        assert why in reasons[name], f"{name}: {reasons[name]}"
    table = (result[1] / "rejected.csv").read_text()
    assert all(name in table for name in expected)


def test_unusual_pictures_are_made_plain_and_the_report_says_how(result):
    changes = dict(result[0].changed)
    grey = {name: changes.pop(name) for name in list(changes) if "/" not in name}
    assert set(grey.values()) == {"L made RGB"} and len(grey) == 6
    assert set(changes) == {path_of(name) for name in CHANGED}
    for name, (_, what) in CHANGED.items():
        assert what in changes[path_of(name)], f"{name}: {changes[path_of(name)]}"
    assert (result[1] / "changed.csv").read_text().count("\n") == len(CHANGED) + len(grey) + 1


def test_only_plain_pictures_get_through(result):
    manifest, work = result[0].manifest, result[1]
    found = samples_of(work, manifest)
    assert manifest.total == 6 + len(CHANGED) + len(TAKEN) + sum(why is None for _, why in CAPTIONS.values())
    for image, caption in found:
        picture = decoded(image)
        picture.load()
        assert (picture.format in ("PNG", "JPEG", "WEBP"), picture.mode, getattr(picture, "n_frames", 1)) == (True, "RGB", 1)
        assert (caption and caption.isprintable()) or "\u200d" in caption
    by_caption = {caption: decoded(image) for image, caption in found}
    assert by_caption["animated.png"].getpixel((0, 0)) == (255, 0, 0)
    assert by_caption["grey16.png"].getpixel((0, 0)) == (128, 128, 128)
    assert by_caption["alpha.png"].getpixel((0, 0))[0] == 255 and by_caption["alpha.png"].getpixel((0, 0))[1] in (127, 128)
    assert by_caption["rgb48.png"].getpixel((0, 0))[:2] in ((128, 255), (127, 255))


def test_what_the_peers_read_is_what_was_checked(result):
    from datasetserver.prepared import shard_path
    from peer.data.shards import read_shard
    from peer.samples.pictures import Frame, decode

    for shard in result[0].manifest.shards:
        rows = list(read_shard(shard_path(result[1], shard.digest), shard.samples))
        assert len(rows) == shard.samples
        for image, _ in rows:
            assert decode(image, Frame(8, 8)).pixels.shape == (8, 8, 3)


def test_equal_pictures_under_other_names_are_found(result):
    groups = {}
    for name, original in result[0].duplicates:
        groups.setdefault(original, {original}).add(name)
    assert {path_of("animated.png"), path_of("animated.webp")} in groups.values(), "red, once decoded"
    good = {path_of(name) for name in ("lying.jpg", "markup.png", "emoji.png")}
    assert any(good <= group for group in groups.values())


def test_the_corpus_gives_the_same_dataset_again_without_processes(corpus, result, tmp_path):
    again = ingest(corpus, tmp_path, workers=0, shard_samples=8)
    assert (again.digest, again.rejected, again.changed) == (result[0].digest, result[0].rejected, result[0].changed)
    lax = ingest(corpus, tmp_path, workers=0, policy=Policy(missing_captions="empty", duplicates="drop"), dry=True)
    reasons = dict(lax.rejected)
    assert reasons[path_of("blank.png")].startswith("the same picture as") and "UTF-8" in reasons[path_of("latin.png")]
