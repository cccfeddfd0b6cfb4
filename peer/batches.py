"""From samples to batches of pixels: decode, crop, mirror, drop captions. What chance decides depends on the sample's key alone.

So a sample looks the same on every rank, in every process, and in a run that was resumed.
"""

import logging
import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
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


class Decoder:
    """Decodes samples here, or in `num_workers` processes that die with this one."""

    def __init__(self, run: RunConfig, num_workers: int = 0):
        self._run, self.num_workers = run, num_workers
        self._pool: ProcessPoolExecutor | None = None
        self.num_bad = 0

    def start(self, samples: Sequence[Sample]) -> list[Future | BadPicture | np.ndarray]:
        """Begin to decode; `finish` waits for the result. Without workers all the work is done here."""
        run = self._run
        decode = partial(try_square, side=run.resolution, center_crop=run.center_crop, random_flip=run.random_flip)
        if not self.num_workers:
            return [decode(sample.image, seed=f"{run.seed}:{sample.key}") for sample in samples]
        if self._pool is None:
            # spawn: a fork of a process that runs torch's threads can hang.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.num_workers, mp_context=context, initializer=start_worker)
        return [self._pool.submit(decode, sample.image, seed=f"{run.seed}:{sample.key}") for sample in samples]

    def finish(self, samples: Sequence[Sample], started: Sequence[Future | BadPicture | np.ndarray]) -> Decoded:
        """The batch of those samples that are pictures; the others are warned of and counted."""
        squares = [item.result() if isinstance(item, Future) else item for item in started]
        good = [(sample, square) for sample, square in zip(samples, squares, strict=True) if not isinstance(square, BadPicture)]
        bad = [(sample, square) for sample, square in zip(samples, squares, strict=True) if isinstance(square, BadPicture)]
        for sample, reason in bad:
            self.num_bad += 1
            log.warning("skipped picture=%s reason=%s skipped_so_far=%d", sample.key, reason, self.num_bad)
        pixels = PixelBatch(to_pixels([square for _, square in good]), self._captions([s for s, _ in good])) if good else None
        return Decoded(pixels, tuple(sample.key for sample, _ in good), tuple(sample.key for sample, _ in bad))

    def _captions(self, samples: Sequence[Sample]) -> list[str]:
        return ["" if dropped(sample.key, self._run) else sample.caption for sample in samples]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def dropped(key: str, run: RunConfig) -> bool:
    """Whether this sample is trained without its caption, which teaches the model to draw unguided."""
    return random.Random(f"caption:{run.seed}:{key}").random() < run.ucg


def to_pixels(squares: Sequence[np.ndarray]) -> torch.Tensor:
    """(B, 3, side, side) float32 in [-1, 1] of B squares (side, side, 3) uint8."""
    stacked = torch.from_numpy(np.stack(squares))
    return stacked.permute(0, 3, 1, 2).contiguous().float().div_(127.5).sub_(1)
