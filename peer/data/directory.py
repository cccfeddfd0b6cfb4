"""A folder of pictures and their captions, in the layouts of this project, of diffusers (metadata files) and of kohya (`10_name/`), and tars.

Needs no server. Which pictures a folder has and which captions is `swarm.picture_folder`'s rule, as for the host of a run; before the name of a
kohya folder comes `--instance_prompt`, and for textual inversion a template comes last.
"""

import json
import logging
import os
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peer.contracts import Sample, SourceContext
from peer.data.alone import Alone
from swarm import files
from swarm.captions import CAPTION_COLUMNS, Faults
from swarm.digest import digest_bytes, digest_json
from swarm.errors import UserError
from swarm.held_out import WHOLE, held_out, unfit
from swarm.picture_file import BadSample, has_mask, opened, orientation_of, turned, upright_mask
from swarm.picture_folder import Pair, Piece, listed, nothing_in
from swarm.subsets import list_dataset

log = logging.getLogger(__name__)

_KEEP_EVERY = 1000
"""Pictures decoded between two notes of them, some 10 s apart: a start that is killed loses no more."""


@dataclass(frozen=True)
class Rules:
    """How a folder is read. prompt: the caption of pictures that have none; None: they are left out."""

    caption_column: str = CAPTION_COLUMNS[0]
    prompt: str | None = None
    repeats: int = 1
    max_samples: int = 0
    seed: int = 0
    masks: bool = False
    validation_split: float = 0.0
    joining: bool = False
    """The run's split is another's choice: where it chooses no picture of this folder, or all of them, nothing is held out here."""


def build(context: SourceContext) -> "Directory":
    """Raises UserError when nothing in the folder can be trained on."""
    run, peer = context.run, context.peer
    joining = peer.swarming and not peer.found
    rules = Rules(
        peer.caption_column,
        context.bare_caption,
        peer.repeats,
        peer.max_train_samples,
        run.seed,
        run.masked_loss,
        run.validation_split,
        joining,
    )
    return Directory(Path(peer.train_data_dir), rules, peer.cache_folder, epochs=context.epochs)


class Directory(Alone):
    """Yields every good picture `repeats` times an epoch, in an order that only (seed, epoch) decides; samples given back come first.

    A sample's key is `epoch:name`, and `epoch.n:name` for the n-th repeat.
    """

    def __init__(self, folder: Path, rules: Rules, cache_dir: Path, *, epochs: int | None):
        """cache_dir: where it is kept which pictures need not be decoded at the next start."""
        super().__init__()
        self._folder, self._seed, self._epochs = folder, rules.seed, epochs
        self._pairs = {_as_text(pair.name): pair for pair in good_pairs(folder, rules, cache_dir)}
        self._held_out = self._choose(rules)
        aside = set(self._held_out)
        self._own = {name: pair for name, pair in self._pairs.items() if name not in aside and pair.validation_split != WHOLE}
        self._places = [(name, again) for name, pair in self._own.items() for again in range(pair.repeats)]
        if not self._places:
            raise unfit(rules.validation_split, len(self._pairs), len(self._pairs))
        self._digest = digest_json(self._places)
        self._epoch = self._position = 0
        self._shuffled, self._shuffled_for = self._places, -1

    def _choose(self, rules: Rules) -> list[str]:
        """Names of the pictures that are held out. Raises UserError where the split fits no folder like this one, and we chose it."""
        try:
            return held_out({name: pair.validation_split for name, pair in self._pairs.items()}, rules.validation_split)
        except UserError as error:
            if not rules.joining:
                raise
            log.warning("%s This peer measures no held-out loss.", error)
            return []

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self._places)

    def __iter__(self) -> Iterator[Sample]:
        while not self._closed:
            key = self._next_key()
            if key is None:
                return
            yield self._read_as(key, self._read)

    def _next_key(self) -> str | None:
        if self._again:
            return self._again.popleft()
        if self._position == len(self._places):
            self._epoch, self._position = self._epoch + 1, 0
        if self._epochs is not None and self._epoch >= self._epochs:
            return None
        name, again = self._order(self._epoch)[self._position]  # may shuffle an epoch, so a checkpoint finds the old position meanwhile
        self._position += 1
        return f"{self._epoch}.{again}:{name}" if again else f"{self._epoch}:{name}"

    def _order(self, epoch: int) -> list[tuple[str, int]]:
        if self._shuffled_for != epoch:
            self._shuffled, self._shuffled_for = self._places[:], epoch
            random.Random(f"{self._seed}:{epoch}").shuffle(self._shuffled)
        return self._shuffled

    def _read(self, key: str) -> Sample:
        """The sample; one that is gone or changed hands since the start is no picture, and left out like a broken one."""
        name = key.partition(":")[2]
        try:
            pair = self._pairs[name]
            image, mask = pair.parts()
            return Sample.of(key, image, pair.caption, mask, pair.weight)
        except (KeyError, BadSample) as error:
            log.warning("cannot read %s: %s", name, error)
            return Sample.bad(key)

    def held_out(self) -> Sequence[Sample] | None:
        return [self._read(f"held out:{name}") for name in self._held_out]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "again": self._to_come_again(), "pictures": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Where other pictures are there than then, the order is another one: no position in it means anything."""
        self._epoch, self._position, self._again = state["epoch"], state["position"], deque(state["again"])
        if state["pictures"] != self._digest:
            log.warning("the pictures in %s are not those of the checkpoint; epoch %d begins again", self._folder, self._epoch + 1)
            self._position = 0
            self._again = deque(filter(self._is_trained, self._again))

    def give_back(self, keys: Sequence[str]) -> None:
        """Not what a checkpoint gives back of pictures that are gone since, or held out now."""
        super().give_back([key for key in keys if self._is_trained(key)])

    def _is_trained(self, key: str) -> bool:
        return key.partition(":")[2] in self._own


class Whole:
    """The pictures of a folder that an earlier start decoded to their end, by name, size and time of change: those are not decoded again.

    Kept beside that: whether they have a mask.

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
        self._decoded = self._kept = 0

    def check(self, pair: Pair) -> None:
        """Raises BadSample for a picture that cannot be read to its end."""
        stamp = _stamp(pair)  # before it is read: what is written meanwhile is decoded at the next start
        known = self._before.get(pair.name)
        if known in ([*stamp, 0], [*stamp, 1]):
            self._now[pair.name] = known
        else:
            self._now[pair.name] = [*stamp, int(_decode(pair))]
            self._decoded += 1  # by several threads: a lost count only delays a note

    def masks(self, pairs: Sequence[Pair]) -> int:
        """How many of the pictures, all of them checked, have a mask."""
        return sum(self._now[pair.name][-1] for pair in pairs)

    def keep_some(self) -> None:
        """While others are still to be checked: what was decoded so far, if it is enough to be worth it, beside what was known of the others."""
        if self._decoded - self._kept >= _KEEP_EVERY:
            self._kept = self._decoded
            self._write({**self._before, **self._now})

    def keep(self, *, all_checked: bool) -> None:
        """all_checked: what was not checked is gone from the folder, and forgotten."""
        now = self._now if all_checked else {**self._before, **self._now}
        if now != self._before:
            self._write(now)

    def _write(self, now: Mapping[str, list[int]]) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files.replace(self._file, json.dumps(now, sort_keys=True).encode())
        except OSError as error:
            log.warning("cannot write %s, so the next start decodes all pictures again: %s", self._file, error.strerror)


