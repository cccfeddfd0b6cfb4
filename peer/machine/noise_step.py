"""A step on noise in place of pictures, to learn what a step takes here before there are any."""

from typing import Any

import torch

from peer.contracts import PixelBatch
from swarm.run_config import RunConfig


def noise_batch(learner: Any, run: RunConfig, count: int, caption: str = "a picture") -> PixelBatch:
    """Noise and captions; encoded already where a window of batches would be (--offload), since a step then waits for no other part's turn."""
    side = run.resolution
    pixels = torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0)) * 2 - 1
    batch = PixelBatch(pixels, [caption] * count, torch.tensor([[side, side, 0, 0, side, side]] * count))
    return learner.ahead([batch])[0] if learner.ahead else batch


def noise_losses(learner: Any, batch: PixelBatch) -> torch.Tensor:
    """(B,)."""
    rng = torch.Generator(learner.precision.device).manual_seed(0)
    with learner.precision.autocast():
        return learner.model.loss(learner.encode(batch, rng), rng)
