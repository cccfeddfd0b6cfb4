"""What becomes of a folder of pictures, good and bad."""

import contextlib
import io
import os
import struct
import tarfile
import tracemalloc
import zlib

import pytest
from PIL import Image
from pydantic import ValidationError

from datasetserver import loading
from datasetserver.cutting import SHARD_BYTES
from datasetserver.ingest import Policy, _identity, ingest
from datasetserver.pictures import normalise
from datasetserver.prepared import FORMAT, shard_path
from datasetserver.sources import Folder
from swarm.digest import canonical_json, digest_bytes, digest_json
from swarm.errors import UserError
from swarm.picture_file import BadSample
from swarm.picture_folder import Pair, list_folder
from swarm.protocol import Manifest
from tests.datasetserver.crashing import crash_or_load
from tests.datasetserver.hosting import write_dataset


def encoded(image, format="PNG", **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def decoded(data):
    return Image.open(io.BytesIO(data))


def samples_of(work_dir, manifest):
    found = []
    for shard in manifest.shards:
        with tarfile.open(shard_path(work_dir, shard.digest)) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar}
            assert list(members) == sorted(members)
            assert all(name.count(".") == 1 for name in members)
            found += [(members[name], members[name[:-4] + ".txt"].decode()) for name in members if name.endswith(".jpg")]
    return found


def test_every_good_picture_is_in_a_shard_with_its_caption(tmp_path):
    result = ingest(write_dataset(tmp_path / "data", 20), tmp_path / "work", shard_samples=8, workers=0)
    assert [shard.samples for shard in result.manifest.shards] == [8, 8, 4]
    found = samples_of(tmp_path / "work", result.manifest)
    assert {(decoded(image).getpixel((0, 0)), caption) for image, caption in found} == {((n, n, n), f"picture {n}") for n in range(20)}
    assert [caption for _, caption in found] != sorted(caption for _, caption in found), "shards are unbiased draws"


def test_manifest_names_what_is_on_the_disk(tmp_path):
    result = ingest(write_dataset(tmp_path / "data", 5), tmp_path / "work", workers=0)
    assert result.digest == digest_bytes((tmp_path / "work" / "manifest.json").read_bytes())
    assert canonical_json(result.manifest.model_dump()) == (tmp_path / "work" / "manifest.json").read_bytes()
    for shard in result.manifest.shards:
        data = shard_path(tmp_path / "work", shard.digest).read_bytes()
        assert (len(data), digest_bytes(data)) == (shard.bytes, shard.digest)


def test_equal_folders_give_equal_digests_in_processes_or_without(tmp_path, forked_decoders):
    one = ingest(write_dataset(tmp_path / "a", 40), tmp_path / "wa", shard_samples=8, workers=0)
    other = ingest(write_dataset(tmp_path / "b", 40), tmp_path / "wb", shard_samples=8, workers=2)
    assert one.digest == other.digest


def test_nothing_is_done_again_until_the_folder_changes(tmp_path):
    folder = write_dataset(tmp_path / "data", 4)
    first = ingest(folder, tmp_path / "work", workers=0)
    again = ingest(folder, tmp_path / "work", workers=0)
    assert (first.fresh, again.fresh, again.digest) == (True, False, first.digest)
    (folder / "0001.txt").write_text("another caption")
    changed = ingest(folder, tmp_path / "work", workers=0)
    assert changed.fresh and changed.digest != first.digest
    shard_path(tmp_path / "work", changed.manifest.shards[0].digest).unlink()
    assert ingest(folder, tmp_path / "work", workers=0).fresh


def test_that_a_dataset_is_unchanged_is_seen_without_another_copy_of_all_its_names(tmp_path, monkeypatch):
    """Of ten million pictures the copies took 13 GB: 608 bytes for each pair, and 708 for what it said."""
    count = 5_000
    pairs = [Pair(f"{number:05d}.png", tmp_path / f"{number:05d}.png", tmp_path / f"{number:05d}.txt") for number in range(count)]
    monkeypatch.setattr("datasetserver.sources.list_dataset", lambda *_: pairs)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        identity = _identity(Folder(tmp_path).list(), Policy(), 256)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    said = [[[pair.name.encode().hex(), None, None, ""] for pair in pairs], []]
    assert identity == digest_json([FORMAT, 256, SHARD_BYTES, Policy().told(), said])
    assert peak < 300 * count


