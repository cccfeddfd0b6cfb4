"""Shards on a peer's disk: the cache that keeps them, and what is read from them."""

import gzip
import io
import lzma
import os
import random
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from peer.data.shards import ShardCache, read_shard
from swarm.digest import digest_bytes
from swarm.errors import ExitCode, UserError
from swarm.protocol import MAX_CAPTION_BYTES

BASE = "0" * 64
SEED = 20
NOTHING = (b"", "")


def fill(cache, *contents):
    digests = []
    for content in contents:
        digest = digest_bytes(content)
        cache.part(digest).write_bytes(content)
        assert cache.admit(digest)
        digests.append(digest)
    return digests


def test_the_cache_forgets_what_was_not_used_for_longest_and_nothing_that_is_not_its_own(tmp_path):
    pinned = set()
    cache = ShardCache(tmp_path, 300, pinned=lambda: pinned)
    digests = fill(cache, b"a" * 100, b"b" * 100, b"c" * 100)
    (tmp_path / "shards" / "holiday.tar").write_bytes(bytes(1000))
    for age, digest in enumerate(digests):
        os.utime(tmp_path / "shards" / f"{digest}.tar", (1000 + age, 1000 + age))
    pinned.add(digests[0])
    cache.make_room(100)
    assert [cache.get(digest) is not None for digest in digests] == [True, False, True]
    assert (tmp_path / "shards" / "holiday.tar").exists()


def test_what_has_come_of_a_shard_stays_while_it_is_fetched_however_small_the_cache(tmp_path):
    """Of held-out pictures the next leased shard deleted the part under their download, and the trainer ended with "No such file"."""
    cache, digest = ShardCache(tmp_path, 0), "a" * 64
    with cache.fetched(digest), cache.fetched(digest):
        cache.part(digest).write_bytes(b"half")
        cache.make_room(100)
        assert cache.part(digest).exists()
    cache.make_room(100)
    assert not cache.part(digest).exists() and not cache._fetched


def test_room_is_made_also_while_another_download_is_admitted(tmp_path, monkeypatch):
    """Seen once: held-out pictures came in beside the first lease, and the peer ended with "No such file or directory"."""
    cache = ShardCache(tmp_path, 100)
    kept, gone = tmp_path / "shards" / f"{'a' * 64}.tar", tmp_path / "shards" / f"{'b' * 64}.tar.part"
    kept.write_bytes(bytes(60))
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([gone, kept]))
    cache.make_room(60)
    assert not kept.exists()


def test_the_cache_admits_only_what_its_name_says(tmp_path):
    cache = ShardCache(tmp_path, 1000)
    cache.part(BASE).write_bytes(b"something else")
    assert cache.admit(BASE) is None
    assert not cache.part(BASE).exists() and cache.get(BASE) is None


def test_a_cache_that_cannot_be_written_is_a_users_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as raised:
        ShardCache(tmp_path / "file", 1000)
    assert raised.value.code == ExitCode.DISK


def test_shards_with_png_and_jpeg_are_read_alike(tmp_path):
    from datasetserver.ingest import ingest
    from datasetserver.prepared import shard_path

    (tmp_path / "data").mkdir()
    for number in range(8):
        Image.new("RGB", (8, 8)).save(tmp_path / "data" / f"{number}.{'png' if number % 2 else 'jpg'}")
        (tmp_path / "data" / f"{number}.txt").write_text(f"número {number}", encoding="utf-8")
    result = ingest(tmp_path / "data", tmp_path / "work", workers=0)
    rows = read_shard(shard_path(tmp_path / "work", result.manifest.shards[0].digest), 8)
    assert sorted(caption for _, caption in rows) == [f"número {number}" for number in range(8)]
    assert {Image.open(io.BytesIO(image)).format for image, _ in rows} == {"PNG", "JPEG"}


# ---------------------------------------------------------------- a lying host's tars


