"""A dataset of the Hugging Face Hub, or one that `datasets` reads from a folder, streamed: nothing is downloaded before it is trained on.

Rows are taken in windows of one file each: the files in an order that the seed, the epoch and this peer's part decide, the rows of a
window shuffled. A window can be read again from where it starts, so that a resumed run goes on at the very sample, and samples that were
given back come again. What is promised when several peers stream one dataset: with `--dataset_part 1/3`, `2/3` and `3/3` none has a row
that another one has, in any epoch, and all three together have all rows; without it each goes through all rows, in an order of its own.
Peers that come and go and shall still train every row exactly once take it from a dataset server (`dd-datasetserver --dataset_name`).
"""

import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from peer.contracts import Sample, SourceContext
from peer.data.alone import Alone
from swarm.dataset_rows import HubDataset
from swarm.errors import UserError
from swarm.picture_file import BadSample, has_mask, opened

log = logging.getLogger(__name__)

# A file of thousands of pictures is shuffled in pieces that are fetched in some seconds and fit into memory twice.
WINDOW_ROWS = 256
WINDOW_BYTES = 64 << 20
_NOWHERE = ((-1, -1), None, None)


def build(context: SourceContext) -> "HuggingFace":
    """Raises UserError when the dataset cannot be read, or has no such columns."""
    peer, run, part = context.peer, context.run, parse_part(context.peer.dataset_part)
    columns = {"image_column": peer.image_column, "caption_column": peer.caption_column}
    dataset = HubDataset(peer.dataset_name, peer.dataset_config_name, peer.dataset_split, **columns, max_samples=peer.max_train_samples)
    if peer.swarming and part == (0, 1):
        log.info("streaming all of %s in an order of this peer's own; peers with --dataset_part 1/N to N/N never share a row", dataset)
    return HuggingFace(dataset, part, seed=f"{run.seed}:{context.peer_id}", prompt=context.bare_caption, epochs=context.epochs, masks=run.masked_loss)


def parse_part(text: str) -> tuple[int, int]:
    """(0, 3) of '1/3'; all of it for ''. Raises UserError."""
    first, _, count = (text or "1/1").partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise UserError(f"dataset_part is '{text}'.", fix="Use 1/3 for the first of three parts, 2/3 and 3/3 for the others.")
    return int(first) - 1, int(count)


