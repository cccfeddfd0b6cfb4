"""What every rank trains on next: rank 0 draws samples from the source, every rank gets and decodes its share of them."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peer.batches import Decoder
from peer.buckets import Buckets, MicroBatch, Pool, describe
from peer.contracts import PixelBatch, Sample, Source
from peer.device import RankGroup

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_AHEAD_SECONDS = 0.05
_QUIET_SECONDS = 1.0


@dataclass(frozen=True)
class Work:
    """One local step: this rank's micro-batches, and counts and keys of all ranks together."""

    batches: tuple[PixelBatch, ...]
    first: int
    """Number of this rank's first micro-batch among those of the whole step; what noise is seeded with."""
    keys: tuple[str, ...]
    """Those among them that are in the batches."""
    bad: tuple[str, ...]
    """Those that could not be decoded."""


class Feed:
    """An iterator over local steps that ends with the data or when `stopping()` says so; equal on all ranks.

    It never blocks on the source for long, so that a stop is heard while the source has nothing.
    With decoding processes one step is prepared ahead; what was drawn and not handed out is given back when the feed closes.
    """

    def __init__(
        self,
        source: Source | None,
        decoder: Decoder,
        group: RankGroup,
        *,
        batch_samples: int,
        accumulation: int,
        stopping: Callable[[], bool],
        buckets: Buckets,
        bucket_info: bool = False,
    ):
        """source: rank 0's, None elsewhere; batch_samples: of one micro-batch; accumulation: micro-batches per step and rank.

        bucket_info: log which buckets there are, and at the end what was in each.
        """
        self._source = source
        self._decoder, self._group, self._stopping = decoder, group, stopping
        self._accumulation, self._per_step = accumulation, accumulation * group.world
        self._pool, self._bucket_info = Pool(buckets, batch_samples), bucket_info
        self._drawer = _Drawer(source, batch_samples * self._per_step) if source is not None else None
        self._prepared: tuple | None = None
        if bucket_info:
            log.info("buckets %s", " ".join(f"{width}x{height}" for width, height in buckets.sizes))

    def __iter__(self) -> Iterator[Work]:
        while True:
            if self._prepared and self._group.broadcast_object(self._stopping()):
                return
            prepared = self._prepared or self._prepare(wait=True)
            if prepared is None:
                return
            self._prepared = None
            work = self._finish(*prepared)
            self._prepared = self._prepare(wait=False) if self._decoder.num_workers else None
            yield work

    def _ahead(self) -> list[tuple[int, str]]:
        """(number of the draw, key) of what was drawn and not handed out, in the order of the draws. Rank 0 only."""
        prepared = [pair for batch in (self._prepared[0] if self._prepared else ()) for pair in batch.numbered]
        return sorted(prepared + self._pool.held())

    def ahead(self) -> list[str]:
        """Keys that were drawn but not handed out, in the order in which they were drawn. Rank 0 only."""
        return [key for _, key in self._ahead()] + (self._drawer.in_hand() if self._drawer else [])

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, and what it must yield once more. Rank 0 only."""
        assert self._source is not None
        return {"ahead": self.ahead(), "pool": self._pool.state_dict(self._ahead()), "source": self._source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._source is not None:
            self._source.load_state_dict(state["source"])
            self._source.give_back(state["ahead"])
            self._pool.load_state_dict(state["pool"], state["ahead"])

    def _prepare(self, *, wait: bool) -> tuple | None:
        drawn = self._draw(wait) if self._drawer else []
        micro = self._group.scatter(self._shares(drawn) if self._drawer else None)
        if micro is None:
            return None
        return drawn, micro, [self._decoder.start(batch.samples, batch.size) for batch in micro]

    def _draw(self, wait: bool) -> list[MicroBatch]:
        """The micro-batches of one step, fewer when the data end with them; none when they are not here yet, or never will be."""
        assert self._drawer is not None
        while self._pool.num_ready < self._per_step:
            if self._stopping():
                return []
            drawn = self._drawer.take(_POLL_SECONDS if wait else _AHEAD_SECONDS)
            if drawn:
                self._pool.add(drawn)
            elif self._drawer.ended:
                self._pool.flush()
                break
            elif not wait:
                return []
        return self._pool.take(self._per_step)

    def _shares(self, drawn: Sequence[MicroBatch]) -> list[list[MicroBatch] | None]:
        """Micro-batches of each rank; a rank is just so many further micro-batches, so the number of ranks changes no result."""
        if not drawn:
            return [None] * self._group.world
        micro = [*drawn, *[MicroBatch()] * (self._per_step - len(drawn))]
        return [micro[i : i + self._accumulation] for i in range(0, len(micro), self._accumulation)]

    def _finish(self, drawn: Sequence[MicroBatch], micro: list[MicroBatch], started: list) -> Work:
        decoded = [self._decoder.finish(batch.samples, futures) for batch, futures in zip(micro, started, strict=True)]
        good = [key for part in decoded for key in part.keys]
        bad = [key for part in decoded for key in part.bad]
        parts = self._group.gather((good, bad))
        keys = tuple(key for part in parts for key in part[0])
        bads = tuple(key for part in parts for key in part[1])
        batches = tuple(part.pixels for part in decoded if part.pixels is not None)
        return Work(batches, self._group.rank * self._accumulation, keys, bads)

    def close(self) -> None:
        if self._source is not None:
            self._source.give_back(self.ahead())
        if self._drawer is not None:
            self._drawer.close()
        self._decoder.close()
        if self._bucket_info:
            log.info("samples per bucket: %s", describe(self._pool.counts, self._pool.merged))


class _Drawer:
    """Takes samples from a source in a thread of its own, a fixed number at a time and only on request.

    So nothing is drawn behind the back of a checkpoint, and waiting for the source can be given up.
    """

    def __init__(self, source: Source, count: int):
        self._source, self._count = source, count
        self._hand: list[Sample] = []
        self._requests: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._asked = self._ready = self.ended = False
        self._thread = threading.Thread(target=self._run, name="source", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            samples = iter(self._source)
            while not self.ended:
                for _ in range(self._requests.get()):
                    sample = next(samples, None)
                    if sample is None:
                        self.ended = True
                        break
                    self._hand.append(sample)
                self._answers.put(None)
        except BaseException as error:
            self._answers.put(error)

    def take(self, seconds: float) -> list[Sample] | None:
        """The samples asked for, fewer when the source ended with them; None when they are not there within `seconds`, or all are taken."""
        if not self._asked:
            if self.ended:
                return None
            self._requests.put(self._count)
            self._asked = True
        if not self._answered(seconds):
            return None
        self._asked = self._ready = False
        drawn, self._hand = self._hand, []
        return drawn or None

    def _answered(self, seconds: float) -> bool:
        """Whether the samples asked for are in hand. Raises what the source raised."""
        if self._asked and not self._ready:
            try:
                error = self._answers.get(timeout=seconds)
            except queue.Empty:
                return False
            if error is not None:
                self.ended = True
                raise error
            self._ready = True
        return self._ready

    def in_hand(self) -> list[str]:
        """Keys drawn and not yet taken; first lets a request that is under way end, unless the source has nothing."""
        self._answered(_QUIET_SECONDS)
        return [sample.key for sample in self._hand]

    def close(self) -> None:
        """The thread ends, at once or when the source lets it go."""
        self.ended = True
        self._requests.put(0)
