"""The stream of checked samples is cut into shards: deterministic, so that equal samples give equal bytes."""

import io
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from blake3 import blake3

from datasetserver.pictures import Sample
from datasetserver.prepared import NoKeeper, Writer
from datasetserver.sources import picture_of
from swarm.digest import digest_bytes
from swarm.protocol import Shard
from swarm.run.family import families

SHARD_BYTES = 48 << 20
CLIP_TOKENS = 75
"""Of a caption, besides the two that mark its beginning and end."""
_CUTS_CAPTIONS = " and ".join(family.title for family in families().values() if family.caption_tokens == CLIP_TOKENS + 2)
# The pieces that CLIP's tokenizer cuts a text into before it cuts those: each becomes one token or more.
_TOKEN = re.compile(r"'(?:s|t|re|ve|m|ll|d)|[^\W\d_]+|\d|(?:[^\s\w]|_)+")
MASK = "a mask"


Table = list[tuple[str, str]]


@dataclass(frozen=True)
class Found:
    """What the samples of shards turned out to be: (name of a picture, what it is); see `Ingested`. samples: (name, digest of the picture) of each."""

    rejected: Table = field(default_factory=list)
    duplicates: Table = field(default_factory=list)
    changed: Table = field(default_factory=list)
    notes: Table = field(default_factory=list)
    samples: Table = field(default_factory=list)

    def extend(self, other: Mapping[str, Iterable[Sequence[str]]]) -> None:
        """By the tables of `other`."""
        for table, rows in other.items():
            getattr(self, table).extend((name, what) for name, what in rows)

    def tables(self) -> dict[str, Table]:
        return {table.name: getattr(self, table.name) for table in fields(self)}


class Batches:
    """Cuts the stream of samples into shards. `taken`: how many pairs of the stream are in those that are kept.

    Its state before any shard's first sample depends only on what was in the shards before: that is what `done` brings back.
    """

    def __init__(
        self,
        shard_samples: int,
        drop_twins: bool,
        done: Iterable[dict],
        resolution: int = 0,
        first_index: int = 0,
        known: Iterable[tuple[str, str]] = (),
    ):
        """drop_twins: reject a picture of the same bytes as an earlier one. first_index: of the first shard. known: (name, digest) of the pictures of the shards before it."""
        self._most, self._drop, self._resolution, self._first_index = shard_samples, drop_twins, resolution, first_index
        self.shards: list[Shard] = []
        self.found = Found()
        self.taken = 0
        self._first: dict[bytes, str] = {}
        for name, digest in known:
            self._first.setdefault(bytes.fromhex(digest), name)
        self._clear()
        for entry in done:
            self.shards.append(Shard.model_validate(entry["shard"]))
            self._take_over(entry)
            for name, digest in entry["samples"]:
                self._first.setdefault(bytes.fromhex(digest), name)

    def _take_over(self, news: Mapping[str, Any]) -> None:
        self.found.extend({table: news[table] for table in self.found.tables()})
        self.taken += news["taken"]

    def _clear(self) -> None:
        self._samples: list[Sample] = []
        self._bytes = 0
        self._news: dict[str, Any] = {**Found().tables(), "taken": 0}

    def add(self, name: str, result: Sample | str, keeper: Writer | NoKeeper) -> None:
        """The next pair's sample, or why it has none."""
        digest = b""
        if not isinstance(result, str):
            digest = blake3(result.picture.data).digest()
            if self._drop and (first := self._twin(name, digest)):
                result = f"the same picture as {first}"
        if isinstance(result, str):
            self._say("rejected", name, result)
        else:
            size = len(result.picture.data)
            if self._samples and (len(self._samples) == self._most or self._bytes + size > SHARD_BYTES):
                self._cut(keeper)
            self._samples.append(result)
            self._bytes += size
            self._note(name, result, digest)
        self._news["taken"] += 1

    def _twin(self, name: str, digest: bytes) -> str | None:
        """The first picture of these bytes; None when it is this one, which may come several times an epoch."""
        first = picture_of(self._first.get(digest, name))
        return first if first != picture_of(name) else None

    def _note(self, name: str, sample: Sample, digest: bytes) -> None:
        self._news["samples"].append((name, digest.hex()))
        if sample.picture.change:
            self._say("changed", name, sample.picture.change)
        for note in notes_on(sample, self._resolution):
            self._say("notes", name, note)
        if twin := self._twin(name, digest):
            self._say("duplicates", name, twin)
        self._first.setdefault(digest, name)

    def _say(self, table: str, name: str, what: str) -> None:
        """Once for a picture, however often it comes in an epoch."""
        if picture_of(name) == name:
            self._news[table].append((name, what))

    def _cut(self, keeper: Writer | NoKeeper) -> None:
        shard, data = make_shard(self._first_index + len(self.shards), self._samples)
        self.shards.append(shard)
        self._take_over(self._news)
        keeper.keep(shard, data, self._news)
        self._clear()

    def end(self, keeper: Writer | NoKeeper) -> None:
        if self._samples:
            self._cut(keeper)
        self.found.extend({"rejected": self._news["rejected"]})


def notes_on(sample: Sample, resolution: int) -> list[str]:
    """What may surprise whoever trains it at that resolution; 0: unknown."""
    notes = []
    if any(fewest_tokens(caption) > CLIP_TOKENS for caption in sample.captions):
        notes.append(f"a caption of more than {CLIP_TOKENS} tokens: {_CUTS_CAPTIONS} do not read its end")
    if min(sample.picture.width, sample.picture.height) < resolution:
        notes.append(f"a side shorter than {resolution} pixels: enlarged")
    if sample.picture.masked:
        notes.append(MASK)
    return notes


def fewest_tokens(caption: str) -> int:
    """How many tokens it is for CLIP, or fewer: a rare word takes several."""
    return len(_TOKEN.findall(caption.lower()))


def make_shard(index: int, samples: Sequence[Sample]) -> tuple[Shard, bytes]:
    """A shard and its bytes; equal samples give equal bytes."""
    # One name for all pictures, whatever their format: `datasets` 5.2.0 takes the columns from the first five samples of the first shard. It refuses
    # them when their extensions differ, and silently gives None for later pictures with another one, also in other shards. Whether all pictures
    # are of one format is known only when the last shard is written. Whoever decodes looks at the bytes, JPEG, PNG or WEBP, and not at the name.
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, sample in enumerate(samples):
            key = f"{index:06d}_{number:06d}"
            _add(tar, f"{key}.jpg", sample.picture.data)
            _add(tar, f"{key}.txt", "\n".join(sample.captions).encode())
    data, pictures, weights = out.getvalue(), [sample.picture for sample in samples], [sample.weight for sample in samples]
    columns = {
        "widths": [picture.width for picture in pictures],
        "heights": [picture.height for picture in pictures],
        "image_bytes": [len(picture.data) for picture in pictures],
        "weights": weights if any(weight != 1 for weight in weights) else [],
    }
    return Shard(index=index, digest=digest_bytes(data), bytes=len(data), samples=len(samples), **columns), data


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # mtime, uid, gid 0 and mode 0644 by default: nothing of this machine is in it
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