def test_bad_files_are_left_out_and_listed_and_stop_nothing(tmp_path):
    folder = write_dataset(tmp_path / "data", 3)
    good = encoded(Image.effect_noise((64, 64), 50).convert("RGB"))
    for name, image, caption in [
        ("lonely.png", good, None),
        ("truncated.png", good[: len(good) // 2], b"half"),
        ("latin.png", good, "café".encode("latin-1")),
        ("silent.png", good, b" \n"),
        ("text.jpg", b"this is no picture", b"text"),
        ("gif.png", encoded(Image.new("RGB", (4, 4)), "GIF"), b"a format that is not allowed"),
    ]:
        (folder / name).write_bytes(image)
        if caption is not None:
            (folder / name).with_suffix(".txt").write_bytes(caption)
    result = ingest(folder, tmp_path / "work", workers=0)
    assert result.manifest.total == 3
    reasons = dict(result.rejected)
    assert set(reasons) == {"lonely.png", "truncated.png", "latin.png", "silent.png", "text.jpg", "gif.png"}
    assert "no caption" in reasons["lonely.png"] and "UTF-8" in reasons["latin.png"] and "empty" in reasons["silent.png"]
    assert len((tmp_path / "work" / "rejected.csv").read_text().splitlines()) == 7


def test_names_that_are_no_text_links_to_nowhere_and_pipes_stop_nothing(tmp_path):
    folder = write_dataset(tmp_path / "data", 2)
    os.rename(folder / "0001.png", os.fsencode(folder) + b"/\xff.png")
    os.rename(folder / "0001.txt", os.fsencode(folder) + b"/\xff.txt")
    (folder / "link.png").symlink_to("nowhere")
    (folder / "link.txt").write_text("a link")
    os.mkfifo(folder / "pipe.png")
    (folder / "pipe.txt").write_text("a pipe")
    result = ingest(folder, tmp_path / "work", workers=0)
    assert result.manifest.total == 2
    assert [name for name, _ in result.rejected] == ["link.png", "pipe.png"]


def test_a_decoder_that_takes_its_process_down_costs_one_picture(tmp_path, monkeypatch, forked_decoders):
    """The file is real, the crash is not: no picture is known that still crashes today's decoders."""
    folder = write_dataset(tmp_path / "data", 12)
    (folder / "0007.txt").write_text("crash")
    monkeypatch.setattr(loading, "_load", crash_or_load)
    result = ingest(folder, tmp_path / "work", workers=1)
    assert result.manifest.total == 11
    assert result.rejected == [("0007.png", "the decoder crashed on it")]


def test_pairs_are_found_by_stem_in_any_case_below_the_folder(tmp_path):
    (tmp_path / "Sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("A.PNG", "A.TXT", "my.photo.Jpeg", "my.photo.caption", "Sub/a.webp", "Sub/a.txt", ".hidden/b.png", "readme.md"):
        (tmp_path / name).touch()
    found = {pair.name: pair.caption and pair.caption.name for pair in list_folder(tmp_path, [])}
    assert found == {"A.PNG": "A.TXT", "my.photo.Jpeg": "my.photo.caption", "Sub/a.webp": "a.txt"}


def test_a_link_out_of_the_folder_is_not_walked(tmp_path):
    write_dataset(tmp_path / "elsewhere", 2)
    folder = write_dataset(tmp_path / "data", 1)
    os.symlink(tmp_path / "elsewhere", folder / "link")
    assert len(list_folder(folder, [])) == 1


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: write_dataset(path, 1) / "0000.txt"])
def test_a_folder_without_anything_to_train_on_is_a_users_error(tmp_path, make):
    made = make(tmp_path / "data")
    if made:
        made.unlink()
    with pytest.raises(UserError, match="data"):
        ingest(tmp_path / "data", tmp_path / "work", workers=0)


def test_a_fine_rgb_picture_keeps_its_bytes():
    picture = Image.effect_noise((16, 16), 50).convert("RGB")
    for data in (encoded(picture), encoded(picture, "JPEG")):
        assert normalise(data) == (data, 16, 16, "", False)


@pytest.mark.parametrize(
    ("picture", "pixel"),
    [
        (Image.new("L", (4, 4), 7), (7, 7, 7)),
        (Image.new("RGBA", (4, 4), (255, 0, 0, 0)), (255, 255, 255)),
        (Image.new("LA", (4, 4), (0, 0)), (255, 255, 255)),
        (Image.new("I;16", (4, 4), 0x8000), (128, 128, 128)),
        (Image.new("1", (4, 4), 1), (255, 255, 255)),
        (Image.new("RGB", (4, 4), (1, 2, 3)).convert("P"), None),
    ],
)
def test_other_pictures_become_rgb_with_alpha_on_white(picture, pixel):
    result = decoded(normalise(encoded(picture)).data)
    assert (result.format, result.mode, result.size) == ("PNG", "RGB", (4, 4))
    assert pixel is None or result.getpixel((0, 0)) == pixel


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_damaged_exif_makes_no_picture_a_bad_one(format, mode):
    result = normalise(encoded(Image.new(mode, (8, 4)), format, exif=b"Exif\0\0nonsense"))
    assert decoded(result.data).size == (8, 4) and b"nonsense" not in result.data


def test_a_picture_on_its_side_is_turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    result = decoded(normalise(encoded(Image.new("RGB", (8, 4)), "JPEG", exif=exif)).data)
    assert result.size == (4, 8)
    assert not result.getexif()


def test_a_bomb_is_refused_before_it_is_decoded():
    with pytest.raises(BadSample, match=r"pixels|bomb"):
        normalise(encoded(Image.new("1", (20_000, 20_000))))


def test_any_damage_to_a_picture_is_a_bad_sample_or_a_good_picture():
    data = encoded(Image.effect_noise((32, 32), 50).convert("RGB"), "JPEG")
    for cut in range(0, len(data), 97):
        with contextlib.suppress(BadSample):
            assert decoded(normalise(data[:cut] + bytes(8) + data[cut + 8 :]).data).mode == "RGB"


def test_metadata_jsonl_gives_captions_before_files_do_and_its_faults_are_listed(tmp_path):
    folder = write_dataset(tmp_path / "data", 3)
    (folder / "0000.txt").unlink()
    (folder / "sub").mkdir()
    (folder / "0002.png").rename(folder / "sub" / "0002.png")
    (folder / "0002.txt").unlink()
    lines = [
        b'{"file_name": "0000.png", "text": "told", "extra": [1]}',
        b'{"file_name": "0001.png", "text": "before its own file"}',
        b'{"file_name": "sub/0002.png", "prompt": "below"}',
        b"",
        b"no json",
        b"[1]",
        b'{"file_name": "0000.png", "text": 5}',
        b'{"text": "of nothing"}',
        b'{"file_name": "../../etc/passwd", "text": "out"}',
        b'{"file_name": "gone.png", "text": "of nothing"}',
        b'{"file_name": "\\u0000", "text": "nul"}',
        b"\xff\xfe",
        b"[" * 100_000,
    ]
    (folder / "metadata.jsonl").write_bytes(b"\n".join(lines))
    result = ingest(folder, tmp_path / "work", workers=0)
    assert sorted(caption for _, caption in samples_of(tmp_path / "work", result.manifest)) == ["before its own file", "below", "told"]
    assert {name for name, _ in result.rejected} == {f"metadata.jsonl, line {number}" for number in range(5, 14)}
    (folder / "metadata.jsonl").write_text('{"file_name": "0000.png", "text": "told otherwise"}')
    assert ingest(folder, tmp_path / "work", workers=0).fresh


def test_pictures_without_words_are_left_out_or_trained_without_as_the_host_says(tmp_path):
    from peer.data.shards import read_shard

    folder = write_dataset(tmp_path / "data", 4)
    (folder / "0000.txt").unlink()
    (folder / "0001.txt").write_text(" \n")
    strict = ingest(folder, tmp_path / "strict", workers=0)
    assert (strict.manifest.total, [name for name, _ in strict.rejected]) == (2, ["0000.png", "0001.png"])
    lax = ingest(folder, tmp_path / "lax", workers=0, policy=Policy(missing_captions="empty"))
    assert (lax.manifest.total, lax.rejected) == (4, [])
    rows = read_shard(shard_path(tmp_path / "lax", lax.manifest.shards[0].digest), 4)
    assert sorted(caption for _, caption in rows) == ["", "", "picture 2", "picture 3"]


def test_captions_are_composed_lines_without_control_characters(tmp_path):
    folder = write_dataset(tmp_path / "data", 1)
    (folder / "0000.txt").write_bytes("\ufeff cafe\u0301\x00\r\nau lait\u202e ".encode())
    result = ingest(folder, tmp_path / "work", workers=0)
    assert samples_of(tmp_path / "work", result.manifest)[0][1] == "caf\u00e9   au lait"


def test_equal_pictures_are_found_and_dropped_when_the_host_says_so(tmp_path):
    folder = write_dataset(tmp_path / "data", 3)
    (folder / "same.png").write_bytes((folder / "0001.png").read_bytes())
    (folder / "same.txt").write_text("other words")
    kept = ingest(folder, tmp_path / "kept", workers=0)
    assert kept.manifest.total == 4
    assert [set(pair) for pair in kept.duplicates] == [{"same.png", "0001.png"}]
    assert len((tmp_path / "kept" / "duplicates.csv").read_text().splitlines()) == 2
    dropped = ingest(folder, tmp_path / "dropped", workers=0, policy=Policy(duplicates="drop"))
    assert dropped.manifest.total == 3
    assert [reason for _, reason in dropped.rejected] == [f"the same picture as {kept.duplicates[0][1]}"]


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path):
    folder = write_dataset(tmp_path / "data", 10)
    (folder / "bad.png").write_bytes(b"no picture")
    (folder / "bad.txt").write_text("words")
    dry = ingest(folder, tmp_path / "work", workers=0, shard_samples=4, dry=True)
    assert not (tmp_path / "work").exists()
    real = ingest(folder, tmp_path / "work", workers=0, shard_samples=4)
    assert (dry.digest, dry.rejected) == (real.digest, real.rejected)


