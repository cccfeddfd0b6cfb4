"""A folder of pictures, each with a .txt of the same stem beside it that holds its caption. Needs no server."""

import logging
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from peer.contracts import Sample, Settlement, SourceContext
from swarm.errors import UserError

log = logging.getLogger(__name__)

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP"}
_NAMED_REASONS = 5


def build(context: SourceContext) -> "Directory":
    """Raises UserError when there is no folder, or nothing in it that can be trained on."""
    if context.folder is None:
        raise UserError("No pictures were given.", fix="Give --train_data_dir a folder of pictures with a .txt beside each.")
    return Directory(context.folder, seed=context.run.seed, epochs=context.epochs)


class Directory:
    """Yields every good picture once an epoch, in an order that only (seed, epoch) decides; samples given back come first."""

    def __init__(self, folder: Path, *, seed: int, epochs: int | None):
        self._folder, self._seed, self._epochs = folder, seed, epochs
        self._names = list_samples(folder)
        self._epoch = self._position = 0
        self._again: deque[str] = deque()
        self._closed = False

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self._names)

    def __iter__(self) -> Iterator[Sample]:
        while not self._closed:
            key = self._next_key()
            if key is None:
                return
            yield self._read(key)

    def _next_key(self) -> str | None:
        if self._again:
            return self._again.popleft()
        if self._position == len(self._names):
            self._epoch, self._position = self._epoch + 1, 0
        if self._epochs is not None and self._epoch >= self._epochs:
            return None
        self._position += 1
        return f"{self._epoch}:{self._order(self._epoch)[self._position - 1]}"

    def _order(self, epoch: int) -> list[str]:
        if getattr(self, "_ordered", None) != epoch:
            self._shuffled = self._names[:]
            random.Random(f"{self._seed}:{epoch}").shuffle(self._shuffled)
            self._ordered = epoch
        return self._shuffled

    def _read(self, key: str) -> Sample:
        path = self._folder / key.partition(":")[2]
        return Sample(key, path.read_bytes(), path.with_suffix(".txt").read_text(encoding="utf-8").strip())

    def register(self, number: int, keys: Sequence[str]) -> None:
        """Nobody but this peer trains on the folder, so there is nobody to tell."""

    def settle(self, settlement: Settlement) -> None:
        """No ledger to tell."""

    def acknowledge(self, keys: Sequence[str]) -> None:
        """An epoch yields every sample once anyway."""

    def give_back(self, keys: Sequence[str]) -> None:
        self._again.extendleft(reversed(keys))

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "again": list(self._again)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position, self._again = state["epoch"], state["position"], deque(state["again"])

    def close(self) -> None:
        self._closed = True


def list_samples(folder: Path) -> list[str]:
    """File names, sorted, of the pictures in `folder` that can be trained on; the others are listed in one log line.

    Every picture is decoded once, so that a truncated one is found now and not in the middle of the night.
    Raises UserError when the folder is missing, or holds no good picture.
    """
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", fix="Give --train_data_dir a folder of pictures with a .txt beside each.")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _FORMATS and path.is_file())
    with ThreadPoolExecutor() as pool:  # PIL decodes outside the interpreter lock
        reasons = list(pool.map(_fault, paths))
    bad = {path.name: reason for path, reason in zip(paths, reasons, strict=True) if reason}
    listed = "; ".join(f"{name}: {reason}" for name, reason in list(bad.items())[:_NAMED_REASONS])
    if len(bad) > _NAMED_REASONS:
        listed += f"; and {len(bad) - _NAMED_REASONS} more"
    if len(bad) == len(paths):
        what = f"none of its {len(bad)} pictures can be used ({listed})" if bad else "it has no pictures"
        raise UserError(
            f"{folder} holds nothing to train on: {what}.", fix="Put PNG, JPG, BMP or WEBP files there, each with a .txt beside it."
        )
    if bad:
        log.warning("skipped pictures=%d of=%d %s", len(bad), len(paths), listed)
    return [path.name for path in paths if path.name not in bad]


def _fault(path: Path) -> str:
    """Why the picture at `path` cannot be trained on; '' when it can."""
    try:
        path.with_suffix(".txt").read_text(encoding="utf-8")
    except FileNotFoundError:
        return "no caption"
    except UnicodeDecodeError:
        return "caption is not UTF-8"
    try:
        with Image.open(path, formats=tuple(set(_FORMATS.values()))) as picture:
            picture.draft("RGB", (64, 64))  # a JPEG is then read to its end, but only an eighth of it computed
            picture.load()
    except Exception as error:  # damaged files raise OSError, SyntaxError, ValueError, DecompressionBombError, ...
        return f"not readable ({str(error).splitlines()[0][:80]})"
    return ""
