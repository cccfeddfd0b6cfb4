"""Aspect-ratio buckets: pictures are cropped to the nearest of some sizes of about equal area, and a micro-batch holds one size.

Which samples come together depends on nothing but the order in which they were drawn, so that a resumed run forms the same batches.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from peer.contracts import Sample
from peer.samples.pictures import size_of
from swarm.founding import check_sides
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

Size = tuple[int, int]
"""(width, height) in pixels."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples, in the order of their draws, that are cropped to one size. beside: pictures of the class that accompany them."""

    samples: tuple[Sample, ...] = ()
    size: Size | None = None
    beside: tuple[Sample, ...] = ()


class Buckets:
    """The sizes of a run's pictures, from the tallest to the widest; a single one without `--num_buckets`."""

    def __init__(self, sizes: Sequence[Size]):
        self.sizes = sorted(sizes, key=_log_ratio)

    @classmethod
    def of(cls, run: RunConfig, multiple: int) -> "Buckets":
        """multiple: what the model's sides must be multiples of. Raises UserError."""
        return cls(bucket_sizes(run.resolution, multiple, run.num_buckets, run.bucket_side_min, run.bucket_side_max))

    def nearest(self, image: bytes) -> int:
        """Index of the size whose ratio is nearest to the picture's; that of the middle one for what is no picture."""
        if len(self.sizes) == 1 or (size := size_of(image)) is None:
            return len(self.sizes) // 2
        return min(range(len(self.sizes)), key=lambda i: abs(_log_ratio(self.sizes[i]) - _log_ratio(size)))

    def beside(self, index: int) -> list[int]:
        """The buckets of the next ratios, the nearer one first."""
        there = [i for i in (index - 1, index + 1) if 0 <= i < len(self.sizes)]
        return sorted(there, key=lambda i: abs(_log_ratio(self.sizes[i]) - _log_ratio(self.sizes[index])))


def bucket_sizes(resolution: int, multiple: int, count: int, side_min: int = 0, side_max: int = 0) -> list[Size]:
    """At most `count` sizes with sides that are multiples of `multiple` and an area of at most resolution^2, the square among them.

    For each short side the longest other one; spread evenly if there are more. side_min, side_max: 0 for half and one and a half
    of the resolution, the original's 256 and 768 at 512. Raises UserError for sides that leave no square.
    """
    if count <= 1:
        return [(resolution, resolution)]
    side_min, side_max = check_sides(resolution, count, side_min, side_max)
    shorts = range(resolution - multiple, side_min - 1, -multiple)
    wide = [(min(resolution**2 // short, side_max) // multiple * multiple, short) for short in shorts]
    kept = min((count - 1) // 2, len(wide))
    wide = [wide[round((i + 1) * len(wide) / kept) - 1] for i in range(kept)]
    return [(resolution, resolution), *wide, *((height, width) for width, height in wide)]


class Pool:
    """Turns samples, as they are drawn, into micro-batches of `batch_samples` of one bucket.

    None waits forever: when `patience` more were drawn, or when the data end, a batch is made of what its bucket has, filled up from
    the buckets beside it. So a rare ratio is cropped a little more, and what is held, and leased, is bounded.
    """

    def __init__(self, buckets: Buckets, batch_samples: int):
        self._buckets, self._size = buckets, batch_samples
        # A bucket that gets a quarter of its even share still fills up by itself.
        self.patience = 4 * len(buckets.sizes) * batch_samples
        self._waiting: list[tuple[int, Sample]] = []
        """Each with the index of its bucket."""
        self._ready: deque[MicroBatch] = deque()
        self._drawn = 0
        self._before: dict[str, int] = {}
        self.counts: Counter[Size] = Counter()
        self.merged = 0
        """Samples that went into a bucket beside their own."""

    def add(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self._add(self._buckets.nearest(sample.image), replace(sample, number=self._number_of(sample.key)))

    def _number_of(self, key: str) -> int:
        """The next number; for a sample that a run before this one had drawn already, the one it had."""
        if key in self._before:
            return self._before.pop(key)
        self._drawn += 1
        return self._drawn

    def _add(self, bucket: int, sample: Sample) -> None:
        while self._waiting and sample.number - self._waiting[0][1].number > self.patience:
            self._flush_oldest()
        self._waiting.append((bucket, sample))
        same = self._of(bucket)
        if len(same) == self._size:
            self._form(same, bucket)

    def _of(self, bucket: int) -> list[Sample]:
        return [sample for own, sample in self._waiting if own == bucket]

    def flush(self) -> None:
        """No more samples come: nothing waits any longer."""
        while self._waiting:
            self._flush_oldest()

    def _flush_oldest(self) -> None:
        bucket = self._waiting[0][0]
        together = [sample for i in (bucket, *self._buckets.beside(bucket)) for sample in self._of(i)]
        self._form(sorted(together[: self._size], key=lambda sample: sample.number), bucket)

    def _form(self, together: list[Sample], bucket: int) -> None:
        size, numbers = self._buckets.sizes[bucket], {sample.number for sample in together}
        self._ready.append(MicroBatch(tuple(together), size))
        self.counts[size] += len(together)
        self.merged += sum(own != bucket for own, sample in self._waiting if sample.number in numbers)
        self._waiting = [(own, sample) for own, sample in self._waiting if sample.number not in numbers]

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def take(self, count: int) -> list[MicroBatch]:
        """At most `count` micro-batches, in the order in which they became ready."""
        return [self._ready.popleft() for _ in range(min(count, len(self._ready)))]

    def drop(self) -> None:
        """Let go of all that is here."""
        self._waiting.clear()
        self._ready.clear()

    def held(self) -> list[Sample]:
        """The samples that are here."""
        return [sample for batch in self._ready for sample in batch.samples] + [sample for _, sample in self._waiting]

    def state_dict(self, held: Sequence[Sample]) -> dict[str, int | list[int]]:
        """held: all that was drawn and not trained, by number."""
        return {"drawn": self._drawn, "numbers": [sample.number for sample in held]}

    def load_state_dict(self, state: dict, keys: Sequence[str]) -> None:
        """keys: of the samples that were held; they are to be drawn again first, in this order."""
        self._drawn = state["drawn"]
        self._before = dict(zip(keys, state["numbers"], strict=False))


def describe(counts: Counter[Size], merged: int) -> str:
    listed = " ".join(
        f"{width}x{height}={count}" for (width, height), count in sorted(counts.items(), key=lambda item: _log_ratio(item[0]))
    )
    return f"{listed or 'no samples'}, {merged} of them merged into the next ratio"


def _log_ratio(size: Size) -> float:
    return math.log(size[0] / size[1])
