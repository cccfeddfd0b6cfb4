"""Samples out of WebDataset tars and out of `datasets`: the same checks, names and digests as for a folder."""

import errno
import io
import os
import tarfile

import pytest
from PIL import Image

from datasetserver.ingest import ingest
from datasetserver.sources import Hub
from swarm.errors import ExitCode, UserError
from swarm.picture_folder import list_folder
from tests.datasetserver.hosting import write_dataset
from tests.datasetserver.test_ingest import Interrupted, cut_at, encoded, samples_of


def picture(number):
    return encoded(Image.new("RGB", (8, 8), (number, 0, 0)))


def write_tar(path, members, format=tarfile.PAX_FORMAT):
    """members: (name, bytes), or a TarInfo."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def pairs_of(numbers, prefix=""):
    return [member for n in numbers for member in ((f"{prefix}{n:04d}.png", picture(n)), (f"{prefix}{n:04d}.txt", f"picture {n}".encode()))]


def captions(tmp_path, result, work="work"):
    return sorted(caption for _, caption in samples_of(tmp_path / work, result.manifest))


# -- tars


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_pictures_in_tars_are_taken_like_those_in_folders(tmp_path, format, forked_decoders):
    folder = write_dataset(tmp_path / "data", 2)
    long = "f" * 150 + "/"
    write_tar(folder / "a.tar", pairs_of(range(10, 15), long if format != tarfile.USTAR_FORMAT else "f/"), format)
    write_tar(folder / "sub" / "b.TAR", [*pairs_of(range(20, 23)), ("readme.md", b"no sample"), ("0020.json", b"{}")], format)
    result = ingest(folder, tmp_path / "work", workers=0, shard_samples=4)
    assert captions(tmp_path, result) == sorted(f"picture {n}" for n in [0, 1, *range(10, 15), 20, 21, 22])
    assert result.rejected == [] and result.manifest.total == 10
    assert not ingest(folder, tmp_path / "work", workers=0, shard_samples=4).fresh
    write_tar(folder / "a.tar", pairs_of(range(10, 14)))
    workers = 2 if format == tarfile.PAX_FORMAT else 0  # two that start take 0.3 s of a core
    assert ingest(folder, tmp_path / "work", workers=workers, shard_samples=4).manifest.total == 9


def test_our_own_shards_are_a_dataset_for_others(tmp_path):
    first = ingest(write_dataset(tmp_path / "data", 10), tmp_path / "work", workers=0, shard_samples=4)
    again = ingest(tmp_path / "work" / "shards", tmp_path / "again", workers=0, shard_samples=4)
    assert captions(tmp_path, again, "again") == captions(tmp_path, first)
    assert again.rejected == [] and again.changed == []


def test_members_of_one_path_up_to_the_first_dot_are_a_sample(tmp_path):
    members = [
        ("d.ir/a.seg.png", picture(1)),
        ("d.ir/a.Png", picture(2)),
        ("d.ir/a.TXT", b"upper"),
        ("b.caption", b"b"),
        ("b.webp", picture(3)),
    ]
    write_tar(tmp_path / "data" / "x.tar", members)
    found = {pair.name: pair.caption is not None for pair in list_folder(tmp_path / "data", [])}
    assert found == {"x.tar/d.ir/a.png": True, "x.tar/b.webp": True}


def test_a_picture_in_a_tar_with_a_second_dot_in_its_name_is_left_out_with_a_reason(tmp_path):
    names = ("a.png", "a.depth.png", "v1.0_cat.PNG", "v1.0_cat.txt", "d/12.30.11.jpg", "._a.png", "d/._b.png", "only.txt")
    write_tar(tmp_path / "data" / "x.tar", [(name, picture(1) if name.lower().endswith(("png", "jpg")) else b"a cat") for name in names])
    faults = []
    assert [pair.name for pair in list_folder(tmp_path / "data", faults)] == ["x.tar/a.png"]
    reason = "has a second dot in its name, which a tar's pictures may not: rename it"
    assert faults == [("x.tar/v1.0_cat.png", reason), ("x.tar/d/12.30.11.jpg", reason)]


def odd(name, kind, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_what_is_no_plain_file_in_a_tar_is_left_out_with_a_reason(tmp_path):
    folder = tmp_path / "data"
    members = [
        *pairs_of(range(2)),
        (odd("soft.png", tarfile.SYMTYPE, "/etc/passwd"), b""),
        (odd("hard.png", tarfile.LNKTYPE, "0000.png"), b""),
        (odd("pipe.png", tarfile.FIFOTYPE), b""),
        (odd("disk.png", tarfile.BLKTYPE), b""),
        ("0001.png", picture(9)),
        ("../../up.png", picture(5)),
        ("../../up.txt", b"only a name: nothing is unpacked"),
        ("alone.png", picture(6)),
    ]
    write_tar(folder / "x.tar", members)
    result = ingest(folder, tmp_path / "work", workers=0)
    assert captions(tmp_path, result) == ["only a name: nothing is unpacked", "picture 0", "picture 1"]
    reasons = dict(result.rejected)
    assert set(reasons) == {f"x.tar/{name}" for name in ("soft.png", "hard.png", "pipe.png", "disk.png", "0001.png", "alone.png")}
    assert "twice" in reasons["x.tar/0001.png"] and "no caption" in reasons["x.tar/alone.png"]
    assert "no plain file" in reasons["x.tar/soft.png"]


def negative_size(data, at):
    """`data` with a member's size field made -512, as Python's tarfile reads it: base 256."""
    header = bytearray(data[at : at + 512])
    header[124:136] = (-512).to_bytes(12, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + bytes(header) + data[at + 512 :]


def huge_header(data):
    """A PAX header that claims 8 GiB, before everything else."""
    info = odd("x", tarfile.XHDTYPE)
    info.size = 8 << 30
    return info.tobuf(tarfile.GNU_FORMAT) + data


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (lambda data: data[:5000], [0, 1]),
        (lambda data: data[:3000], [0]),
        (lambda data: data[:3172], [0]),
        (lambda data: negative_size(data, 2048), [0]),
        (huge_header, []),
        (lambda data: data[:2048] + os.urandom(512) + data[2560:], [0]),
        (lambda data: b"\x1f\x8b" + data, []),
        (lambda data: b"", []),
        (lambda data: b"no tar at all", []),
    ],
)
def test_a_damaged_tar_gives_what_it_has_before_the_damage(tmp_path, damage, left):
    folder = write_dataset(tmp_path / "data", 0)
    pixel = Image.new("RGB", (8, 8))
    pixel.putpixel((0, 0), (1, 2, 3))
    (folder / "fine.png").write_bytes(encoded(pixel))
    (folder / "fine.txt").write_text("fine")
    path = write_tar(folder / "x.tar", pairs_of(range(3)), tarfile.USTAR_FORMAT)
    with tarfile.open(path) as tar:
        assert tar.getmembers()[2].offset == 2048
    path.write_bytes(damage(path.read_bytes()))
    result = ingest(folder, tmp_path / "work", workers=0)
    assert captions(tmp_path, result) == sorted(["fine", *(f"picture {n}" for n in left)])
    assert [name for name, reason in result.rejected if "damaged" in reason] == ["x.tar"]


@pytest.mark.parametrize("mark", ["ingest.json", "ledger.sqlite"])
def test_an_earlier_work_folder_within_the_dataset_is_left_out_and_listed(tmp_path, mark):
    folder = write_dataset(tmp_path / "data", 3)
    earlier = ingest(folder, folder / "work", workers=0)
    (folder / "work" / "ingest.json").rename(folder / "work" / mark)
    result = ingest(folder, tmp_path / "other", workers=0)
    assert result.digest == earlier.digest and result.rejected == [("work", "the work folder of a dd-datasetserver")]


def test_a_folder_within_the_dataset_that_cannot_be_read_is_listed(tmp_path, monkeypatch):
    folder = write_dataset(tmp_path / "data", 3)
    write_dataset(folder / "closed", 2)

    def scan(path, scandir=os.scandir):
        if path == str(folder / "closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    result = ingest(folder, tmp_path / "work", workers=0)
    assert result.manifest.total == 3 and result.rejected == [("closed", "a folder that cannot be read: Permission denied")]


def test_compressed_tars_and_links_out_of_the_folder_are_named_in_the_report(tmp_path):
    folder = write_dataset(tmp_path / "data", 1)
    (folder / "x.tar.gz").write_bytes(b"")
    (folder / "y.tgz").write_bytes(b"")
    write_tar(tmp_path / "elsewhere.tar", pairs_of(range(2)))
    (folder / "out.tar").symlink_to(tmp_path / "elsewhere.tar")
    result = ingest(folder, tmp_path / "work", workers=0)
    assert result.manifest.total == 1
    assert [name for name, _ in result.rejected] == ["out.tar", "x.tar.gz", "y.tgz"]


# -- datasets


def write_parquet(folder, rows, features):
    from datasets import Dataset

    (folder / "data").mkdir(parents=True)
    half = len(rows["image"]) // 2
    for part, span in enumerate((slice(0, half), slice(half, None))):
        table = Dataset.from_dict({name: column[span] for name, column in rows.items()}, features=features)
        table.to_parquet(str(folder / "data" / f"train-0000{part}-of-00002.parquet"))
    return folder


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    """20 rows: one without a picture, one whose path leads away, one without words, one with several captions."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    images = [{"bytes": picture(n), "path": None} for n in range(20)]
    images[3], images[4], images[5] = None, {"bytes": None, "path": "/etc/hostname"}, {"bytes": b"no picture", "path": None}
    texts = [[f"picture {n}"] for n in range(20)]
    texts[6], texts[7] = [], ["first", "second"]
    return write_parquet(tmp_path / "hub", {"image": images, "text": texts, "more": list(range(20))}, features_of_rows())


