"""A folder of pictures and their captions, in the layouts of this project, of diffusers (metadata files) and of kohya (`10_name/`).

Needs no server. A picture's caption is, the first that there is: its row in a metadata.jsonl or metadata.csv of its folder, the .txt
or .caption of the same stem beside it, `--instance_prompt`, the name of its kohya folder, and for textual inversion a template.
"""

import csv
import json
import logging
import random
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from peer.contracts import Sample, Settlement, SourceContext
from swarm.digest import digest_json
from swarm.errors import UserError

log = logging.getLogger(__name__)

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP"}
_NAMED_REASONS = 5
# Kohya's folders repeat what is in them; four digits begin a year more often than they count repeats.
_REPEATED = re.compile(r"(\d{1,3})_(.+)")
_FIX = "Put PNG, JPG, BMP or WEBP files there, each with a .txt beside it, or describe them in a metadata.jsonl."

Caption = str | tuple[str, ...]


@dataclass(frozen=True)
class Rules:
    """How a folder is read. prompt: the caption of pictures that have none; None: they are left out."""

    caption_column: str = "text"
    prompt: str | None = None
    repeats: int = 1
    max_samples: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Picture:
    """name: its path below the folder. repeats: how often it comes in an epoch."""

    name: str
    caption: Caption
    repeats: int


def build(context: SourceContext) -> "Directory":
    """Raises UserError when there is no folder, or nothing in it that can be trained on."""
    if context.folder is None:
        raise UserError("No pictures were given.", fix="Give --train_data_dir a folder of pictures with a .txt beside each.")
    run, peer = context.run, context.peer
    prompt = context.bare_caption
    rules = Rules(peer.caption_column, prompt, peer.repeats, peer.max_train_samples, run.seed)
    return Directory(context.folder, rules, epochs=context.epochs)


class Directory:
    """Yields every good picture `repeats` times an epoch, in an order that only (seed, epoch) decides; samples given back come first.

    A sample's key is `epoch:name`, and `epoch.n:name` for the n-th repeat.
    """

    def __init__(self, folder: Path, rules: Rules, *, epochs: int | None):
        self._folder, self._seed, self._epochs = folder, rules.seed, epochs
        self._pictures = {picture.name: picture for picture in list_pictures(folder, rules)}
        self._places = [(name, again) for name, picture in self._pictures.items() for again in range(picture.repeats)]
        self._digest = digest_json(self._places)
        self._epoch = self._position = 0
        self._shuffled, self._shuffled_for = self._places, -1
        self._again: deque[str] = deque()
        self._closed = False

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self._places)

    def __iter__(self) -> Iterator[Sample]:
        while not self._closed:
            key = self._next_key()
            if key is None:
                return
            yield self._read(key)

    def _next_key(self) -> str | None:
        if self._again:
            return self._again.popleft()
        if self._position == len(self._places):
            self._epoch, self._position = self._epoch + 1, 0
        if self._epochs is not None and self._epoch >= self._epochs:
            return None
        self._position += 1
        name, again = self._order(self._epoch)[self._position - 1]
        return f"{self._epoch}.{again}:{name}" if again else f"{self._epoch}:{name}"

    def _order(self, epoch: int) -> list[tuple[str, int]]:
        if self._shuffled_for != epoch:
            self._shuffled, self._shuffled_for = self._places[:], epoch
            random.Random(f"{self._seed}:{epoch}").shuffle(self._shuffled)
        return self._shuffled

    def _read(self, key: str) -> Sample:
        """The sample; one that is gone or changed hands since the start is no picture, and left out like a broken one."""
        name = key.partition(":")[2]
        picture = self._pictures.get(name)
        try:
            return Sample(key, (self._folder / name).read_bytes(), picture.caption if picture else "")
        except OSError as error:
            log.warning("cannot read %s: %s", name, error.strerror)
            return Sample(key, b"", "")

    def register(self, number: int, keys: Sequence[str]) -> None:
        """Nobody but this peer trains on the folder, so there is nobody to tell."""

    def settle(self, settlement: Settlement) -> None:
        """No ledger to tell."""

    def acknowledge(self, keys: Sequence[str]) -> None:
        """An epoch yields every sample once anyway."""

    def rest(self, resting: bool) -> None:
        """Nobody else waits for these samples."""

    def give_back(self, keys: Sequence[str]) -> None:
        self._again.extendleft(reversed(keys))

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "again": list(self._again), "pictures": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Where other pictures are there than then, the order is another one: no position in it means anything."""
        self._epoch, self._position, self._again = state["epoch"], state["position"], deque(state["again"])
        if state["pictures"] != self._digest:
            log.warning("the pictures in %s are not those of the checkpoint; epoch %d begins anew", self._folder, self._epoch + 1)
            self._position = 0
            self._again = deque(key for key in self._again if key.partition(":")[2] in self._pictures)

    def close(self) -> None:
        self._closed = True


def list_pictures(folder: Path, rules: Rules) -> list[Picture]:
    """The pictures in `folder` and the folders in it that can be trained on, by name; the others are listed in one log line.

    Every picture is decoded once, so that a truncated one is found now and not in the middle of the night.
    Raises UserError when the folder is missing, holds no good picture, or a metadata file that cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", fix="Give --train_data_dir a folder of pictures with a .txt beside each.")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _FORMATS and path.is_file() and not _hidden(path, folder))
    described = _metadata(folder, rules.caption_column)
    with ThreadPoolExecutor() as pool:  # PIL decodes outside the interpreter lock
        results = list(pool.map(lambda path: _examine(path, folder, described, rules), paths))
    bad = {_name(path, folder): result for path, result in zip(paths, results, strict=True) if isinstance(result, str)}
    bad.update({_name(path, folder): "named by a metadata file, but not there" for path in described.keys() - set(paths)})
    listed = "; ".join(f"{name}: {reason}" for name, reason in list(bad.items())[:_NAMED_REASONS])
    if len(bad) > _NAMED_REASONS:
        listed += f"; and {len(bad) - _NAMED_REASONS} more"
    good = [result for result in results if isinstance(result, Picture)]
    if not good:
        what = f"none of its {len(bad)} pictures can be used ({listed})" if bad else "it has no pictures"
        raise UserError(f"{folder} holds nothing to train on: {what}.", fix=_FIX)
    if bad:
        log.warning("skipped pictures=%d of=%d %s", len(bad), len(bad) + len(good), listed)
    if rules.max_samples and rules.max_samples < len(good):
        # As in diffusers: a subset that the seed decides, not the first by name.
        chosen = set(random.Random(f"subset:{rules.seed}").sample(range(len(good)), rules.max_samples))
        good = [picture for i, picture in enumerate(good) if i in chosen]
    return good


