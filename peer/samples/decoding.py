"""From samples to batches of pixels: decode, crop, mirror, choose captions. What chance decides depends on the run's seed and the sample's key alone.

So a sample looks the same on every rank, in every process, and in a run that was resumed. A key holds the epoch, so that a picture is told
differently in each.
"""

import logging
import random
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from peer.contracts import PixelBatch, Sample
from peer.samples.caches import TensorCache, Tensors, content_seed, latents_name
from peer.samples.pictures import Frame, Framed, start_worker, try_decode
from swarm.picture_file import BadSample
from swarm.run.method import method_named
from swarm.run_config import RunConfig
from swarm.workers import Workers

log = logging.getLogger(__name__)


class Decoder:
    """Decodes samples here, or in `num_workers` processes that die with this one."""

    def __init__(self, run: RunConfig, num_workers: int = 0, latents: TensorCache | None = None, class_weight: float | None = None):
        """latents: what is in it need not be decoded. class_weight: of the losses of the pictures beside the samples; None: there are none."""
        self._run, self.num_workers, self._latents, self._class_weight = run, num_workers, latents, class_weight
        self._workers = Workers(num_workers, try_decode, start_worker, BadSample("the decoder crashed on it")) if num_workers else None
        self._stacker = ThreadPoolExecutor(1, thread_name_prefix="stacker")
        self.num_bad = 0

    def start(
        self, samples: Sequence[Sample], size: tuple[int, int] | None = None, beside: Sequence[Sample] = ()
    ) -> "Future[PixelBatch] | PixelBatch":
        """Begin to decode; `finish` waits for the result. Without workers all the work is done here.

        size: (width, height) of all pictures; None: the run's square. beside: pictures of the class that accompany the samples.
        """
        everything = [*samples, *beside]
        size = size or (self._run.resolution,) * 2
        jobs = [(sample.image, self._frame(sample, size, own=place < len(samples)), sample.mask) for place, sample in enumerate(everything)]
        names = [latents_name(*job) for job in jobs] if self._latents else []
        kept = [self._latents.get(name) if self._latents else None for name in names] or [None] * len(jobs)
        if self._workers is None or all(kept):
            results = [known or try_decode(*job) for known, job in zip(kept, jobs, strict=True)]
            return self._together(everything, len(samples), results, names)
        futures = [None if known else self._workers.submit(*job) for known, job in zip(kept, jobs, strict=True)]

        def together() -> PixelBatch:
            results = [future.result() if future else known for known, future in zip(kept, futures, strict=True)]
            return self._together(everything, len(samples), results, names)

        return self._stacker.submit(together)  # in a thread: stacking a batch of 4 at 512 px takes 10 ms, for which training would wait

    def _together(
        self, samples: Sequence[Sample], own: int, results: Sequence[Framed | Tensors | BadSample], names: Sequence[str]
    ) -> PixelBatch:
        """The batch of those samples that are pictures.

        own: the number of samples that were drawn; those after them are of the class, have no keys, and weigh in the loss what they are told to.
        names: under which a cache keeps them, empty without one.
        """
        bad = {place: result for place, result in enumerate(results) if isinstance(result, BadSample)}
        good = [place for place in range(len(results)) if place not in bad]
        became = {
            "keys": tuple(samples[place].key for place in good if place < own),
            "bad": tuple(samples[place].key for place in bad if place < own),
            "skipped": tuple((samples[place].key, reason) for place, reason in bad.items()),
        }
        if not good:
            return PixelBatch(None, (), **became)
        decoded = [results[place].pixels for place in good if isinstance(results[place], Framed)]
        found = [results[place] for place in good]
        return PixelBatch(
            to_pixels(decoded) if decoded else None,
            [self._caption(samples[place], place < own) for place in good],
            torch.stack([torch.tensor(each.geometry) if isinstance(each, Framed) else each["geometry"] for each in found]),
            self._weights([samples[place].weight if place < own else self._class_weight for place in good]),
            latents={place: each["latents"] for place, each in enumerate(found) if not isinstance(each, Framed)},
            names=tuple(names[place] for place in good) if names else (),
            masks=tuple(map(_mask, found)) if self._run.masked_loss else (),
            **became,
        )

    def _weights(self, weights: Sequence[float | None]) -> torch.Tensor | None:
        """None where all are 1 in every batch: with pictures of a class a batch may be without one by chance."""
        return None if self._class_weight is None and all(weight == 1 for weight in weights) else torch.tensor(weights)

    def _frame(self, sample: Sample, size: tuple[int, int], own: bool = True) -> Frame:
        """own: whether it is no picture of the class: those are learned as a whole."""
        run, (width, height) = self._run, size
        mirrored = run.random_flip and random.Random(f"flip:{run.seed}:{sample.key}").random() < 0.5
        # A crop that differs from epoch to epoch would be found in no cache.
        seed = content_seed(run.seed, sample.image) if self._latents else f"{run.seed}:{sample.key}"
        return Frame(width, height, run.center_crop, seed, mirrored, run.image_interpolation_mode, run.masked_loss and own)

    def finish(self, started: "Future[PixelBatch] | PixelBatch") -> PixelBatch:
        """The batch, once it is there; samples that are no pictures are warned of and counted."""
        batch = started.result() if isinstance(started, Future) else started
        for key, reason in batch.skipped:
            self.num_bad += 1
            log.warning("skipped picture=%s reason=%s skipped_so_far=%d", key, reason, self.num_bad)
        return batch

    def _caption(self, sample: Sample, own: bool) -> str:
        return choose_caption(sample.key, sample.caption, self._run) if own else str(sample.caption)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        self._stacker.shutdown(wait=True, cancel_futures=True)


