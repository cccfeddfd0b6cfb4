"""From samples to batches of pixels: decode, crop, mirror, choose captions. What chance decides depends on the sample's key alone.

So a sample looks the same on every rank, in every process, and in a run that was resumed.
"""

import logging
import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from peer.contracts import PixelBatch, Sample
from peer.samples.caches import TensorCache, Tensors, content_seed, latents_name
from peer.samples.captions import choose_caption
from peer.samples.pictures import BadPicture, Frame, Framed, start_worker, try_decode
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
class Stacked:
    """A batch of decoded pictures, what a cache knew of the others, and of each sample that is no picture the reason."""

    pixels: torch.Tensor | None
    geometry: torch.Tensor | None
    latents: dict[int, torch.Tensor]
    names: tuple[str, ...]
    bad: tuple[BadPicture | None, ...]
    samples: tuple[Sample, ...] = ()
    """What was decoded: the samples asked for, and after them those of the class that accompany them."""

    @classmethod
    def of(cls, samples: Sequence[Sample], results: Sequence[Framed | Tensors | BadPicture], names: Sequence[str]) -> "Stacked":
        """names: under which a cache keeps them, empty without one."""
        good = [result for result in results if not isinstance(result, BadPicture)]
        decoded = [result.pixels for result in good if isinstance(result, Framed)]
        geometry = [torch.tensor(result.geometry) if isinstance(result, Framed) else result["geometry"] for result in good]
        return cls(
            to_pixels(decoded) if decoded else None,
            torch.stack(geometry) if geometry else None,
            {place: result["latents"] for place, result in enumerate(good) if not isinstance(result, Framed)},
            tuple(name for name, result in zip(names, results, strict=False) if not isinstance(result, BadPicture)),
            tuple(result if isinstance(result, BadPicture) else None for result in results),
            tuple(samples),
        )


class Decoder:
    """Decodes samples here, or in `num_workers` processes that die with this one."""

    def __init__(self, run: RunConfig, num_workers: int = 0, latents: TensorCache | None = None, class_weight: float | None = None):
        """latents: what is in it need not be decoded. class_weight: of the losses of the pictures beside the samples; None: there are none."""
        self._run, self.num_workers, self._latents, self._class_weight = run, num_workers, latents, class_weight
        self._pool: ProcessPoolExecutor | None = None
        self._stacker = ThreadPoolExecutor(1, thread_name_prefix="stacker")
        self.num_bad = 0

    def start(
        self, samples: Sequence[Sample], size: tuple[int, int] | None = None, beside: Sequence[Sample] = ()
    ) -> "Future[Stacked] | Stacked":
        """Begin to decode; `finish` waits for the result. Without workers all the work is done here.

        size: (width, height) of all pictures; None: the run's square. beside: pictures of the class that accompany the samples.
        """
        samples = [*samples, *beside]
        jobs = [(sample.image, self._frame(sample, size or (self._run.resolution,) * 2)) for sample in samples]
        names = [latents_name(*job) for job in jobs] if self._latents else []
        kept = [self._latents.get(name) if self._latents else None for name in names] or [None] * len(jobs)
        if not self.num_workers or all(kept):
            return Stacked.of(samples, [known or try_decode(*job) for known, job in zip(kept, jobs, strict=True)], names)
        if self._pool is None:
            # spawn: a fork of a process that runs torch's threads can hang.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.num_workers, mp_context=context, initializer=start_worker)
        futures = [None if known else self._pool.submit(try_decode, *job) for known, job in zip(kept, jobs, strict=True)]
        # In a thread: stacking a batch of 4 at 512 px takes 10 ms, for which training would wait.
        return self._stacker.submit(
            lambda: Stacked.of(samples, [future.result() if future else known for known, future in zip(kept, futures, strict=True)], names)
        )

    def _frame(self, sample: Sample, size: tuple[int, int]) -> Frame:
        run, (width, height) = self._run, size
        mirrored = run.random_flip and random.Random(f"flip:{run.seed}:{sample.key}").random() < 0.5
        # A crop that differs from epoch to epoch would be found in no cache.
        seed = content_seed(run.seed, sample.image) if self._latents else f"{run.seed}:{sample.key}"
        return Frame(width, height, run.center_crop, seed, mirrored, run.image_interpolation_mode)

    def finish(self, samples: Sequence[Sample], started: "Future[Stacked] | Stacked") -> Decoded:
        """The batch of those samples that are pictures; the others are warned of and counted.

        Pictures of the class come last, are in no list of keys, and weigh in the loss what they are told to.
        """
        stacked = started.result() if isinstance(started, Future) else started
        own = len(samples)
        for sample, reason in zip(stacked.samples, stacked.bad, strict=True):
            if reason is not None:
                self.num_bad += 1
                log.warning("skipped picture=%s reason=%s skipped_so_far=%d", sample.key, reason, self.num_bad)
        good = [place for place, reason in enumerate(stacked.bad) if reason is None]
        bad = tuple(sample.key for sample, reason in zip(samples, stacked.bad, strict=False) if reason is not None)
        keys = tuple(stacked.samples[place].key for place in good if place < own)
        if not good:
            return Decoded(None, keys, bad)
        captions = [self._caption(stacked.samples[place], place < own) for place in good]
        weights = None if self._class_weight is None else torch.tensor([1.0 if place < own else self._class_weight for place in good])
        batch = PixelBatch(stacked.pixels, captions, stacked.geometry, weights, latents=stacked.latents, names=stacked.names)
        return Decoded(batch, keys, bad)

    def _caption(self, sample: Sample, own: bool) -> str:
        return choose_caption(sample.key, sample.caption, self._run) if own else str(sample.caption)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._stacker.shutdown(wait=True, cancel_futures=True)


def to_pixels(pictures: Sequence[np.ndarray]) -> torch.Tensor:
    """(B, 3, height, width) float32 in [-1, 1] of B pictures (height, width, 3) uint8."""
    stacked = torch.from_numpy(np.stack(pictures))
    return stacked.permute(0, 3, 1, 2).contiguous().float().div_(127.5).sub_(1)
