"""From a folder of captioned pictures to shards: checked once, deterministic, and every file left out is listed with its reason.

Samples are shuffled once, so that every shard is an unbiased draw of the dataset. Equal folders give equal digests.
"""

import contextlib
import csv
import io
import json
import logging
import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import ValidationError

from datasetserver.pictures import BadSample, Picture, Sample, load_sample
from swarm.digest import canonical_json, digest_bytes, digest_json
from swarm.errors import ExitCode, UserError
from swarm.lifeline import die_with_parent
from swarm.protocol import Manifest, Shard

log = logging.getLogger(__name__)
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
CAPTION_SUFFIXES = (".txt", ".caption")
SHARD_SAMPLES = 256
SHARD_BYTES = 48 << 20
METADATA = "metadata.jsonl"
_CAPTION_FIELDS = ("text", "caption", "prompt")
_MAX_LINE_BYTES = 1 << 20
_FORMAT = 3  # of the shards: raise it when the same folder would give other bytes
_JOURNAL = "ingest.journal"
_WORKER_MEMORY_BYTES = 4 << 30


@dataclass(frozen=True)
class Pair:
    """A picture of the folder; `name` is its path within it.

    caption: the file that has its stem, or what `metadata.jsonl` says of it; None where there is neither. empty_ok: it may be empty.
    """

    name: str
    image: Path
    caption: Path | str | None
    empty_ok: bool = False


@dataclass(frozen=True)
class Ingested:
    """A dataset ready to be served. The lists are known only when it was checked anew (`fresh`).

    digest: of the manifest; first: of its first generation, by which a run names its dataset. rejected: (name, reason).
    duplicates: (name, name of the first picture with the same bytes). changed: (name, what was done to make it an RGB picture).
    """

    manifest: Manifest
    digest: str
    first: str
    rejected: list[tuple[str, str]]
    fresh: bool
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    changed: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Policy:
    """missing_captions: 'reject', or 'empty' to train those pictures without words. duplicates: 'keep' or 'drop'; found in any case."""

    missing_captions: str = "reject"
    duplicates: str = "keep"


def ingest(
    folder: Path,
    work_dir: Path,
    *,
    shard_samples: int = SHARD_SAMPLES,
    workers: int | None = None,
    policy: Policy = Policy(),
    dry: bool = False,
    show: Callable = lambda pairs: pairs,
) -> Ingested:
    """Check `folder` and write its shards and manifest into `work_dir`; nothing is done when they are there and up to date.

    An ingest that was cut off goes on after the last shard that it wrote. workers: processes, 0 for none, None for one per core.
    dry: check everything and write nothing. show: wraps the iterable of samples, for a progress bar.
    Raises UserError for a folder that is missing or has no sample that can be trained on.
    """
    rejected: list[tuple[str, str]] = []
    pairs = find_pairs(folder, rejected)
    source = digest_json([_FORMAT, shard_samples, SHARD_BYTES, asdict(policy), [_fingerprint(pair) for pair in pairs]])
    known = None if dry else _up_to_date(work_dir, source)
    if known:
        return known
    if policy.missing_captions == "empty":
        pairs = [replace(pair, caption="" if pair.caption is None else pair.caption, empty_ok=True) for pair in pairs]
    rejected += [(pair.name, "no caption: there is no .txt or .caption file of that name") for pair in pairs if pair.caption is None]
    complete = [pair for pair in pairs if pair.caption is not None]
    # Shuffled by name: the order depends on nothing but the folder's content.
    complete.sort(key=lambda pair: blake3(os.fsencode(pair.name)).digest())
    with contextlib.ExitStack() as closing:
        keeper = _NoKeeper() if dry else closing.enter_context(Keeper(work_dir, source))
        batches = Batches(shard_samples, policy, keeper.done)
        for pair, result in show(_load_all(complete[batches.taken :], workers)):
            batches.add(pair.name, result, keeper)
        batches.end(keeper)
    rejected = sorted(rejected + batches.rejected)
    if not batches.shards:
        first = f" (the first: {rejected[0][0]}: {rejected[0][1]})" if rejected else ""
        if not dry:
            _write_table(work_dir / "rejected.csv", ["file", "reason"], rejected)
        raise UserError(
            f"{folder} holds no picture that can be trained on; {len(rejected)} were left out{first}.",
            fix="Put pictures and a .txt with each picture's caption, of the same name, into it.",
        )
    manifest = Manifest.of(batches.shards)
    data = canonical_json(manifest.model_dump())
    digest = digest_bytes(data)
    if not dry:
        _write_table(work_dir / "rejected.csv", ["file", "reason"], rejected)
        _write_table(work_dir / "duplicates.csv", ["file", "same picture as"], batches.duplicates)
        _write_table(work_dir / "changed.csv", ["file", "change"], batches.changed)
        _replace(manifest_path(work_dir), data)
        _replace(work_dir / "ingest.json", canonical_json({"source": source, "manifest": digest, "first": digest}))
        _forget_others(work_dir / "shards", manifest)
        (work_dir / _JOURNAL).unlink(missing_ok=True)
    return Ingested(manifest, digest, digest, rejected, fresh=True, duplicates=batches.duplicates, changed=batches.changed)


