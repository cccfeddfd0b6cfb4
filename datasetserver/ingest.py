"""From captioned pictures to shards: checked once, deterministic, and everything left out is listed with its reason.

Samples are shuffled once, so that every shard is an unbiased draw of the dataset. Equal datasets give equal digests.
"""

import contextlib
import csv
import io
import json
import logging
import os
import re
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import ValidationError

from datasetserver.loading import load_all
from datasetserver.pictures import Sample
from datasetserver.sources import Folder, Source, picture_of
from swarm import files
from swarm.digest import canonical_json, digest_bytes, digest_json
from swarm.errors import ExitCode, UserError
from swarm.held_out import MOST_HELD_OUT, rank_of, unfit
from swarm.picture_folder import Pair, nothing_in
from swarm.protocol import Generation, Manifest, Shard
from swarm.run.family import families

log = logging.getLogger(__name__)
SHARD_SAMPLES = 256
SHARD_BYTES = 48 << 20
_FORMAT = 4  # of the shards: raise it when the same dataset would give other pixels or captions
CLIP_TOKENS = 75
_CUTS_CAPTIONS = " and ".join(family.title for family in families().values() if family.caption_tokens == CLIP_TOKENS + 2)
"""Of a caption, besides the two that mark its beginning and end."""
# The pieces that CLIP's tokenizer cuts a text into before it cuts those: each becomes one token or more.
_TOKEN = re.compile(r"'(?:s|t|re|ve|m|ll|d)|[^\W\d_]+|\d|(?:[^\s\w]|_)+")
_JOURNAL = "ingest.journal"
_SAMPLES = "samples.csv"
_SHARDS = '"shards":['


@dataclass(frozen=True)
class Ingested:
    """A dataset ready to be served. The lists are known only when it was checked anew (`fresh`).

    digest: of the manifest; first: of its first generation, by which a run names its dataset; source: of what it was made of. rejected: (name, reason).
    duplicates: (name, name of the first picture with the same bytes). changed: (name, what was done to make it an RGB picture).
    notes: (name, what its trainer may want to know of it). format: of the shards' maker. held_out: the share of the pictures that nobody trains on.
    """

    manifest: Manifest
    digest: str
    first: str
    source: str
    rejected: list[tuple[str, str]]
    fresh: bool
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    changed: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    format: int = _FORMAT
    held_out: float = 0.0

    @property
    def older(self) -> bool:
        """Whether an older version of this program made it, by rules of its own."""
        return self.format < _FORMAT


@dataclass(frozen=True)
class Policy:
    """missing_captions: 'reject', or 'empty' to train those pictures without words. duplicates: 'keep' or 'drop'; found in any case.

    masks: transparency says where the loss counts, and is kept. held_out: the share of the pictures that nobody trains on.
    """

    missing_captions: str = "reject"
    duplicates: str = "keep"
    masks: bool = False
    held_out: float = 0.0

    def told(self) -> dict[str, Any]:
        """Without masks and held-out pictures as before there were any."""
        return {name: value for name, value in asdict(self).items() if name not in ("masks", "held_out") or value}


