"""What fewer bits for the weights that nobody trains (--base_precision) do to a gradient: compared once, on the first batch, and told."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from peer.contracts import Model, Params
from peer.machine.trial_of_speed import relative_difference
from swarm.errors import UserError

log = logging.getLogger(__name__)


class FirstGradient:
    """Tells how far a gradient is from that beside the model's own weights. Parameters and their `.grad` stay as they are."""

    def __init__(self, model: Model, params: Params, precision: str):
        self._model, self._params, self._precision = model, list(params.values()), precision

    def __call__(self, loss: Callable[[], Tensor]) -> bool:
        """loss: computes the same value each time but for the weights. False where its gradient is not finite, which tells nothing."""
        packed = self._gradient(loss)
        if not _finite(packed):  # at each step while fp16 seeks its scale: the model's own weights are all of its files, read anew
            return False
        try:
            with self._model.unpacked():
                own = self._gradient(loss)
        except UserError as error:  # the files have gone, which stops nobody who has read them
            log.warning("base_precision=%s: cannot compare the first batch's gradient: %s", self._precision, error.message)
            return True
        difference = relative_difference(own, packed)
        if not (_finite(own) and difference < float("inf")):
            return False
        log.info(
            "base_precision=%s: the first batch's gradient differs by %.2g of its length from the one with the model's own weights",
            self._precision,
            difference,
        )
        return True

    def _gradient(self, loss: Callable[[], Tensor]) -> list[Tensor]:
        # Not by backward(): that would call what steps a tensor as soon as its gradient is there.
        found = torch.autograd.grad(loss(), self._params, allow_unused=True)
        return [torch.zeros_like(one) if gradient is None else gradient for one, gradient in zip(self._params, found, strict=True)]


def _finite(gradients: list[Tensor]) -> bool:
    return bool(torch.stack([gradient.isfinite().all() for gradient in gradients]).all())