def to_pixels(pictures: Sequence[np.ndarray]) -> torch.Tensor:
    """(B, 3, height, width) float32 in [-1, 1] of B pictures (height, width, 3) uint8."""
    stacked = torch.from_numpy(np.stack(pictures))
    return stacked.permute(0, 3, 1, 2).contiguous().float().div_(127.5).sub_(1)


def _mask(found: Framed | Tensors) -> torch.Tensor:
    """(1, height, width) float32 in [0, 1]; of the latents' size where a cache kept it."""
    if not isinstance(found, Framed):
        return found["mask"] if "mask" in found else torch.ones(1, *found["latents"].shape[-2:])
    if found.mask is None:
        return torch.ones(1, *found.pixels.shape[:2])
    return torch.from_numpy(found.mask.astype(np.float32) / 255)[None]


def choose_caption(key: str, caption: str | Sequence[str], run: RunConfig) -> str:
    """The caption to train sample `key` with: one of several, between prefix and suffix, its wildcards drawn, its tags shuffled and dropped.

    A method may say another one instead, between prefix and suffix, too. '' where the caption is dropped, which teaches the model to draw unguided.
    """
    if not isinstance(caption, str):
        caption = _chance("choice", key, run).choice(caption) if caption else ""
    parts = run.caption_prefix, caption, run.caption_suffix
    if run.enable_wildcard:
        drawing = _chance("wildcard", key, run)
        parts = tuple(_drawn(part, drawing) for part in parts)
    before, _, after = parts
    caption = _joined(*parts)
    own = method_named(run.method).caption(caption, run, lambda what: _chance(what, key, run))
    if own is not None:
        caption = own if own == caption else _joined(before, own, after)
    elif _chance("caption", key, run).random() < run.ucg:
        return ""
    return _tagged(key, caption, run) if run.shuffle_tags or run.caption_tag_dropout_rate else caption


def _joined(*parts: str) -> str:
    return " ".join(part.strip() for part in parts if part.strip())


def _drawn(caption: str, rng: random.Random) -> str:
    """kohya's wildcards: {a|b} is a or b; {{ and }} are single braces; a brace without its other half stays."""

    def said(match: re.Match[str]) -> str:
        return match[0][0] if match[1] is None else rng.choice(match[1].split("|"))

    return re.sub(r"\{\{|\}\}|\{([^{}]+)\}", said, caption)


def _tagged(key: str, caption: str, run: RunConfig) -> str:
    """kohya's order: tags are shuffled, then each of them is dropped or not; the first --keep_tokens are left alone."""
    tags = [tag.strip() for tag in caption.split(",") if tag.strip()]
    rest = tags[run.keep_tokens :]
    if run.shuffle_tags:
        _chance("tags", key, run).shuffle(rest)
    dropping = _chance("dropped tags", key, run)
    return ", ".join(tags[: run.keep_tokens] + [tag for tag in rest if dropping.random() >= run.caption_tag_dropout_rate])


def _chance(what: str, key: str, run: RunConfig) -> random.Random:
    """A generator of its own for each decision, so that an option changes no other's."""
    return random.Random(f"{what}:{run.seed}:{key}")
