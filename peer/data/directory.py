"""A folder of pictures and their captions, in the layouts of this project, of diffusers (metadata files) and of kohya (`10_name/`).

Needs no server. Which caption a picture has is `swarm.picture_folder`'s rule, as for the host of a run; before the name of a kohya folder
comes `--instance_prompt`, and for textual inversion a template comes last.
"""

import json
import logging
import os
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from peer.contracts import CommittedRound, Sample, SourceContext
from swarm import files
from swarm.digest import digest_bytes, digest_json
from swarm.errors import UserError
from swarm.picture_folder import CAPTION_COLUMNS, Captions, FolderPicture, list_folder, one_line

log = logging.getLogger(__name__)

_FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
_NAMED_REASONS = 5
_FIX = "Put PNG, JPG, BMP or WEBP files there, each with a .txt beside it, or describe them in a metadata.jsonl."


@dataclass(frozen=True)
class Rules:
    """How a folder is read. prompt: the caption of pictures that have none; None: they are left out."""

    caption_column: str = CAPTION_COLUMNS[0]
    prompt: str | None = None
    repeats: int = 1
    max_samples: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Picture:
    """name: its path below the folder. caption: or several, one of which is taken by chance. repeats: how often it comes in an epoch."""

    name: str
    caption: str | Captions
    repeats: int


def build(context: SourceContext) -> "Directory":
    """Raises UserError when there is no folder, or nothing in it that can be trained on."""
    if context.folder is None:
        raise UserError("No pictures were given.", fix="Give --train_data_dir a folder of pictures with a .txt beside each.")
    run, peer = context.run, context.peer
    prompt = context.bare_caption
    rules = Rules(peer.caption_column, prompt, peer.repeats, peer.max_train_samples, run.seed)
    return Directory(context.folder, rules, context.cache_dir, epochs=context.epochs)


class Directory:
    """Yields every good picture `repeats` times an epoch, in an order that only (seed, epoch) decides; samples given back come first.

    A sample's key is `epoch:name`, and `epoch.n:name` for the n-th repeat.
    """

    def __init__(self, folder: Path, rules: Rules, cache_dir: Path, *, epochs: int | None):
        """cache_dir: where it is kept which pictures need not be decoded at the next start."""
        self._folder, self._seed, self._epochs = folder, rules.seed, epochs
        self._pictures = {picture.name: picture for picture in list_pictures(folder, rules, cache_dir)}
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

    def report_final(self, committed_round: CommittedRound) -> None:
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


class Whole:
    """The pictures of a folder that an earlier start decoded to their end, by name, size and time of change: those are not decoded again.

    What is broken is not kept: it is looked at anew, as another release of Pillow may read it.
    """

    def __init__(self, folder: Path, cache_dir: Path):
        self._file = cache_dir / f"pictures-{digest_bytes(os.fsencode(folder.resolve()))[:16]}.json"
        try:
            before = json.loads(self._file.read_bytes())
        except (OSError, ValueError):  # none yet, or torn: all are decoded
            before = None
        self._before: dict[str, Any] = before if isinstance(before, dict) else {}
        self._now: dict[str, list[int]] = {}

    def fault(self, picture: FolderPicture) -> str:
        """Why it cannot be read; '' when it can."""
        try:
            about = picture.path.stat()  # before it is read: what is written meanwhile is decoded at the next start
            stamp = [about.st_size, about.st_mtime_ns]
            if self._before.get(picture.name) != stamp:
                with Image.open(picture.path, formats=_FORMATS) as image:
                    image.draft("RGB", (64, 64))  # a JPEG is then read to its end, but only an eighth of it computed
                    image.load()
        except Exception as error:  # damaged files raise OSError, SyntaxError, ValueError, DecompressionBombError, ...
            return f"not readable ({(str(error).splitlines() or [''])[0][:80]})"
        self._now[picture.name] = stamp
        return ""

    def keep(self) -> None:
        if self._now == self._before:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files.replace(self._file, json.dumps(self._now, sort_keys=True).encode())
        except OSError as error:
            log.warning("all pictures are decoded again at the next start: cannot write %s: %s", self._file, error.strerror)


def list_pictures(folder: Path, rules: Rules, cache_dir: Path) -> list[Picture]:
    """The pictures in `folder` and the folders in it that can be trained on, by name; the others are listed in one log line.

    Every picture is decoded once, so that a truncated one is found now and not in the middle of the night; see `Whole`.
    Raises UserError when the folder is missing, holds no good picture, or a metadata file that cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", fix="Give --train_data_dir a folder of pictures with a .txt beside each.")
    listing = list_folder(folder, rules.caption_column)
    for fault in listing.faults:
        raise UserError(f"{folder / fault.where}: {fault.reason}.", fix=fault.fix)
    whole = Whole(folder, cache_dir)
    with ThreadPoolExecutor() as pool:  # PIL decodes outside the interpreter lock
        results = list(pool.map(lambda picture: _examine(picture, rules, whole), listing.pictures))
    whole.keep()
    bad = {picture.name: result for picture, result in zip(listing.pictures, results, strict=True) if isinstance(result, str)}
    bad.update(dict.fromkeys(listing.nowhere, "named by a metadata file, but not there"))
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


def _examine(found: FolderPicture, rules: Rules, whole: Whole) -> Picture | str:
    """The picture; or why it cannot be trained on."""
    try:
        captions = found.told or _one(found.beside.read_bytes().decode("utf-8-sig") if found.beside else "")
    except UnicodeDecodeError:
        return "caption is not UTF-8"
    except OSError as error:
        return f"caption cannot be read ({error.strerror})"
    captions = captions or _one(rules.prompt or found.spare)
    if not captions and rules.prompt is None:
        return "no caption"
    if fault := whole.fault(found):
        return fault
    return Picture(found.name, captions if len(captions) > 1 else "".join(captions), rules.repeats * found.repeats)


def _one(text: str) -> Captions:
    """It, as one line; none where it is empty."""
    return tuple(filter(None, [one_line(text)]))
