"""Shards on this machine's disk: a cache named by content with a size limit, and what is read from one."""

import contextlib
import logging
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from swarm import files
from swarm.digest import digest_file
from swarm.errors import ExitCode, UserError
from swarm.protocol import MAX_CAPTION_BYTES
from swarm.tars import Member, members

log = logging.getLogger(__name__)
_NO_SAMPLE = (b"", "")
_OURS = re.compile(r"[0-9a-f]{64}\.tar(\.part)?")


class ShardCache:
    """Verified shards in `folder`/shards, at most `limit_bytes` of them; deletes only files that it named itself.

    pinned: digests that are needed now and stay, whatever the limit.
    """

    def __init__(self, folder: Path, limit_bytes: int, pinned: Callable[[], Collection[str]] = tuple):
        self._folder, self._limit, self._pinned = folder / "shards", limit_bytes, pinned
        self._fetched: Counter[str] = Counter()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _disk_error(self._folder, error) from None

    def get(self, digest: str) -> Path | None:
        """The shard's file when it is here and undamaged. A damaged one is deleted."""
        path = self._folder / f"{digest}.tar"
        if not path.exists():
            return None
        if digest_file(path) != digest:
            log.warning("the cached shard %s is damaged; fetching it again", digest[:16])
            path.unlink(missing_ok=True)
            return None
        files.touch(path)  # the age that eviction goes by
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
        if digest_file(part) != digest:
            part.unlink(missing_ok=True)
            return None
        return part.replace(self._folder / f"{digest}.tar")

    @contextlib.contextmanager
    def fetched(self, digest: str) -> Iterator[None]:
        """Meanwhile what has come of this shard stays, whatever the limit."""
        self._fetched[digest] += 1
        try:
            yield
        finally:
            self._fetched[digest] -= 1
            self._fetched = +self._fetched

    def make_room(self, needed: int) -> None:
        """Delete the shards that were not used for longest until `needed` more bytes are within the limit."""
        found = []
        for path in self._folder.iterdir():
            if _OURS.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # another download of ours has just admitted it
                    found.append((path.stat(), path))
        excess = sum(status.st_size for status, _ in found) + needed - self._limit
        pinned = {*self._pinned(), *self._fetched}
        for status, path in sorted(found, key=lambda item: item[0].st_mtime):
            if excess <= 0:
                return
            if path.name[:64] not in pinned:
                path.unlink(missing_ok=True)
                excess -= status.st_size


Row = tuple[bytes, str | tuple[str, ...]]
"""An encoded picture and its caption, or several, one of which is taken by chance."""


def read_shard(path: Path, samples: int) -> list[Row]:
    """All `samples` of a shard, in the order of its tar: their pictures' bytes as they lie there.

    A sample without a picture or a caption is (b"", ""), which is left out and counted like a broken picture. So is every sample of a
    tar that is damaged or has another number of them than its host has signed: which is which cannot be known then.
    """
    try:
        places = _places(path, 2 * samples)
        if len(places) != samples:
            raise tarfile.ReadError(f"{len(places)} samples instead of {samples}")
        with path.open("rb") as file:
            return [_sample(file, place) for place in places]
    except Exception as error:  # tarfile raises ReadError, OSError, ValueError, UnicodeError, RecursionError, ... on hostile bytes
        log.warning("none of the %d samples of the shard %s can be used: %s", samples, path.stem[:16], error or type(error).__name__)
        return [_NO_SAMPLE] * samples


def _places(path: Path, most: int) -> list[dict[str, Member]]:
    """Where each sample's files are, by their suffix; a sample is what has one name up to its first dot. Raises for more than `most` files."""
    samples: dict[str, dict[str, Member]] = {}
    for number, member in enumerate(members(path)):
        if number >= most:
            raise tarfile.ReadError(f"more than {most} files")
        key, _, suffix = member.name.partition(".")
        if samples.setdefault(key, {}).setdefault(suffix, member) is not member:
            raise tarfile.ReadError(f"{member.name} is there twice")
    return list(samples.values())


def _sample(file: BinaryIO, place: Mapping[str, Member]) -> Row:
    picture, caption = place.get("jpg"), place.get("txt")
    if not (picture and picture.plain and caption and caption.plain and caption.size <= MAX_CAPTION_BYTES):
        return _NO_SAMPLE
    try:
        lines = _read(file, caption).decode("utf-8").split("\n")  # each is a caption
        return _read(file, picture), lines[0] if len(lines) == 1 else tuple(lines)
    except UnicodeDecodeError:
        return _NO_SAMPLE


def _read(file: BinaryIO, member: Member) -> bytes:
    file.seek(member.offset)
    return file.read(member.size)


def _disk_error(path: Path, error: OSError) -> UserError:
    return UserError(
        f"Cannot write in {path}: {error.strerror}.", fix="Free some space, or choose another --cache_dir.", code=ExitCode.DISK
    )