def find_pairs(folder: Path, faults: list[tuple[str, str]] | None = None) -> list[Pair]:
    """The pictures below `folder` by name, links and hidden files left out. Raises UserError when it is missing or has none.

    faults: gets (name, reason) of lines of a `metadata.jsonl` that cannot be read or name no picture.
    """
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", fix="Check --dataset.")
    faults = [] if faults is None else faults
    pairs, told = [], {}
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = [name for name in files if not name.startswith(".")]
        captions = {Path(name).stem: name for suffix in CAPTION_SUFFIXES[::-1] for name in sorted(files) if name.lower().endswith(suffix)}
        if METADATA in files:
            told.update(_read_metadata(folder, Path(root, METADATA), faults))
        for name in files:
            if name.lower().endswith(IMAGE_SUFFIXES):
                path = Path(root, name)
                caption = captions.get(path.stem)
                pairs.append(Pair(path.relative_to(folder).as_posix(), path, Path(root, caption) if caption else None))
    if not pairs:
        raise UserError(f"{folder} holds no picture.", fix=f"Put pictures ({', '.join(IMAGE_SUFFIXES)}) with captions (.txt) into it.")
    pairs = [replace(pair, caption=told.get(pair.name, (None, ""))[0]) if pair.caption is None else pair for pair in pairs]
    names = {pair.name for pair in pairs}
    faults += [(where, f"there is no picture {name}") for name, (_, where) in told.items() if name not in names]
    return sorted(pairs, key=lambda pair: pair.name)