def ingest(
    source: Source | Path,
    work_dir: Path,
    *,
    shard_samples: int = SHARD_SAMPLES,
    workers: int | None = None,
    policy: Policy = Policy(),
    dry: bool = False,
    grow_from: int | None = None,
    frozen: bool = False,
    resolution: int = 0,
    show: Callable = lambda pairs, count: pairs,
) -> Ingested:
    """Check `source` and write its shards and manifest into `work_dir`; nothing is done when they are there and up to date.

    An ingest that was cut off goes on after the last shard that it wrote. workers: processes, 0 for none, None for one per core.
    dry: check everything and write nothing. grow_from: keep the shards that are there, and add those of new samples as a generation that
    begins with this epoch. frozen: a run is under way, so that what is there may not be replaced; what an older version made is taken as it is.
    resolution: smaller pictures are noted; 0: none. show: wraps the iterable of samples, given how many there are or None, for a progress bar.
    Raises UserError for a source that is missing, has no sample that can be trained on, or changed though it is frozen.
    """
    if isinstance(source, Path):
        source = Folder(source)
    listing = source.list()

    def identity_with(samples: int) -> str:
        return digest_json([_FORMAT, samples, SHARD_BYTES, policy.told(), listing.identity])

    identity = identity_with(shard_samples)
    old = None if dry and grow_from is None else ingested(work_dir)
    if old and not dry and (old.source == identity or (old.older and frozen and grow_from is None)):
        return old
    if old and frozen and grow_from is None:
        for before in {SHARD_SAMPLES, *(shard.samples for shard in old.manifest.shards)}:
            if identity_with(before) == old.source:
                raise UserError(
                    f"shard_samples is {shard_samples}, and the run in {work_dir} began with {before}.",
                    fix=f"Start with --shard_samples {before}, or give another --work_dir for a new run.",
                )
        raise UserError(
            f"{source} or how to read it has changed since the run in {work_dir} began.",
            fix="Add --grow to train what is new from the next epoch on, or another --work_dir for a new run.",
        )
    grown = old if grow_from is not None else None
    known = _samples_of(work_dir, grown.manifest) if grown else []
    names = {picture_of(name) for name, _ in known}
    if grown:
        _refuse_another_weight(listing.pairs, names, _weights(grown.manifest, known), work_dir)
    pairs = (pair for pair in listing.pairs if picture_of(pair.name) not in names)
    if policy.missing_captions == "empty":
        pairs = (replace(pair, empty_ok=True) for pair in pairs)
    if policy.masks:
        pairs = (replace(pair, masked=True) for pair in pairs)
    aside: dict[str, Pair] = {}
    if policy.held_out and not grown:  # what is held out stays so for the run's life
        pairs = _without(pairs, policy.held_out, aside)
    with contextlib.ExitStack() as closing:
        keeper = _NoKeeper() if dry else closing.enter_context(Keeper(work_dir, identity))
        writer = _NoKeeper() if dry else Writer(work_dir)
        batches = Batches(shard_samples, policy, keeper.done, resolution, len(grown.manifest.shards) if grown else 0, known)
        count = None if listing.count is None else max(0, listing.count - len(names))
        rest = islice(pairs, batches.taken, None)
        for pair, result in show(load_all(rest, workers, listing.count), count):
            batches.add(pair.name, result, keeper)
        batches.end(keeper)
        held_out = Batches(shard_samples, policy, (), resolution, 0, known + batches.samples)
        for pair, result in load_all(aside.values(), workers, len(aside)):
            held_out.add(pair.name, result, writer)
        held_out.end(writer)
    for each in ("rejected", "duplicates", "changed", "notes", "samples"):
        getattr(batches, each).extend(getattr(held_out, each))
    rejected = sorted(listing.faults + batches.rejected)
    if not batches.shards and not grown:
        if not dry:
            _write_table(work_dir / "rejected.csv", ["file", "reason"], rejected)
        raise nothing_in(source, rejected)
    if policy.held_out and not grown and not held_out.shards:
        raise unfit(policy.held_out, 0, sum(shard.samples for shard in batches.shards))
    manifest = _grown(grown.manifest, batches.shards, grow_from or 0) if grown else Manifest.of(batches.shards, held_out=held_out.shards)
    data = canonical_json(manifest.model_dump())
    digest = digest_bytes(data)
    result = Ingested(
        manifest,
        digest,
        grown.first if grown else digest,
        identity,
        rejected,
        True,
        batches.duplicates,
        batches.changed,
        batches.notes,
        held_out=grown.held_out if grown else policy.held_out,
    )
    if frozen and not grown and not dry and _first(work_dir) not in (None, digest):
        raise UserError(
            f"Shards of the run in {work_dir} are missing, and {source} no longer gives the same ones.",
            fix="Restore that folder from a copy; or give another --work_dir for a new run.",
            code=ExitCode.DISK,
        )
    if not dry:
        _write_result(work_dir, result, data, known + batches.samples)
    return result


