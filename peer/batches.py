"""From samples to batches of pixels: decode, crop, mirror, drop captions. What chance decides depends on the sample's key alone.

So a sample looks the same on every rank, in every process, and in a run that was resumed.
"""

import logging
import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from peer.contracts import PixelBatch, Sample
from peer.pictures import BadPicture, start_worker, try_square
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """A batch and what became of its samples: keys of those in it, in its order, and of those that could not be decoded."""

    pixels: PixelBatch | None
    """None when no sample is left."""
    keys: tuple[str, ...]
    bad: tuple[str, ...]


@dataclass(frozen=True)
class Squares:
    """A batch of decoded pictures, and of each sample that is none the reason."""

    pixels: torch.Tensor | None
    bad: tuple[BadPicture | None, ...]

    @classmethod
    def of(cls, results: Sequence[np.ndarray | BadPicture]) -> "Squares":
        good = [result for result in results if not isinstance(result, BadPicture)]
        return cls(to_pixels(good) if good else None, tuple(r if isinstance(r, BadPicture) else None for r in results))


class Decoder:
    """Decodes samples here, or in `num_workers` processes that die with this one."""

    def __init__(self, run: RunConfig, num_workers: int = 0):
        self._run, self.num_workers = run, num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._stacker = ThreadPoolExecutor(1, thread_name_prefix="stacker")
        self.num_bad = 0

    def start(self, samples: Sequence[Sample]) -> "Future[Squares] | Squares":
        """Begin to decode; `finish` waits for the result. Without workers all the work is done here."""
        run = self._run
        decode = partial(try_square, side=run.resolution, center_crop=run.center_crop, random_flip=run.random_flip)
        if not self.num_workers:
            return Squares.of([decode(sample.image, seed=f"{run.seed}:{sample.key}") for sample in samples])
        if self._pool is None:
            # spawn: a fork of a process that runs torch's threads can hang.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.num_workers, mp_context=context, initializer=start_worker)
        futures = [self._pool.submit(decode, sample.image, seed=f"{run.seed}:{sample.key}") for sample in samples]
        # In a thread: stacking a batch of 4 at 512 px takes 10 ms, for which training would wait.
        return self._stacker.submit(lambda: Squares.of([future.result() for future in futures]))

    def finish(self, samples: Sequence[Sample], started: "Future[Squares] | Squares") -> Decoded:
        """The batch of those samples that are pictures; the others are warned of and counted."""
        squares = started.result() if isinstance(started, Future) else started
        good = [sample for sample, reason in zip(samples, squares.bad, strict=True) if reason is None]
        bad = [(sample, reason) for sample, reason in zip(samples, squares.bad, strict=True) if reason is not None]
        for sample, reason in bad:
            self.num_bad += 1
            log.warning("skipped picture=%s reason=%s skipped_so_far=%d", sample.key, reason, self.num_bad)
        pixels = PixelBatch(squares.pixels, self._captions(good)) if good else None
        return Decoded(pixels, tuple(sample.key for sample in good), tuple(sample.key for sample, _ in bad))

    def _captions(self, samples: Sequence[Sample]) -> list[str]:
        return ["" if dropped(sample.key, self._run) else sample.caption for sample in samples]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._stacker.shutdown(wait=True, cancel_futures=True)


def dropped(key: str, run: RunConfig) -> bool:
    """Whether this sample is trained without its caption, which teaches the model to draw unguided."""
    return random.Random(f"caption:{run.seed}:{key}").random() < run.ucg


def to_pixels(squares: Sequence[np.ndarray]) -> torch.Tensor:
    """(B, 3, side, side) float32 in [-1, 1] of B squares (side, side, 3) uint8."""
    stacked = torch.from_numpy(np.stack(squares))
    return stacked.permute(0, 3, 1, 2).contiguous().float().div_(127.5).sub_(1)