def features_of_rows():
    import datasets

    return datasets.Features({"image": datasets.Image(), "text": datasets.List(datasets.Value("string")), "more": datasets.Value("int64")})


def test_rows_of_a_dataset_are_streamed_checked_and_named_by_their_numbers(tmp_path, parquet, forked_decoders):
    source = Hub(str(parquet))
    result = ingest(source, tmp_path / "work", workers=0, shard_samples=8)
    assert captions(tmp_path, result) == sorted(["first\nsecond", *(f"picture {n}" for n in (0, 1, 2, *range(8, 20)))])
    reasons = dict(result.rejected)
    assert set(reasons) == {f"train/{n:09d}" for n in (3, 4, 5, 6)}
    assert "leads out" in reasons["train/000000004"] and reasons["train/000000006"] == "caption is empty"
    assert [caption for _, caption in samples_of(tmp_path / "work", result.manifest)] != captions(tmp_path, result), "shuffled"
    again = ingest(source, tmp_path / "again", workers=2, shard_samples=8)
    assert again.digest == result.digest
    assert not ingest(source, tmp_path / "work", workers=0, shard_samples=8).fresh
    assert ingest(Hub(str(parquet), max_samples=2), tmp_path / "few", workers=0).manifest.total == 2


def test_a_stream_that_was_cut_off_goes_on(tmp_path, parquet):
    whole = ingest(Hub(str(parquet)), tmp_path / "whole", workers=0, shard_samples=4)
    with pytest.raises(Interrupted):
        ingest(Hub(str(parquet)), tmp_path / "work", workers=0, shard_samples=4, show=cut_at(13))
    again = ingest(Hub(str(parquet)), tmp_path / "work", workers=0, shard_samples=4)
    assert (again.digest, again.rejected) == (whole.digest, whole.rejected)


