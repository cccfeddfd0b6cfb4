"""Shards on this machine's disk: a cache named by content with a size limit, and reading one through `datasets`."""

import logging
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

from blake3 import blake3

from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)
_OURS = re.compile(r"[0-9a-f]{64}\.tar(\.part)?")


class ShardCache:
    """Verified shards in `folder`/shards, at most `limit_bytes` of them; deletes only files that it named itself.

    pinned: digests that are needed now and stay, whatever the limit.
    """

    def __init__(self, folder: Path, limit_bytes: int, pinned: Callable[[], Collection[str]] = tuple):
        self._folder, self._limit, self._pinned = folder / "shards", limit_bytes, pinned
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _disk_error(self._folder, error) from None

    def get(self, digest: str) -> Path | None:
        """The shard's file when it is here and undamaged. A damaged one is deleted."""
        path = self._folder / f"{digest}.tar"
        if not path.exists():
            return None
        if _digest_file(path) != digest:
            log.warning("the cached shard %s is damaged; fetching it again", digest[:16])
            path.unlink(missing_ok=True)
            return None
        os.utime(path)  # the age that eviction goes by
        return path

    def has(self, digest: str) -> bool:
        """Whether the shard's file is here, damaged or not."""
        return (self._folder / f"{digest}.tar").exists()

    def part(self, digest: str) -> Path:
        """Where the bytes of a shard gather, also over several runs of this program."""
        return self._folder / f"{digest}.tar.part"

    def admit(self, digest: str) -> Path | None:
        """Take over a completed part under its final name; None (and the part is deleted) when its bytes are not the shard's."""
        part = self.part(digest)
        if _digest_file(part) != digest:
            part.unlink(missing_ok=True)
            return None
        return part.replace(self._folder / f"{digest}.tar")

    def make_room(self, needed: int) -> None:
        """Delete the shards that were not used for longest until `needed` more bytes are within the limit."""
        files = [(path.stat(), path) for path in self._folder.iterdir() if _OURS.fullmatch(path.name)]
        excess = sum(status.st_size for status, _ in files) + needed - self._limit
        pinned = set(self._pinned())
        for status, path in sorted(files, key=lambda item: item[0].st_mtime):
            if excess <= 0:
                return
            if path.name[:64] not in pinned:
                path.unlink(missing_ok=True)
                excess -= status.st_size


def read_shard(path: Path) -> list[tuple[bytes, str]]:
    """(encoded picture, caption) of every sample of a shard, in the order of its tar.

    Through `datasets`, whose own features are told rather than guessed (3 ms a shard), pictures left encoded (20 ms for 256
    samples; its import, once, takes a second).
    """
    from datasets import Features, Image, Value, load_dataset

    features = Features({"__key__": Value("string"), "__url__": Value("string"), "jpg": Image(decode=False), "txt": Value("string")})
    rows = load_dataset("webdataset", data_files={"train": [str(path)]}, split="train", streaming=True, features=features)
    return [(row["jpg"]["bytes"], row["txt"]) for row in rows]


def _digest_file(path: Path) -> str:
    hasher = blake3()
    with path.open("rb") as file:
        while piece := file.read(4 << 20):
            hasher.update(piece)
    return hasher.hexdigest()


def _disk_error(path: Path, error: OSError) -> UserError:
    return UserError(
        f"Cannot write in {path}: {error.strerror}.", fix="Free some space, or choose another --cache_dir.", code=ExitCode.DISK
    )