def tar_of(path, *files, mode="w"):
    """A tar of (name, bytes), or of (name, TarInfo changes as a dict)."""
    with tarfile.open(path, mode) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            if isinstance(content, dict):
                for field, value in content.items():
                    setattr(info, field, value)
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress], ids=["xz", "gzip"])
def test_a_member_that_looks_compressed_is_the_bytes_that_lie_in_the_tar(tmp_path, pack):
    """`datasets` made 3.4 GB of such a member of 0.25 MB. One of a few MB shows as well whether it is unpacked."""
    bomb = pack(bytes(random.Random(SEED).randrange(5, 10) << 20))
    assert len(bomb) < 1 << 16
    rows = read_shard(tar_of(tmp_path / "bomb.tar", ("0.jpg", bomb), ("0.txt", b"a cat"), ("1.jpg", b"picture"), ("1.txt", b"a dog")), 2)
    assert rows == [(bomb, "a cat"), (b"picture", "a dog")]
    assert read_shard(tar_of(tmp_path / "named.tar", ("0.jpg.xz", bomb), ("0.txt.gz", bomb)), 1) == [NOTHING]


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_tar_that_is_compressed_as_a_whole_is_no_shard(tmp_path, mode, caplog):
    assert read_shard(tar_of(tmp_path / "packed.tar", ("0.jpg", bytes(1 << 20)), ("0.txt", b"a"), mode=mode), 1) == [NOTHING]
    assert "none of the 1 samples of the shard packed can be used" in caplog.text


def test_a_sample_that_is_no_picture_with_a_caption_costs_that_sample(tmp_path):
    rows = read_shard(
        tar_of(
            tmp_path / "shard.tar",
            ("0.jpg", b"zero"), ("0.txt", b"good"),
            ("1.jpg", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}), ("1.txt", b"a link"),
            ("2.jpg", {"type": tarfile.LNKTYPE, "linkname": "0.jpg"}), ("2.txt", b"another"),
            ("3.jpg", b"three"), ("3.txt", b"\xff\xfe"),
            ("4.jpg", b"four"), ("4.txt", b"a" * (MAX_CAPTION_BYTES + 1)),
            ("5.jpg", b"five"),
            ("../6.jpg", b"six"), ("../6.txt", b"nowhere, and nothing is written"),
        ),
        7,
    )  # fmt: skip
    assert rows == [(b"zero", "good"), *[NOTHING] * 5, NOTHING] and not (tmp_path.parent / "6.jpg").exists()


def test_a_tar_with_other_samples_than_the_host_signed_is_used_for_none(tmp_path, caplog):
    many = tar_of(tmp_path / "many.tar", *[(f"{i}.{kind}", b"x") for i in range(3) for kind in ("jpg", "txt")])
    assert read_shard(many, 3) == [(b"x", "x")] * 3
    for samples in (1, 2, 4):
        assert read_shard(many, samples) == [NOTHING] * samples
    crowd = tar_of(tmp_path / "crowd.tar", *[(f"0.{i}", b"") for i in range(50)])
    assert read_shard(crowd, 1) == [NOTHING] and "more than 2 files" in caplog.text
    assert read_shard(tar_of(tmp_path / "twice.tar", ("0.jpg", b"1"), ("0.jpg", b"2")), 1) == [NOTHING] and "there twice" in caplog.text


@pytest.mark.parametrize("position", [0, 100, 124, 148, 156, 512, 1024, 1100])
def test_a_damaged_or_torn_tar_is_survived(tmp_path, position):
    rng, path = random.Random(f"{SEED}:{position}"), tmp_path / "shard.tar"
    whole = tar_of(path, ("0.jpg", b"x" * 600), ("0.txt", b"a")).read_bytes()
    for _ in range(20):
        damaged = bytearray(whole)
        damaged[position : position + 8] = rng.randbytes(8)
        path.write_bytes(damaged)
        (row,) = read_shard(path, 1)
        assert len(row[0]) <= len(whole)
        path.write_bytes(whole[: position + rng.randrange(400)])
        assert read_shard(path, 1) == [NOTHING]


def test_a_header_that_claims_gigabytes_is_not_believed(tmp_path):
    """A name of 2 GiB: tarfile would read it whole."""
    path = tmp_path / "shard.tar"
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, random.Random(SEED).randrange(1 << 31, 1 << 33)
    with path.open("wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.truncate(header.size + 4096)
    assert read_shard(path, 1) == [NOTHING]