def _read_metadata(folder: Path, path: Path, faults: list[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """(caption, where it is said) by picture, of lines such as {"file_name": "0001.png", "text": "a red square"}."""
    found = {}
    if not path.is_file():  # a pipe
        return found
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(_MAX_LINE_BYTES):
            number += 1
            where = f"{path.relative_to(folder).as_posix()}, line {number}"
            try:
                values = json.loads(line) if line.strip() else None
                if values is not None:
                    text = next(values[name] for name in _CAPTION_FIELDS if isinstance(values.get(name), str))
                    picture = Path(os.path.normpath(path.parent / values["file_name"]))
                    found[picture.relative_to(folder).as_posix()] = text, where
            except StopIteration:
                faults.append((where, f"no caption: none of {', '.join(_CAPTION_FIELDS)} is a text"))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                faults.append((where, "not a JSON object with the file_name of a picture in this folder"))
    return found


def shard_path(work_dir: Path, digest: str) -> Path:
    return work_dir / "shards" / f"{digest}.tar"


def manifest_path(work_dir: Path) -> Path:
    return work_dir / "manifest.json"


def _fingerprint(pair: Pair) -> list:
    """Changes with the pair's files; names as bytes, since a file's name may be no text."""
    caption = pair.caption
    told = _version(caption) if isinstance(caption, Path) else caption and digest_bytes(caption.encode(errors="surrogatepass"))
    return [os.fsencode(pair.name).hex(), _version(pair.image), told]


def _version(path: Path) -> list | None:
    try:
        status = path.stat()
    except OSError:  # a link that leads nowhere: loading it says so
        return None
    return [os.fsencode(path.name).hex(), status.st_size, status.st_mtime_ns]


def _up_to_date(work_dir: Path, source: str) -> Ingested | None:
    try:
        data = manifest_path(work_dir).read_bytes()
        digest, known = digest_bytes(data), json.loads((work_dir / "ingest.json").read_bytes())
        if (known["source"], known["manifest"]) != (source, digest):
            return None
        manifest = Manifest.model_validate_json(data)
        whole = all(shard_path(work_dir, shard.digest).stat().st_size == shard.bytes for shard in manifest.shards)
    except (OSError, ValueError, ValidationError, KeyError, TypeError):
        return None
    return Ingested(manifest, digest, known["first"], [], fresh=False) if whole else None


# -- loading


def _load_all(pairs: list[Pair], workers: int | None) -> Iterator[tuple[Pair, Sample | str]]:
    """Each pair, in order, with its sample or the reason why it has none."""
    if workers == 0:
        yield from ((pair, _load(pair)) for pair in pairs)
        return
    count = workers or max(1, min(len(os.sched_getaffinity(0)), 16, len(pairs) // 16))
    waiting, pool, rest = deque(), _pool(count), iter(pairs)
    try:
        while True:
            while len(waiting) < 8 * count and (pair := next(rest, None)):
                waiting.append((pair, pool.submit(_load, pair)))
            if not waiting:
                return
            pair, future = waiting.popleft()
            try:
                yield pair, future.result()
            except BrokenProcessPool:
                # A decoder took its process down, and all that were waiting with it. Look at each of them alone.
                suspects = [pair, *(pair for pair, _ in waiting)]
                waiting.clear()
                pool.shutdown()
                yield from ((suspect, _load_alone(suspect)) for suspect in suspects)
                pool = _pool(count)
    finally:
        pool.shutdown(cancel_futures=True)


def _load(pair: Pair) -> Sample | str:
    try:
        return load_sample(pair.image, pair.caption, empty_ok=pair.empty_ok)
    except BadSample as bad:
        return str(bad)


def _load_alone(pair: Pair) -> Sample | str:
    with _pool(1) as pool:
        try:
            return pool.submit(_load, pair).result()
        except BrokenProcessPool:
            return "the decoder crashed on it"


def _pool(count: int) -> ProcessPoolExecutor:
    # Fresh interpreters: the server may have threads by now, and a fork beside threads can hang.
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_start_worker)


def _start_worker() -> None:
    import resource
    import signal

    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_WORKER_MEMORY_BYTES, most))


# -- writing


class Batches:
    """Cuts the stream of samples into shards. `taken`: how many pairs of the stream are in those that are kept.

    Its state before any shard's first sample depends only on what was in the shards before: that is what `done` brings back.
    """

    def __init__(self, shard_samples: int, policy: Policy, done: Iterable[dict] = ()):
        self._most, self._policy = shard_samples, policy
        self.shards: list[Shard] = []
        self.rejected: list[tuple[str, str]] = []
        self.duplicates: list[tuple[str, str]] = []
        self.changed: list[tuple[str, str]] = []
        self.taken = 0
        self._first: dict[bytes, str] = {}
        self._clear()
        for entry in done:
            self.shards.append(Shard.model_validate(entry["shard"]))
            self.rejected += map(tuple, entry["rejected"])
            self.duplicates += map(tuple, entry["duplicates"])
            self.changed += map(tuple, entry["changed"])
            self._first.update((bytes.fromhex(digest), name) for digest, name in entry["first"])
            self.taken += entry["taken"]

    def _clear(self) -> None:
        self._samples: list[Sample] = []
        self._bytes = 0
        self._news: dict[str, Any] = {"rejected": [], "duplicates": [], "changed": [], "first": [], "taken": 0}

    def add(self, name: str, result: Sample | str, keeper: "Keeper") -> None:
        """The next pair's sample, or why it has none."""
        if not isinstance(result, str):
            result = self._unless_dropped(result)
        if isinstance(result, str):
            self._news["rejected"].append((name, result))
        else:
            size = len(result.picture.data)
            if self._samples and (len(self._samples) == self._most or self._bytes + size > SHARD_BYTES):
                self._cut(keeper)
            self._samples.append(result)
            self._bytes += size
            self._note(name, result.picture)
        self._news["taken"] += 1

    def _unless_dropped(self, sample: Sample) -> Sample | str:
        first = self._first.get(blake3(sample.picture.data).digest())
        if first is not None and self._policy.duplicates == "drop":
            return f"the same picture as {first}"
        return sample

    def _note(self, name: str, picture: Picture) -> None:
        if picture.change:
            self._news["changed"].append((name, picture.change))
        digest = blake3(picture.data).digest()
        first = self._first.setdefault(digest, name)
        if first == name:
            self._news["first"].append((digest.hex(), name))
        else:
            self._news["duplicates"].append((name, first))

    def _cut(self, keeper: "Keeper") -> None:
        shard, data = make_shard(len(self.shards), self._samples)
        self.shards.append(shard)
        self.rejected += self._news["rejected"]
        self.duplicates += self._news["duplicates"]
        self.changed += self._news["changed"]
        self.taken += self._news["taken"]
        keeper.keep(shard, data, self._news)
        self._clear()

    def end(self, keeper: "Keeper") -> None:
        if self._samples:
            self._cut(keeper)
        self.rejected += self._news["rejected"]


class _NoKeeper:
    done = ()

    def keep(self, shard: Shard, data: bytes, news: Mapping[str, Any]) -> None:
        pass


class Keeper:
    """Writes shards, and a journal of them by which an ingest that was cut off goes on. `done`: its entries so far, oldest first."""

    def __init__(self, work_dir: Path, source: str):
        self._folder, self._path = work_dir / "shards", work_dir / _JOURNAL
        self._folder.mkdir(parents=True, exist_ok=True)
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
        """Raises UserError when the disk is full."""
        _replace(self._folder / f"{shard.digest}.tar", data)
        try:
            self._file.write(json.dumps({"shard": shard.model_dump(), **news}).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self._path, error) from None


def make_shard(index: int, samples: Sequence[Sample]) -> tuple[Shard, bytes]:
    """A shard and its bytes; equal samples give equal bytes."""
    # One name for all pictures: `datasets` silently gives None for those whose extension differs from the first ones'.
    # Whoever decodes looks at the bytes, JPEG or PNG, and not at the name.
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, sample in enumerate(samples):
            key = f"{index:06d}_{number:06d}"
            _add(tar, f"{key}.jpg", sample.picture.data)
            _add(tar, f"{key}.txt", sample.caption.encode())
    data, pictures = out.getvalue(), [sample.picture for sample in samples]
    columns = {
        "widths": [picture.width for picture in pictures],
        "heights": [picture.height for picture in pictures],
        "image_bytes": [len(picture.data) for picture in pictures],
    }
    return Shard(index=index, digest=digest_bytes(data), bytes=len(data), samples=len(samples), **columns), data


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # mtime, uid, gid 0 and mode 0644 by default: nothing of this machine is in it
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that it is there in whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"Cannot write {path}: {error.strerror}.", fix="Free some space, or choose another --work_dir.", code=ExitCode.DISK)


def _write_table(path: Path, head: list[str], rows: Sequence[tuple[str, str]]) -> None:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(head)
    writer.writerows(rows)
    _replace(path, out.getvalue().encode("utf-8", "backslashreplace"))


def _forget_others(folder: Path, manifest: Manifest) -> None:
    ours = {shard.digest for shard in manifest.shards}
    for path in folder.glob("*.tar*"):
        if path.name.split(".")[0] not in ours or path.suffix == ".part":
            path.unlink(missing_ok=True)