def _examine(path: Path, folder: Path, described: Mapping[Path, Caption], rules: Rules) -> Picture | str:
    """The picture at `path`; or why it cannot be trained on."""
    repeated = [match for part in path.relative_to(folder).parts[:-1] if (match := _REPEATED.fullmatch(part))]
    try:
        caption = described[path] if path in described else _beside(path)
    except UnicodeDecodeError:
        return "caption is not UTF-8"
    if caption is None:
        caption = rules.prompt or (repeated[-1][2] if repeated else rules.prompt)
    if caption is None:
        return "no caption"
    try:
        with Image.open(path, formats=tuple(set(_FORMATS.values()))) as picture:
            picture.draft("RGB", (64, 64))  # a JPEG is then read to its end, but only an eighth of it computed
            picture.load()
    except Exception as error:  # damaged files raise OSError, SyntaxError, ValueError, DecompressionBombError, ...
        return f"not readable ({str(error).splitlines()[0][:80]})"
    return Picture(_name(path, folder), caption, rules.repeats * (int(repeated[-1][1]) if repeated else 1))


def _beside(path: Path) -> str | None:
    """What the .txt or .caption of the same stem says. Raises UnicodeDecodeError."""
    for suffix in (".txt", ".caption"):
        beside = path.with_suffix(suffix)
        if beside.is_file():
            return beside.read_text(encoding="utf-8-sig").strip()
    return None


def _metadata(folder: Path, column: str) -> dict[Path, Caption]:
    """Captions by the path of their picture, from every metadata.jsonl and metadata.csv, as `datasets`' imagefolder has them."""
    captions: dict[Path, Caption] = {}
    for file in sorted(path for name in ("metadata.jsonl", "metadata.csv") for path in folder.rglob(name) if not _hidden(path, folder)):
        try:
            rows = _read_csv(file) if file.suffix == ".csv" else _read_jsonl(file)
        except (UnicodeDecodeError, OSError, csv.Error) as error:
            raise UserError(f"{file} cannot be read: {error}.", fix="Save it as UTF-8.") from None
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
                raise UserError(
                    f"{file}: row {number} has no file_name.", fix='Each row is like {"file_name": "0001.png", "text": "a cat"}.'
                )
            if column not in row:
                others = ", ".join(name for name in row if name != "file_name") or "no other"
                raise UserError(f"{file}: row {number} has no '{column}'; it has {others}.", fix="Give one of them as --caption_column.")
            caption = row[column]
            if isinstance(caption, list) and caption and all(isinstance(text, str) for text in caption):
                captions[file.parent / row["file_name"]] = tuple(text.strip() for text in caption)
            elif isinstance(caption, str):
                captions[file.parent / row["file_name"]] = caption.strip()
    return captions


def _read_jsonl(file: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").splitlines(), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise UserError(f"{file}: line {number} is no JSON: {error.msg}.", fix="Correct that line.") from None
    return rows


def _read_csv(file: Path) -> list[dict[str, Any]]:
    with file.open(newline="", encoding="utf-8-sig") as lines:
        return list(csv.DictReader(lines))


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _hidden(path: Path, folder: Path) -> bool:
    """Whether it lies in a folder such as .ipynb_checkpoints, or is a file such as ._1.png, which other programs leave behind."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)