class Interrupted(Exception):
    pass


def cut_at(stop):
    """Shows an ingest that many pictures, and then interrupts it."""

    def show(pairs, count):
        for number, pair in enumerate(pairs):
            if number == stop:
                raise Interrupted
            yield pair

    return show


@pytest.mark.parametrize("after", [1, 9, 22, 39])
def test_an_ingest_that_was_cut_off_goes_on_after_its_last_shard(tmp_path, after):
    folder = write_dataset(tmp_path / "data", 40)
    (folder / "twin.png").write_bytes((folder / "0007.png").read_bytes())
    (folder / "twin.txt").write_text("again")
    for number in range(0, 40, 5):
        (folder / f"{number:04d}.png").write_bytes(b"no picture")
    looked_at = []

    def show(pairs, count=None, stop=None):
        for number, pair in enumerate(pairs):
            if number == stop:
                raise Interrupted
            looked_at.append(pair[0].name)
            yield pair

    whole = ingest(folder, tmp_path / "whole", workers=0, shard_samples=4, show=show)
    looked_at.clear()
    with pytest.raises(Interrupted):
        ingest(folder, tmp_path / "work", workers=0, shard_samples=4, show=lambda pairs, count: show(pairs, count, after))
    first = list(looked_at)
    with (tmp_path / "work" / "ingest.journal").open("ab") as journal:
        journal.write(b'{"shard": {"index"')  # as a power cut leaves it
    looked_at.clear()
    again = ingest(folder, tmp_path / "work", workers=0, shard_samples=4, show=show)
    assert (again.digest, again.rejected, again.duplicates) == (whole.digest, whole.rejected, whole.duplicates)
    assert len(set(first) & set(looked_at)) <= 4 + 8, "no more than the shard that was begun, and what had to be left out in it"
    assert sorted(set(first) | set(looked_at)) == [pair.name for pair in list_folder(folder, [])]
    assert not (tmp_path / "work" / "ingest.journal").exists()