def good_pairs(folder: Path, rules: Rules, cache_dir: Path) -> list[Pair]:
    """The pictures of `folder` that can be trained on, by name, with their captions; the others are listed in one log line.

    Every picture is decoded once, so that a truncated one is found now and not in the middle of the night; see `Whole`.
    Raises UserError when the folder is missing or holds no good picture.
    """
    faults: Faults = []
    pairs, whole = list_dataset(folder, faults, rules.caption_column, rules.masks), Whole(folder, cache_dir)
    results: list[Pair | BadSample] = []
    try:
        with ThreadPoolExecutor() as pool:  # PIL decodes outside the interpreter lock
            for result in pool.map(lambda pair: _examined(pair, rules, whole), pairs):
                results.append(result)
                whole.keep_some()
    finally:
        whole.keep(all_checked=len(results) == len(pairs))
    good = [result for result in results if isinstance(result, Pair)]
    faults += [(pair.name, str(result)) for pair, result in zip(pairs, results, strict=True) if isinstance(result, BadSample)]
    if not good:
        raise nothing_in(folder, faults)
    if faults:
        log.warning("left out files=%d of pictures=%d %s", len(faults), len(pairs), listed(faults))
    if rules.max_samples and rules.max_samples < len(good):
        # As in diffusers: a subset that the seed decides, not the first by name.
        chosen = set(random.Random(f"subset:{rules.seed}").sample(range(len(good)), rules.max_samples))
        good = [pair for i, pair in enumerate(good) if i in chosen]
    if rules.masks:
        masks = whole.masks(good)
        log.log(
            logging.INFO if masks else logging.WARNING,
            "masks=%d of pictures=%d; pictures without one are learned whole",
            masks,
            len(good),
        )
    return good


def _examined(pair: Pair, rules: Rules, whole: Whole) -> Pair | BadSample:
    """The pair with its captions read; or why it cannot be trained on."""
    pair = replace(pair, spare=rules.prompt or pair.spare, empty_ok=rules.prompt is not None, repeats=rules.repeats * pair.repeats)
    try:
        captions = pair.captions()
        whole.check(pair)
    except BadSample as bad:
        return bad
    return replace(pair, caption=captions)


def _stamp(pair: Pair) -> list[int]:
    """Changes with the picture's bytes, and with its mask's. Raises BadSample."""
    stamp: list[int] = []
    for place in (pair.image, *([pair.mask] if pair.mask else [])):
        piece = place if isinstance(place, Piece) else None
        try:
            about = os.stat(piece.path if piece else place)
        except OSError as error:
            raise BadSample(f"cannot be read: {error.strerror}") from None
        stamp += [about.st_size, about.st_mtime_ns, *([piece.offset, piece.size] if piece else [])]
    return stamp


def _decode(pair: Pair) -> bool:
    """Whether the picture has a mask. Raises BadSample."""
    data, mask = pair.parts()
    with opened(data) as image:
        size, own = turned(image.size, orientation_of(image, data)), has_mask(image)
        image.draft("RGB", (64, 64))  # a JPEG is then read to its end, but only an eighth of it computed
        image.load()
    if mask:
        upright_mask(mask, size)
    return own or bool(mask)


def _as_text(name: str) -> str:
    """A file's name may be no text, and a sample's key must be: chance is seeded with it."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
