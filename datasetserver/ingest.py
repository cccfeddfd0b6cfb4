"""From a folder of captioned pictures to shards: checked once, deterministic, and every file left out is listed with its reason.

Samples are shuffled once, so that every shard is an unbiased draw of the dataset. Equal folders give equal digests.
"""

import csv
import io
import json
import logging
import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from blake3 import blake3
from pydantic import ValidationError

from datasetserver.pictures import BadSample, load_sample
from swarm.digest import canonical_json, digest_bytes, digest_json
from swarm.errors import ExitCode, UserError
from swarm.lifeline import die_with_parent
from swarm.protocol import Manifest, Shard

log = logging.getLogger(__name__)
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
CAPTION_SUFFIXES = (".txt", ".caption")
SHARD_SAMPLES = 256
SHARD_BYTES = 48 << 20
_FORMAT = 1  # of the shards: raise it when the same folder would give other bytes
_WORKER_MEMORY_BYTES = 4 << 30


@dataclass(frozen=True)
class Pair:
    """A picture of the folder; `name` is its path within it, `caption` is missing where no file has its stem."""

    name: str
    image: Path
    caption: Path | None


@dataclass(frozen=True)
class Ingested:
    """A dataset ready to be served. `rejected`: (name, reason) of what was left out; empty when nothing had to be done again."""

    manifest: Manifest
    digest: str
    rejected: list[tuple[str, str]]
    fresh: bool


def ingest(
    folder: Path, work_dir: Path, *, shard_samples: int = SHARD_SAMPLES, workers: int | None = None, show: Callable = lambda pairs: pairs
) -> Ingested:
    """Check `folder` and write its shards and manifest into `work_dir`; nothing is done when they are there and up to date.

    workers: processes, 0 for none, None for one per core. show: wraps the iterable of samples, for a progress bar.
    Raises UserError for a folder that is missing or has no sample that can be trained on.
    """
    pairs = find_pairs(folder)
    source = digest_json([_FORMAT, shard_samples, SHARD_BYTES, [_fingerprint(pair) for pair in pairs]])
    known = _up_to_date(work_dir, source)
    if known:
        return known
    rejected = [(pair.name, "no caption: there is no .txt or .caption file of that name") for pair in pairs if pair.caption is None]
    complete = [pair for pair in pairs if pair.caption is not None]
    # Shuffled by name: the order depends on nothing but the folder's content.
    complete.sort(key=lambda pair: blake3(os.fsencode(pair.name)).digest())
    (work_dir / "shards").mkdir(parents=True, exist_ok=True)
    shards = list(_write_shards(_good(show(_load_all(complete, workers)), rejected), work_dir / "shards", shard_samples))
    rejected.sort()
    _write_rejected(work_dir / "rejected.csv", rejected)
    if not shards:
        first = f" (the first: {rejected[0][0]}: {rejected[0][1]})" if rejected else ""
        raise UserError(
            f"{folder} holds no picture that can be trained on; {len(rejected)} were left out{first}.",
            fix="Put pictures and a .txt with each picture's caption, of the same name, into it.",
        )
    manifest = Manifest(total=sum(shard.samples for shard in shards), shards=shards)
    data = canonical_json(manifest.model_dump())
    _replace(work_dir / "manifest.json", data)
    _replace(work_dir / "ingest.json", canonical_json({"source": source, "manifest": digest_bytes(data)}))
    _forget_others(work_dir / "shards", manifest)
    return Ingested(manifest, digest_bytes(data), rejected, fresh=True)