def test_a_shard_that_vanished_after_the_cut_is_written_again(tmp_path):
    folder = write_dataset(tmp_path / "data", 20)
    whole = ingest(folder, tmp_path / "whole", workers=0, shard_samples=4)

    with pytest.raises(Interrupted):
        ingest(folder, tmp_path / "work", workers=0, shard_samples=4, show=cut_at(15))
    shard_path(tmp_path / "work", whole.manifest.shards[1].digest).unlink()
    assert ingest(folder, tmp_path / "work", workers=0, shard_samples=4).digest == whole.digest
    samples_of(tmp_path / "work", whole.manifest)


@pytest.mark.parametrize("size", [(50_000, 1), (1, 50_000), (50_000, 50_000)])
def test_sides_of_fifty_thousand_pixels_do_not_get_through(size):
    header = encoded(Image.new("1", (1, 1)))
    ihdr = struct.pack(">II", *size) + header[24:29]
    data = header[:16] + ihdr + struct.pack(">I", zlib.crc32(b"IHDR" + ihdr)) + header[33:]
    with pytest.raises(BadSample):
        normalise(data)
    if min(size) == 1:
        with pytest.raises(BadSample, match="a side"):
            normalise(encoded(Image.new("RGB", size)))


def test_the_manifest_tells_the_size_of_every_sample(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(6):
        Image.new("RGB", (8 + number, 20 - number), (number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"{8 + number}x{20 - number}")
    manifest = ingest(folder, tmp_path / "work", workers=0, shard_samples=4).manifest
    stored = Manifest.model_validate_json((tmp_path / "work" / "manifest.json").read_bytes())
    assert stored == manifest and stored.total == 6
    told = [
        (f"{width}x{height}", size)
        for shard in stored.shards
        for width, height, size in zip(shard.widths, shard.heights, shard.image_bytes, strict=True)
    ]
    assert told == [(caption, len(image)) for image, caption in samples_of(tmp_path / "work", manifest)]


@pytest.mark.parametrize(
    "change",
    [
        {"total": 7},
        {"version": 1},
        {"generations": []},
        {"generations": [{"from_epoch": 1, "shards": 2}]},
        {"generations": [{"from_epoch": 0, "shards": 1}]},
        {"generations": [{"from_epoch": 0, "shards": 2}, {"from_epoch": 3, "shards": 2}]},
        {"generations": [{"from_epoch": 0, "shards": 1}, {"from_epoch": 3, "shards": 1}, {"from_epoch": 2, "shards": 2}]},
        {"shards": []},
        {"shards": lambda shards: shards[::-1]},
        {"shards": lambda shards: [shards[0], {**shards[1], "widths": [1]}]},
        {"shards": lambda shards: [shards[0], {**shards[1], "widths": [0, 1]}]},
        {"shards": lambda shards: [shards[0], {**shards[1], "digest": "../manifest"}]},
    ],
)
def test_a_manifest_that_contradicts_itself_is_none(tmp_path, change):
    manifest = ingest(write_dataset(tmp_path / "data", 6), tmp_path / "work", workers=0, shard_samples=4).manifest.model_dump()
    Manifest.model_validate(manifest)
    with pytest.raises(ValidationError):
        Manifest.model_validate(manifest | {key: value(manifest[key]) if callable(value) else value for key, value in change.items()})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves its files for the collector to close
def test_outsiders_read_the_shards_with_datasets_and_with_webdataset(tmp_path):
    import datasets
    import webdataset

    manifest = ingest(write_dataset(tmp_path / "data", 10), tmp_path / "work", workers=0, shard_samples=4).manifest
    expected = sorted((caption, decoded(image).getpixel((0, 0))) for image, caption in samples_of(tmp_path / "work", manifest))
    files = [str(shard_path(tmp_path / "work", shard.digest)) for shard in manifest.shards]
    rows = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path / "cache"))
    assert sorted((row["txt"], row["jpg"].getpixel((0, 0))) for row in rows) == expected
    samples = webdataset.WebDataset(files, shardshuffle=False).decode("pil").to_tuple("txt", "jpg")
    assert sorted((caption, picture.getpixel((0, 0))) for caption, picture in samples) == expected