def _without(pairs: Iterable[Pair], share: float, aside: dict[str, Pair]) -> Iterator[Pair]:
    """The pairs that are trained; of each picture that is held out, one is put `aside`, by its picture's name."""
    for pair in pairs:
        picture = picture_of(pair.name)
        if rank_of(picture) < share and len(aside) < MOST_HELD_OUT:
            aside[picture] = replace(pair, name=picture)
        elif picture not in aside:
            yield pair


def ingested(work_dir: Path) -> Ingested | None:
    """The dataset that is ready in `work_dir`; None when there is none, or not all of it."""
    try:
        data = manifest_path(work_dir).read_bytes()
        digest, known = digest_bytes(data), json.loads((work_dir / "ingest.json").read_bytes())
        if known["manifest"] != digest:
            return None
        manifest = _parse(data)
        if not all(shard_path(work_dir, shard.digest).stat().st_size == shard.bytes for shard in [*manifest.shards, *manifest.held_out]):
            return None
        made = {"format": known.get("format", 0), "held_out": known.get("held_out", 0.0)}
        return Ingested(manifest, digest, known["first"], known["source"], [], fresh=False, **made)
    except (OSError, ValueError, ValidationError, KeyError, TypeError):
        return None


def _first(work_dir: Path) -> str | None:
    """The digest of the first generation of what was ready here once, whether or not all of it is there."""
    try:
        return json.loads((work_dir / "ingest.json").read_bytes())["first"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _parse(data: bytes) -> Manifest:
    """The manifest of its canonical JSON, shard by shard: all numbers of a million samples at once would take another 100 MB."""
    text, decode, shards = data.decode(), json.JSONDecoder().raw_decode, []
    begin = at = text.index(_SHARDS) + len(_SHARDS)
    while not shards or text[at : at + 1] == ",":
        shard, at = decode(text, at + bool(shards))
        shards.append(Shard.model_validate(shard))
    return Manifest.model_validate(json.loads(text[:begin] + text[at:]) | {"shards": shards})


def _grown(old: Manifest, new: Sequence[Shard], from_epoch: int) -> Manifest:
    """`old` with further shards, if there are any, of a generation that begins with `from_epoch`."""
    if not new:
        return old
    begins = max(from_epoch, old.generations[-1].from_epoch)
    generations = [*old.generations, Generation(from_epoch=begins, shards=len(old.shards) + len(new))]
    return Manifest.of([*old.shards, *new], generations, old.held_out)


def _write_result(work_dir: Path, result: Ingested, manifest: bytes, samples: Sequence[tuple[str, str]]) -> None:
    _write_table(work_dir / "rejected.csv", ["file", "reason"], result.rejected)
    _write_table(work_dir / "duplicates.csv", ["file", "same picture as"], result.duplicates)
    _write_table(work_dir / "changed.csv", ["file", "change"], result.changed)
    _write_table(work_dir / "notes.csv", ["file", "note"], result.notes)
    _write_table(work_dir / _SAMPLES, ["file", "digest"], samples, errors="surrogateescape")  # read again: names must come back as they are
    _replace(manifest_path(work_dir), manifest)
    state = {"source": result.source, "manifest": result.digest, "first": result.first, "format": _FORMAT, "held_out": result.held_out}
    _replace(work_dir / "ingest.json", canonical_json(state))
    _forget_others(work_dir / "shards", result.manifest)
    (work_dir / _JOURNAL).unlink(missing_ok=True)


def _samples_of(work_dir: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """(name, digest of the picture) of all samples of the manifest's shards, in the order of `_in_order`. Raises UserError."""
    path, count = work_dir / _SAMPLES, sum(shard.samples for shard in _in_order(manifest))
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as lines:
            # It is written before the manifest: a growth that was cut off between them leaves lines of shards that nobody has.
            samples = [(name, digest) for name, digest in islice(csv.reader(lines), 1, count + 1)]
        if len(samples) < count:
            raise ValueError(f"it lists {len(samples)} of {count} samples")
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {path}: {error}.", fix="Restore it: without it, --grow cannot tell which pictures are new.") from None
    return samples


def _in_order(manifest: Manifest) -> list[Shard]:
    """All shards as they were made: what is held out comes after the first generation."""
    first = manifest.generations[0].shards
    return [*manifest.shards[:first], *manifest.held_out, *manifest.shards[first:]]


def _weights(manifest: Manifest, samples: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Of the pictures of these samples, in the order of `_in_order`, whose loss weight is not 1."""
    weights = (weight for shard in _in_order(manifest) for weight in shard.weights or [1.0] * shard.samples)
    return {picture_of(name): weight for (name, _), weight in zip(samples, weights, strict=True) if weight != 1}


def _refuse_another_weight(pairs: Iterable[Pair], names: Collection[str], weights: Mapping[str, float], work_dir: Path) -> None:
    """Raise UserError where a picture with one of these `names`, so that it is in a shard already, has another weight than there.

    The weight is not taken: it is in the manifest whose digest names the run's dataset, and peers would train by two weights.
    """
    if not isinstance(pairs, Sequence):  # rows of the Hub, which have no weight, and are read once
        return
    for pair in pairs:
        before = weights.get(picture_of(pair.name), 1.0)
        if pair.weight != before and picture_of(pair.name) in names:
            raise UserError(
                f"loss_weight of {pair.name} is {pair.weight:g}, but {work_dir} was prepared with {before:g}.",
                fix=f"Set it back to {before:g}: what a run has stays; new pictures of another weight go into a folder of their own.",
            )


def shard_path(work_dir: Path, digest: str) -> Path:
    return work_dir / "shards" / f"{digest}.tar"


def manifest_path(work_dir: Path) -> Path:
    return work_dir / "manifest.json"


# -- writing


class Batches:
    """Cuts the stream of samples into shards. `taken`: how many pairs of the stream are in those that are kept.

    Its state before any shard's first sample depends only on what was in the shards before: that is what `done` brings back.
    """

    def __init__(
        self,
        shard_samples: int,
        policy: Policy,
        done: Iterable[dict],
        resolution: int = 0,
        first_index: int = 0,
        known: Iterable[tuple[str, str]] = (),
    ):
        """first_index: of the first shard. known: (name, digest) of the pictures of the shards before it."""
        self._most, self._policy, self._resolution, self._first_index = shard_samples, policy, resolution, first_index
        self.shards: list[Shard] = []
        self.rejected: list[tuple[str, str]] = []
        self.duplicates: list[tuple[str, str]] = []
        self.changed: list[tuple[str, str]] = []
        self.notes: list[tuple[str, str]] = []
        self.samples: list[tuple[str, str]] = []
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
        self.rejected += map(tuple, news["rejected"])
        self.duplicates += map(tuple, news["duplicates"])
        self.changed += map(tuple, news["changed"])
        self.notes += map(tuple, news["notes"])
        self.samples += map(tuple, news["samples"])
        self.taken += news["taken"]

    def _clear(self) -> None:
        self._samples: list[Sample] = []
        self._bytes = 0
        self._news: dict[str, Any] = {"rejected": [], "duplicates": [], "changed": [], "notes": [], "samples": [], "taken": 0}

    def add(self, name: str, result: Sample | str, keeper: "Writer") -> None:
        """The next pair's sample, or why it has none."""
        if not isinstance(result, str):
            result = self._unless_dropped(name, result)
        if isinstance(result, str):
            self._say("rejected", name, result)
        else:
            size = len(result.picture.data)
            if self._samples and (len(self._samples) == self._most or self._bytes + size > SHARD_BYTES):
                self._cut(keeper)
            self._samples.append(result)
            self._bytes += size
            self._note(name, result)
        self._news["taken"] += 1

    def _unless_dropped(self, name: str, sample: Sample) -> Sample | str:
        first = self._twin(name, blake3(sample.picture.data).digest())
        return f"the same picture as {first}" if first and self._policy.duplicates == "drop" else sample

    def _twin(self, name: str, digest: bytes) -> str | None:
        """The first picture of these bytes; None when it is this one, which may come several times an epoch."""
        first = picture_of(self._first.get(digest, name))
        return first if first != picture_of(name) else None

    def _note(self, name: str, sample: Sample) -> None:
        digest = blake3(sample.picture.data).digest()
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

    def _cut(self, keeper: "Writer") -> None:
        shard, data = make_shard(self._first_index + len(self.shards), self._samples)
        self.shards.append(shard)
        self._take_over(self._news)
        keeper.keep(shard, data, self._news)
        self._clear()

    def end(self, keeper: "Writer") -> None:
        if self._samples:
            self._cut(keeper)
        self.rejected += self._news["rejected"]


MASK = "a mask"


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


class _NoKeeper:
    done = ()

    def keep(self, shard: Shard, data: bytes, news: Mapping[str, Any]) -> None:
        pass


class Writer:
    """Writes shards."""

    def __init__(self, work_dir: Path):
        self._folder = work_dir / "shards"
        self._folder.mkdir(parents=True, exist_ok=True)

    def keep(self, shard: Shard, data: bytes, news: Mapping[str, Any]) -> None:
        """Raises UserError when the disk is full."""
        _replace(self._folder / f"{shard.digest}.tar", data)


class Keeper(Writer):
    """And a journal of them by which an ingest that was cut off goes on. `done`: its entries so far, oldest first."""

    def __init__(self, work_dir: Path, source: str):
        super().__init__(work_dir)
        self._path = work_dir / _JOURNAL
        self.done = self._read(source)
        head = [{"source": source}, *self.done]
        _replace(self._path, b"".join(json.dumps(entry).encode() + b"\n" for entry in head))
        self._file = self._path.open("ab")

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, source: str) -> list[dict]:
        """The entries whose shards are on the disk, up to the first one that is not."""
        entries = []
        try:
            with self._path.open("rb") as lines:
                if json.loads(next(lines, b"")) != {"source": source}:
                    return []
                for line in lines:
                    entry = json.loads(line)
                    shard = Shard.model_validate(entry["shard"])
                    if shard_path(self._folder.parent, shard.digest).stat().st_size != shard.bytes:
                        break
                    entries.append(entry)
        except (OSError, ValueError, KeyError, TypeError):  # none, or its last line was cut off
            pass
        return entries

    def keep(self, shard: Shard, data: bytes, news: Mapping[str, Any]) -> None:
        super().keep(shard, data, news)
        try:
            self._file.write(json.dumps({"shard": shard.model_dump(), **news}).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self._path, error) from None


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


def _replace(path: Path, data: bytes) -> None:
    """Raises UserError when the disk is full."""
    try:
        files.replace(path, data)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"Cannot write {path}: {error.strerror}.", fix="Free some space, or choose another --work_dir.", code=ExitCode.DISK)


def _write_table(path: Path, head: list[str], rows: Sequence[tuple[str, str]], errors: str = "backslashreplace") -> None:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(head)
    writer.writerows(rows)
    _replace(path, out.getvalue().encode("utf-8", errors))


def _forget_others(folder: Path, manifest: Manifest) -> None:
    ours = {shard.digest for shard in [*manifest.shards, *manifest.held_out]}
    for path in folder.glob("*.tar*"):
        if path.name.split(".")[0] not in ours or path.suffix == ".part":
            path.unlink(missing_ok=True)
