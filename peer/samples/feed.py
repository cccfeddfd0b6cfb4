"""What every rank trains on next: rank 0 draws samples from the source, every rank gets and decodes its share of them."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from peer.contracts import PixelBatch, Sample, Source
from peer.machine.device import RankGroup
from peer.samples.buckets import Buckets, MicroBatch, Pool, describe
from peer.samples.decoding import Decoder

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 1.0
"""So often who waits for samples turns to the swarm, which may want what was trained, or have made rounds to tell the server of; the other
ranks hear from rank 0 as often: a group takes a rank without a word for 10 minutes for lost."""
_AHEAD_SECONDS = 0.05
_QUIET_SECONDS = 1.0
_QUIET_WAITS = 10
"""Of _PATIENCE_SECONDS, in which no sample came: what is then there of a window is trained."""
WINDOW_SAMPLES = 64
"""Of this rank, which are encoded at once. Their pixels are 0.8 GB at 1,024 px, and 64 of klein 9B's texts 1.6; a part's turn on a GPU begins once for all of them."""


def window_steps(step_samples: int) -> int:
    """How many local steps of this many samples are encoded at once, at least one."""
    return max(1, WINDOW_SAMPLES // step_samples)


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


@dataclass
class Prepared:
    """A step on its way: what rank 0 drew for all ranks, and how far this rank's share of it has come."""

    drawn: Sequence[MicroBatch]
    started: "Sequence[Future[PixelBatch] | PixelBatch]"
    decoded: list[PixelBatch] | None = None
    """Decoded and placed on the device."""
    encoded: bool = False
    """Whether the frozen parts were asked about it ahead."""

    @property
    def ready(self) -> bool:
        return self.decoded is not None or all(part.done() for part in self.started if isinstance(part, Future))


