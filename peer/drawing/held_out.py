"""The loss of pictures that nobody trains on, of the same noise and timesteps each time: what of the training loss is more than learning by heart."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch

from peer.contracts import Model, PixelBatch, Sample
from peer.drawing.validation import evaluated
from peer.machine.device import Precision, RankGroup
from peer.samples.decoding import Decoder
from peer.samples.encoding import Encoder
from swarm.digest import seed_of
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)
_LEAST_DRAWS = 64
"""Of noise and timesteps together. One draw of a timestep alone moves a loss by its own size."""

_AT_ONCE = 8
"""Pictures that are encoded one after the other: where parts take turns on a device, each comes once for all of them."""
_MOST = 1e9
"""What a peer's record may say (swarm/records.py)."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Measures the run's own loss of the held-out pictures. It changes nothing of the training: neither parameters nor modes nor any random number.

    All chance follows from the run and the pictures, and is drawn on the CPU: equal weights give equal figures at every peer, up to the
    precision that it computes in. Rank 0 alone measures, the others wait.
    """

    model: Model
    group: RankGroup
    precision: Precision
    run: RunConfig
    samples: Callable[[], Sequence[Sample] | None]
    """Rank 0's; None: not here yet."""
    weights: Callable[[], AbstractContextManager]
    """Within it the model has the weights to measure: those that are drawn with and exported."""
    show: Callable[[float], None]
    """Rank 0's, is handed the mean loss."""

    def measure(self, step: int) -> None:
        """All ranks call it, and wait for a few pictures to be encoded, or one to be measured: for more, the group would take a rank for lost."""
        found = self.samples() if self.group.is_main else []
        if found is None:
            log.info("step=%d the held-out pictures have not arrived yet: measuring their loss next time", step)
        samples = found or []
        count = self.group.broadcast_object(len(samples))
        losses: list[float] = []
        with ExitStack() as measuring:
            if self.group.is_main and count:
                measuring.enter_context(self.weights())
                measuring.enter_context(evaluated(self.model, self.precision.device))
            for first in range(0, count, _AT_ONCE):
                some = samples[first : first + _AT_ONCE]
                batches = encoded(some, model=self.model, run=self.run, precision=self.precision) if self.group.is_main else []
                self.group.barrier()
                for number in range(min(_AT_ONCE, count - first)):
                    if self.group.is_main:
                        losses += self._losses(some[number], batches[number], math.ceil(_LEAST_DRAWS / count))
                    self.group.barrier()
        if losses:
            loss = sum(losses) / len(losses)
            log.info("validation_loss=%.6f step=%d pictures=%d", loss, step, count)
            if abs(loss) <= _MOST:  # neither NaN; others would pass over a record with anything else in it
                self.show(loss)
            else:
                log.warning("not reporting a held-out loss of %s", loss)

    def _losses(self, sample: Sample, batch: PixelBatch, draws: int) -> list[float]:
        rng = torch.Generator().manual_seed(seed_of("held out", self.run.seed, sample.key))
        return losses_of(batch, draws, rng, model=self.model, precision=self.precision)


def encoded(samples: Sequence[Sample], *, model: Model, run: RunConfig, precision: Precision) -> list[PixelBatch]:
    """What the frozen parts say of each; an empty batch of what is no picture."""
    decoder = Decoder(run)
    batches = [decoder.finish(decoder.start([sample])) for sample in samples]
    with precision.autocast():
        ahead = iter(_encoder(model, precision).ahead([batch for batch in batches if batch.captions], precision.device, texts=True))
    return [next(ahead) if batch.captions else batch for batch in batches]


def losses_of(batch: PixelBatch, draws: int, rng: torch.Generator, *, model: Model, precision: Precision) -> list[float]:
    """The loss of each of `draws` draws of noise and timestep; none of an empty batch. rng: on the CPU."""
    if not batch.captions:
        return []
    with torch.no_grad(), precision.autocast():
        latents = _encoder(model, precision)(batch, rng)
        return [model.loss(latents, rng).item() for _ in range(draws)]


def _encoder(model: Model, precision: Precision) -> Encoder:
    return Encoder(model, lazy=precision.device)