def find_pairs(folder: Path) -> list[Pair]:
    """The pictures below `folder` by name, links and hidden files left out. Raises UserError when it is missing or has none."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", fix="Check --dataset.")
    pairs = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = [name for name in files if not name.startswith(".")]
        captions = {Path(name).stem: name for suffix in CAPTION_SUFFIXES[::-1] for name in sorted(files) if name.lower().endswith(suffix)}
        for name in files:
            if name.lower().endswith(IMAGE_SUFFIXES):
                path = Path(root, name)
                caption = captions.get(path.stem)
                pairs.append(Pair(path.relative_to(folder).as_posix(), path, Path(root, caption) if caption else None))
    if not pairs:
        raise UserError(f"{folder} holds no picture.", fix=f"Put pictures ({', '.join(IMAGE_SUFFIXES)}) with captions (.txt) into it.")
    return sorted(pairs, key=lambda pair: pair.name)


def shard_path(work_dir: Path, digest: str) -> Path:
    return work_dir / "shards" / f"{digest}.tar"


def _fingerprint(pair: Pair) -> list:
    """Changes with the pair's files; names as bytes, since a file's name may be no text."""
    return [os.fsencode(pair.name).hex(), *(_version(path) for path in (pair.image, pair.caption) if path)]


def _version(path: Path) -> list | None:
    try:
        status = path.stat()
    except OSError:  # a link that leads nowhere: loading it says so
        return None
    return [os.fsencode(path.name).hex(), status.st_size, status.st_mtime_ns]


def _up_to_date(work_dir: Path, source: str) -> Ingested | None:
    try:
        data = (work_dir / "manifest.json").read_bytes()
        if json.loads((work_dir / "ingest.json").read_bytes()) != {"source": source, "manifest": digest_bytes(data)}:
            return None
        manifest = Manifest.model_validate_json(data)
        whole = all(shard_path(work_dir, shard.digest).stat().st_size == shard.bytes for shard in manifest.shards)
    except (OSError, ValueError, ValidationError):
        return None
    return Ingested(manifest, digest_bytes(data), [], fresh=False) if whole else None


# -- loading


def _good(loaded: Iterable[tuple[Pair, tuple[bytes, str] | str]], rejected: list[tuple[str, str]]) -> Iterator[tuple[bytes, str]]:
    for pair, result in loaded:
        if isinstance(result, str):
            rejected.append((pair.name, result))
        else:
            yield result


def _load_all(pairs: list[Pair], workers: int | None) -> Iterator[tuple[Pair, tuple[bytes, str] | str]]:
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


def _load(pair: Pair) -> tuple[bytes, str] | str:
    try:
        return load_sample(pair.image, pair.caption)
    except BadSample as bad:
        return str(bad)


def _load_alone(pair: Pair) -> tuple[bytes, str] | str:
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


def _write_shards(samples: Iterable[tuple[bytes, str]], folder: Path, shard_samples: int) -> Iterator[Shard]:
    """Cut the stream of samples into tar files named by their digests."""
    batch, size = [], 0
    index = 0
    for image, caption in samples:
        if batch and (len(batch) == shard_samples or size + len(image) > SHARD_BYTES):
            yield _write_shard(index, batch, folder)
            batch, size, index = [], 0, index + 1
        batch.append((image, caption))
        size += len(image)
    if batch:
        yield _write_shard(index, batch, folder)


def _write_shard(index: int, samples: list[tuple[bytes, str]], folder: Path) -> Shard:
    # One name for all pictures: `datasets` silently gives None for those whose extension differs from the first ones'.
    # Whoever decodes looks at the bytes, JPEG or PNG, and not at the name.
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, (image, caption) in enumerate(samples):
            key = f"{index:06d}_{number:06d}"
            _add(tar, f"{key}.jpg", image)
            _add(tar, f"{key}.txt", caption.encode())
    data = out.getvalue()
    digest = digest_bytes(data)
    _replace(folder / f"{digest}.tar", data)
    return Shard(index=index, digest=digest, bytes=len(data), samples=len(samples))


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
        raise UserError(
            f"Cannot write {path}: {error.strerror}.", fix="Free some space, or choose another --work_dir.", code=ExitCode.DISK
        ) from None


def _write_rejected(path: Path, rejected: list[tuple[str, str]]) -> None:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["file", "reason"])
    writer.writerows(rejected)
    _replace(path, out.getvalue().encode("utf-8", "backslashreplace"))


def _forget_others(folder: Path, manifest: Manifest) -> None:
    ours = {shard.digest for shard in manifest.shards}
    for path in folder.glob("*.tar*"):
        if path.name.split(".")[0] not in ours or path.suffix == ".part":
            path.unlink(missing_ok=True)