class Feed:
    """An iterator over local steps that ends with the data or when `stopping()` says so; equal on all ranks.

    It never blocks on the source for long: while that has nothing, a stop is heard, and every second None comes in place of a step.
    With decoding processes steps are prepared ahead; what was drawn and not handed out is given back when the feed closes.
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
        ahead_steps: int = 1,
        placed_steps: int = 0,
        place: Callable[[PixelBatch], PixelBatch] = lambda batch: batch,
        encode: Callable[[Sequence[PixelBatch]], Sequence[PixelBatch]] | None = None,
        beside: Callable[[Sequence[Sample]], tuple[Sample, ...]] | None = None,
    ):
        """source: rank 0's, None elsewhere; batch_samples: of one micro-batch; accumulation: micro-batches per step and rank.

        bucket_info: log which buckets there are, and at the end what was in each. ahead_steps: drawn and decoded ahead, where there are
        decoding processes; placed_steps: of these, as many as are ready are placed ahead. place: brings a batch where it is trained.
        encode: asks the frozen parts about the batches of WINDOW_SAMPLES at once, before the first of them is handed out; None: nobody does.
        beside: rank 0's, of the samples that it draws those that accompany them.
        """
        self._source = source
        self._decoder, self._group, self._stopping = decoder, group, stopping
        self._accumulation, self._per_step = accumulation, accumulation * group.world
        self._pool, self._bucket_info = Pool(buckets, batch_samples), bucket_info
        self._drawer = _Drawer(source, batch_samples * self._per_step) if source is not None else None
        self._ahead_steps = ahead_steps if decoder.num_workers else 0
        self._placed_steps, self._place, self._beside = placed_steps, place, beside
        self._encode, self._window_steps = encode, window_steps(batch_samples * accumulation)
        self._prepared: deque[Prepared] = deque()
        self._quiet = self._came = 0
        """Rank 0's: how many times in a row it waited while no sample came, and how many samples had come by then."""
        if bucket_info:
            log.info("buckets %s", " ".join(f"{width}x{height}" for width, height in buckets.sizes))

    def __iter__(self) -> Iterator[Work | None]:
        while True:
            if self._prepared and self._group.broadcast_object(self._stopping()):
                return
            if not self._prepared or self._filling():
                drawn = self._draw(wait=True) if self._drawer else []
                if self._group.broadcast_object(drawn is None):
                    yield None
                    continue
                if more := self._shared(drawn):
                    self._prepared.append(more)
                elif not self._prepared:
                    return
                if self._encode:
                    continue
            if self._encode and not self._prepared[0].encoded:
                self._encode_window()
            work = self._finish(self._prepared.popleft())
            self._read_ahead()
            yield work

    def _read_ahead(self) -> None:
        """Start to decode the steps to come, and place those on the device that are decoded."""
        while len(self._prepared) < self._ahead_steps:
            more = self._shared(self._draw(wait=False) if self._drawer else [])
            if more is None:
                break
            self._prepared.append(more)
        for prepared in islice(self._prepared, self._placed_steps):
            if not prepared.ready:
                break
            self._decode(prepared)

    def _filling(self) -> bool:
        """Whether a window is begun and more steps of it are to be waited for. All ranks call it."""
        if not self._encode or self._prepared[0].encoded or len(self._prepared) >= self._window_steps:
            return False
        return self._group.broadcast_object(self._drawer is not None and self._more_comes())

    def _more_comes(self) -> bool:
        assert self._drawer is not None
        return not self._stopping() and self._quiet < _QUIET_WAITS and not (self._drawer.ended and not self._pool.held())

    def _encode_window(self) -> None:
        """Decode the steps that are drawn, and have all of them encoded."""
        batches = [batch for prepared in self._prepared for batch in self._decode(prepared)]
        encoded = iter(self._encode([batch for batch in batches if batch.captions]))
        for prepared in self._prepared:
            prepared.decoded = [next(encoded) if batch.captions else batch for batch in self._decode(prepared)]
            prepared.started, prepared.encoded = (), True  # with them go the pixels

    def _ahead(self) -> list[Sample]:
        """What was drawn and not handed out, in the order of the draws. Rank 0 only."""
        prepared = [sample for step in self._prepared for batch in step.drawn for sample in batch.samples]
        return sorted(prepared + self._pool.held(), key=lambda sample: sample.number)

    def ahead(self, seconds: float = _QUIET_SECONDS) -> list[str]:
        """Keys that were drawn but not handed out, in the order in which they were drawn. Rank 0 only. seconds: see `_Drawer.in_hand`."""
        return [sample.key for sample in self._ahead()] + (self._drawer.in_hand(seconds) if self._drawer else [])

    def rest(self, resting: bool) -> None:
        """This machine's owner wants it back for a while, and others get what was drawn and not handed out; until told otherwise."""
        if self._source is not None:
            self._source.rest(resting)
        if resting:
            ahead = self._drop_ahead()
            if self._source is not None:
                self._source.give_back(ahead)

    def _drop_ahead(self) -> list[str]:
        keys = [sample.key for sample in self._ahead()]
        if self._drawer:
            keys += self._drawer.drop()
        self._pool.drop()
        self._prepared.clear()
        return keys

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, and what it must yield once more. Rank 0 only."""
        assert self._source is not None
        self.ahead()  # while nothing is asked of it the source stands still
        source = self._source.state_dict()  # before `ahead`: what a slow source yields between both is then in the latter, and not lost
        return {"ahead": self.ahead(0.0), "pool": self._pool.state_dict(self._ahead()), "source": source}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._source is not None:
            self._source.load_state_dict(state["source"])
            self._source.give_back(state["ahead"])
            self._pool.load_state_dict(state["pool"], state["ahead"])

    def _shared(self, drawn: Sequence[MicroBatch] | None) -> Prepared | None:
        """A step of what rank 0 drew; None when that is nothing."""
        micro = self._group.scatter(self._shares(drawn) if self._drawer else None)
        if micro is None:
            return None
        return Prepared(drawn, [self._decoder.start(batch.samples, batch.size, batch.beside) for batch in micro])

    def _draw(self, *, wait: bool) -> list[MicroBatch] | None:
        """The micro-batches of one step, fewer when the data end with them; none when they are not here yet, or never will be.

        None: they were waited for, and are not here yet; a host may pause a run for days.
        """
        assert self._drawer is not None
        until = time.monotonic() + _PATIENCE_SECONDS
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
            elif time.monotonic() > until:
                self._quiet = self._quiet + 1 if self._drawer.came == self._came else 0
                self._came = self._drawer.came
                return None
        self._quiet = 0
        return self._pool.take(self._per_step)

    def _shares(self, drawn: Sequence[MicroBatch]) -> list[list[MicroBatch] | None]:
        """Micro-batches of each rank; a rank just has further micro-batches, so the number of ranks changes no result."""
        if not drawn:
            return [None] * self._group.world
        if self._beside:
            drawn = [replace(batch, beside=self._beside(batch.samples)) for batch in drawn]
        micro = [*drawn, *[MicroBatch()] * (self._per_step - len(drawn))]
        return [micro[i : i + self._accumulation] for i in range(0, len(micro), self._accumulation)]

    def _decode(self, prepared: Prepared) -> list[PixelBatch]:
        """This rank's batches, decoded and placed: now, unless that was done ahead."""
        if prepared.decoded is None:
            finished = [self._decoder.finish(part) for part in prepared.started]
            prepared.decoded = [self._place(batch) if batch.captions else batch for batch in finished]
        return prepared.decoded

    def _finish(self, prepared: Prepared) -> Work:
        decoded = self._decode(prepared)
        told = self._group.gather([(batch.keys, batch.bad) for batch in decoded])
        keys, bad = (tuple(key for rank in told for batch in rank for key in batch[i]) for i in (0, 1))
        return Work(tuple(batch for batch in decoded if batch.captions), self._group.rank * self._accumulation, keys, bad)

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

    So nothing is drawn behind the back of a checkpoint, and waiting for the source can be given up. A source that has ended is asked anew by
    each request: what was drawn may have been given back since, because this machine rested or fp16 sought its scale.
    """

    def __init__(self, source: Source, count: int):
        self._source, self._count = source, count
        self._hand: list[Sample] = []
        self._passing = threading.Lock()  # held by whoever puts a sample in hand, or takes the hand away
        self._requests: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._asked = self._ready = self.ended = self._over = False
        """ended: the last request met the source's end. over: it failed, or nobody asks any more."""
        self.came = 0
        """Samples so far."""
        self._thread = threading.Thread(target=self._run, name="source", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            samples = iter(self._source)
            while not self._over:
                for _ in range(self._requests.get()):
                    sample = next(samples, None)
                    if sample is None:
                        samples, self.ended = iter(self._source), True
                        break
                    with self._passing:
                        self._hand.append(sample)
                    self.came += 1
                self._answers.put(None)
        except BaseException as error:
            self._answers.put(error)

    def take(self, seconds: float) -> list[Sample] | None:
        """The samples asked for, fewer when the source ended with them; None when they are not there within `seconds`, or all are taken."""
        if not self._asked:
            if self._over:
                return None
            self.ended, self._asked = False, True
            self._requests.put(self._count)
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
                self.ended = self._over = True
                raise error
            self._ready = True
        return self._ready

    def in_hand(self, seconds: float) -> list[str]:
        """Keys drawn and not yet taken; first lets a request that is under way end, unless the source takes longer than `seconds`."""
        self._answered(seconds)
        return [sample.key for sample in self._hand]

    def drop(self) -> list[str]:
        """The keys in hand, which nobody will take. One that comes a moment later stays in hand, and is trained when training goes on."""
        with self._passing:
            hand, self._hand = self._hand, []
        return [sample.key for sample in hand]

    def close(self) -> None:
        """The thread ends, at once or when the source lets it go."""
        self.ended = self._over = True
        self._requests.put(0)
