"""A dataset's work folder: the shards and manifest that are ready in it, and the journal by which an ingest that was cut off goes on."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarm import files
from swarm.digest import canonical_json, digest_bytes
from swarm.errors import ExitCode, UserError
from swarm.protocol import Manifest, Shard

FORMAT = 4  # of the shards: raise it when the same dataset would give other pixels or captions
_JOURNAL = "ingest.journal"
_STATE = "ingest.json"
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
    format: int = FORMAT
    held_out: float = 0.0

    @property
    def older(self) -> bool:
        """Whether an older version of this program made it, by rules of its own."""
        return self.format < FORMAT


def shard_path(work_dir: Path, digest: str) -> Path:
    return work_dir / "shards" / f"{digest}.tar"


def manifest_path(work_dir: Path) -> Path:
    return work_dir / "manifest.json"


def ingested(work_dir: Path) -> Ingested | None:
    """The dataset that is ready in `work_dir`; None when there is none, or not all of it."""
    try:
        data = manifest_path(work_dir).read_bytes()
        digest, known = digest_bytes(data), json.loads((work_dir / _STATE).read_bytes())
        manifest = _parse(data)
        if known["manifest"] != digest:
            # A growth that was killed after it wrote its manifest, and before it wrote the state: all else of it is there.
            if digest_bytes(canonical_json(manifest.first().model_dump())) != known["first"]:
                return None
            known |= {"source": _source_of_journal(work_dir), "format": FORMAT}
        if not all(shard_path(work_dir, shard.digest).stat().st_size == shard.bytes for shard in in_order(manifest)):
            return None
        made = {"format": known.get("format", 0), "held_out": known.get("held_out", 0.0)}
        return Ingested(manifest, digest, known["first"], known["source"], [], fresh=False, **made)
    except (OSError, ValueError, ValidationError, KeyError, TypeError):
        return None


def finish(work_dir: Path, ready: Ingested) -> None:
    """End a growth that was killed after it wrote its manifest."""
    if json.loads((work_dir / _STATE).read_bytes())["manifest"] != ready.digest:
        _end(work_dir, ready)


def _source_of_journal(work_dir: Path) -> str:
    """What was ingested when it was cut off; '' where no journal says so."""
    try:
        with (work_dir / _JOURNAL).open("rb") as lines:
            return json.loads(next(lines, b""))["source"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def first_of(work_dir: Path) -> str | None:
    """The digest of the first generation of what was ready here once, whether or not all of it is there."""
    try:
        return json.loads((work_dir / _STATE).read_bytes())["first"]
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


def write_result(work_dir: Path, result: Ingested, manifest: bytes, samples: Sequence[tuple[str, str]]) -> None:
    write_rejected(work_dir, result.rejected)
    _write_table(work_dir / "duplicates.csv", ["file", "same picture as"], result.duplicates)
    _write_table(work_dir / "changed.csv", ["file", "change"], result.changed)
    _write_table(work_dir / "notes.csv", ["file", "note"], result.notes)
    _write_table(work_dir / _SAMPLES, ["file", "digest"], samples, errors="surrogateescape")  # read again: names must come back as they are
    _replace(manifest_path(work_dir), manifest)
    _end(work_dir, result)


def write_rejected(work_dir: Path, rejected: Sequence[tuple[str, str]]) -> None:
    """(name, reason) of what was left out. Raises UserError when the disk is full."""
    _write_table(work_dir / "rejected.csv", ["file", "reason"], rejected)


def _end(work_dir: Path, result: Ingested) -> None:
    """What comes after the manifest: the state that names it, and what nobody needs any more."""
    state = {"source": result.source, "manifest": result.digest, "first": result.first}
    state |= {"format": result.format, "held_out": result.held_out}
    _replace(work_dir / _STATE, canonical_json(state))
    _forget_others(work_dir / "shards", result.manifest)
    (work_dir / _JOURNAL).unlink(missing_ok=True)


def samples_of(work_dir: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """(name, digest of the picture) of all samples of the manifest's shards, in the order of `in_order`. Raises UserError."""
    path, count = work_dir / _SAMPLES, sum(shard.samples for shard in in_order(manifest))
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as lines:
            # It is written before the manifest: a growth that was cut off between them leaves lines of shards that nobody has.
            samples = [(name, bytes.fromhex(digest).hex()) for name, digest in islice(csv.reader(lines), 1, count + 1)]
        if len(samples) < count:
            raise ValueError(f"it lists {len(samples)} of {count} samples")
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {path}: {error}.", fix="Restore it: without it, --grow cannot tell which pictures are new.") from None
    return samples


def in_order(manifest: Manifest) -> list[Shard]:
    """All shards as they were made: what is held out comes after the first generation."""
    first = manifest.generations[0].shards
    return [*manifest.shards[:first], *manifest.held_out, *manifest.shards[first:]]


class NoKeeper:
    """Of a dry run."""

    done = ()

    def keep(self, shard: Shard, data: bytes, news: Mapping[str, Any]) -> None:
        pass


class Writer:
    """Writes shards."""

    def __init__(self, work_dir: Path):
        self._work_dir = work_dir
        (work_dir / "shards").mkdir(parents=True, exist_ok=True)

    def keep(self, shard: Shard, data: bytes, news: Mapping[str, Any]) -> None:
        """Raises UserError when the disk is full."""
        _replace(shard_path(self._work_dir, shard.digest), data)


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
                    if shard_path(self._work_dir, shard.digest).stat().st_size != shard.bytes:
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
    ours = {shard.digest for shard in in_order(manifest)}
    for path in folder.glob("*.tar*"):
        if path.name.split(".")[0] not in ours or path.suffix == ".part":
            path.unlink(missing_ok=True)