def test_rows_that_were_added_to_a_dataset_are_trained_when_it_is_told_to_grow(tmp_path, parquet):
    first = ingest(Hub(str(parquet)), tmp_path / "work", workers=0)
    more = {"image": [{"bytes": picture(n), "path": None} for n in (30, 31)], "text": [["new"], ["newer"]], "more": [0, 0]}
    added = sorted(write_parquet(tmp_path / "more", more, features_of_rows()).rglob("*.parquet"))
    for number, path in enumerate(added):
        path.rename(parquet / "data" / f"train-0000{2 + number}-of-00002.parquet")
    assert ingest(Hub(str(parquet)), tmp_path / "work", workers=0, frozen=True).digest == first.digest, "nobody said that it has grown"
    grown = ingest(Hub(str(parquet)), tmp_path / "work", workers=0, frozen=True, grow_from=3)
    assert [(g.from_epoch, g.shards) for g in grown.manifest.generations] == [(0, 1), (3, 2)]
    assert captions(tmp_path, grown) == sorted([*captions(tmp_path, first), "new", "newer"])
    assert ingest(Hub(str(parquet)), tmp_path / "work", workers=0, frozen=True, grow_from=4).digest == grown.digest


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"image_column": "picture"}, ExitCode.CONFIG, "no column 'picture'; it has image, text, more"),
        ({"caption_column": "caption"}, ExitCode.CONFIG, "--caption_column"),
        ({"split": "test"}, ExitCode.NETWORK, "test"),
        ({"name": "/nowhere/at/all"}, ExitCode.NETWORK, "cannot be read"),
    ],
)
def test_a_dataset_that_is_not_as_described_is_a_users_error(tmp_path, parquet, change, code, says):
    with pytest.raises(UserError) as error:
        ingest(Hub(**{"name": str(parquet), **change}), tmp_path / "work", workers=0)
    assert error.value.code == code and says in f"{error.value.message} {error.value.fix}"


def test_columns_are_mapped_and_pictures_may_be_plain_bytes(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    features = datasets.Features({"image": datasets.Value("binary"), "words": datasets.Value("string")})
    rows = {"image": [picture(n) for n in range(4)], "words": [f"w{n}" for n in range(4)]}
    folder = write_parquet(tmp_path / "hub", rows, features)
    result = ingest(Hub(str(folder), caption_column="words"), tmp_path / "work", workers=0)
    assert captions(tmp_path, result) == ["w0", "w1", "w2", "w3"]


def test_a_folder_of_pictures_is_read_through_datasets_too(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = write_dataset(tmp_path / "pictures", 3)
    for words in folder.glob("*.txt"):
        words.unlink()
    (folder / "metadata.jsonl").write_text("".join(f'{{"file_name": "{n:04d}.png", "text": "told {n}"}}\n' for n in range(3)))
    result = ingest(Hub(str(folder)), tmp_path / "work", workers=0)
    assert captions(tmp_path, result) == ["told 0", "told 1", "told 2"]