class HuggingFace(Alone):
    """The source; see the module. A sample's key is `epoch:file:window:row`, which says where it is found again."""

    def __init__(self, dataset: HubDataset, part: tuple[int, int], *, seed: str, prompt: str | None, epochs: int | None, masks: bool = False):
        """part: (index, count), this peer's share. prompt: the caption of pictures that have none; None: they are left out.

        masks: whether the run has a use for them: then the first rows' are counted.
        """
        super().__init__()
        self._dataset, self._seed, self._epochs = dataset, seed, epochs
        self._told = [dataset.name, dataset.config, dataset.split, dataset.max_samples, *part]
        """What a place in the stream means anything in."""
        self._bare = {"spare": prompt or "", "empty_ok": prompt is not None}
        with dataset.told():
            self._files, self._num_files, self._size = _split(dataset.open(bare=prompt is not None), dataset, part)
        self._epoch = self._file = self._window = self._position = 0
        self._starts: dict[str, Any] = {}
        """Where each window that was read begins, as `datasets` says it."""
        self._going: tuple[tuple[int, int], Any, Any] = _NOWHERE
        self._rows: tuple[str, list[Sample]] = ("", [])
        self._spare: tuple[str, list[Sample]] = ("", [])
        self._any = False
        self._counts_masks = masks

    def __length_hint__(self) -> int:
        """Samples of one epoch; 0 when the dataset does not say."""
        return self._size

    def __iter__(self) -> Iterator[Sample]:
        while not self._closed:
            sample = self._read_as(self._again.popleft(), self._reread) if self._again else self._next()
            if sample is None:
                return
            yield sample

    def _next(self) -> Sample | None:
        while self._epochs is None or self._epoch < self._epochs:
            order = list(range(self._num_files))
            random.Random(f"{self._seed}:{self._epoch}").shuffle(order)
            while self._file < len(order):
                rows = self._shuffled(order[self._file], self._window)
                if self._position < len(rows):
                    self._position += 1
                    sample = rows[self._position - 1]
                    self._any = self._any or bool(sample.image)
                    return sample
                self._window, self._position = (self._window + 1, 0) if rows else (0, 0)
                self._file += not rows
            if not self._any:
                raise UserError(
                    f"No row of the dataset {self._dataset} is one that this peer can use.",
                    fix="Check --dataset_split and --dataset_part, and the warnings above.",
                )
            self._epoch, self._file = self._epoch + 1, 0
        return None

    def _shuffled(self, file: int, window: int) -> list[Sample]:
        """The samples of a window in the order of this epoch; none behind the file's last window."""
        name = f"{self._epoch}:{file}:{window}"
        if self._rows[0] != name:
            samples = self._read(name)
            random.Random(f"{self._seed}:{name}").shuffle(samples)
            self._rows = name, samples
        return self._rows[1]

    def _reread(self, key: str) -> Sample:
        """A sample that was yielded before."""
        name, _, _ = key.rpartition(":")
        if name != self._spare[0]:
            self._spare = name, self._rows[1] if name == self._rows[0] else self._read(name)
        found = [sample for sample in self._spare[1] if sample.key == key]
        if not found:
            raise UserError(
                f"The dataset {self._dataset} has changed: row {key} is gone.", fix="Start afresh, without --resume_from_checkpoint."
            )
        return found[0]

    def _read(self, name: str) -> list[Sample]:
        """The samples of window `epoch:file:window`, in the order of the file."""
        _, file, window = map(int, name.split(":"))
        if window and f"{file}:{window}" not in self._starts:
            return []
        samples: list[Sample] = []
        size = 0
        with self._dataset.told():
            data, rows = self._rows_from(file, window)
            for row in rows:
                samples.append(self._sample(f"{name}:{len(samples)}", row))
                size += len(samples[-1].image)
                if len(samples) == WINDOW_ROWS or size > WINDOW_BYTES:
                    self._starts[f"{file}:{window + 1}"] = data.state_dict()
                    self._going = (file, window + 1), data, rows
                    break
        if self._counts_masks and samples:
            self._counts_masks = False
            _tell_masks(samples)
        return samples

    def _rows_from(self, file: int, window: int) -> tuple[Any, Iterator[dict[str, Any]]]:
        """The file's stream where the window begins: the one that has come there, or a new one, which must find its way."""
        (place, data, rows), self._going = self._going, _NOWHERE  # a stream is read once
        if place == (file, window):
            return data, rows
        data = self._files(file)
        if window:
            data.load_state_dict(self._starts[f"{file}:{window}"])
        return data, iter(data)

    def _sample(self, key: str, row: Mapping[str, Any]) -> Sample:
        """A row without a picture or a caption is left out and counted, like a broken picture."""
        try:
            pair = self._dataset.pair(key, row, **self._bare)
            return Sample.of(key, pair.read(), pair.captions())
        except BadSample as reason:
            log.warning("row %s: %s", key, reason)
            return Sample.bad(key)

    def held_out(self) -> Sequence[Sample] | None:
        """None are: where --validation_split says otherwise, `peer.wiring` refuses."""
        return []

    def state_dict(self) -> dict[str, Any]:
        place = {"epoch": self._epoch, "file": self._file, "window": self._window, "position": self._position}
        return {**place, "starts": dict(self._starts), "again": self._to_come_again(), "dataset": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._file, self._window = state["epoch"], state["file"], state["window"]
        self._position, self._starts, self._again = state["position"], dict(state["starts"]), deque(state["again"])
        self._any = any((self._epoch, self._file, self._window, self._position))


def _tell_masks(samples: Sequence[Sample]) -> None:
    """As a folder's are told; a stream's end is far away."""
    found = []
    for sample in samples:
        with contextlib.suppress(BadSample), opened(sample.image) as image:
            found.append(has_mask(image))
    level, masks = logging.INFO if any(found) else logging.WARNING, sum(found)
    log.log(level, "masks=%d of pictures=%d, the first of the stream; pictures without one are learned whole", masks, len(found))


def _split(rows: Any, dataset: HubDataset, part: tuple[int, int]) -> tuple[Callable[[int], Any], int, int]:
    """This peer's files as streams: a function of their number, how many, and all their rows; 0: unknown."""
    from datasets.distributed import split_dataset_by_node

    split = rows.info.splits.get(dataset.split) if rows.info.splits else None
    size = (split.num_examples or 0) if split and part == (0, 1) else 0
    index, count = part
    files = rows.num_shards
    if dataset.max_samples:
        return (lambda _: split_dataset_by_node(rows.take(dataset.max_samples), index, count)), 1, min(size, dataset.max_samples)
    if files >= count:  # whole files, so that nothing is fetched that others train on
        own = list(range(index, files, count))
        return (lambda number: rows.shard(files, own[number])), len(own), size
    return (lambda number: split_dataset_by_node(rows.shard(files, number), index, count)), files, size
