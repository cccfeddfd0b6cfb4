"""Shards on a peer's disk: the cache that keeps them, and what is read from them."""

import io
import os

import pytest
from PIL import Image

from peer.data.shards import ShardCache, read_shard
from swarm.digest import digest_bytes
from swarm.errors import ExitCode, UserError

BASE = "0" * 64


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
    from datasetserver.ingest import ingest, shard_path

    (tmp_path / "data").mkdir()
    for number in range(8):
        Image.new("RGB", (8, 8)).save(tmp_path / "data" / f"{number}.{'png' if number % 2 else 'jpg'}")
        (tmp_path / "data" / f"{number}.txt").write_text(f"número {number}", encoding="utf-8")
    result = ingest(tmp_path / "data", tmp_path / "work", workers=0)
    rows = read_shard(shard_path(tmp_path / "work", result.manifest.shards[0].digest))
    assert sorted(caption for _, caption in rows) == [f"número {number}" for number in range(8)]
    assert {Image.open(io.BytesIO(image)).format for image, _ in rows} == {"PNG", "JPEG"}
