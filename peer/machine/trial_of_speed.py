"""A faster way to compute is tried on the first real batch, and kept only if its gradients are those that PyTorch makes without it.

The loss would not tell: on a CPU, inductor of PyTorch 2.13 under bf16 autocast has the right loss, and gradients that are off by more than half
of their norm. Not covered: what goes wrong later, or in batches of another shape.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from peer.contracts import Params
from peer.machine.device import Precision, RankGroup
from swarm.errors import UserError

log = logging.getLogger(__name__)

_ALLOWED = {None: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
"""Of the relative difference, by autocast's format. Right ones were off by 2.5e-6 in float32 and up to 0.015 in bf16, wrong ones by 0.57 and 0.66."""


class Way(Protocol):
    """Another way to compute the same; not taken until it is switched on."""

    name: str

    def on(self) -> None: ...

    def off(self) -> None:
        """As if it had never been. Raises UserError where there is no way back."""
        ...


class Trial:
    """Decides once, and alike on all ranks, whether `way` stays on. Parameters, gradients, optimizer and random numbers stay as they are."""

    def __init__(self, way: Way, params: Params, precision: Precision, group: RankGroup):
        self._way, self._params, self._group = way, list(params.values()), group
        self._device, self._allowed = precision.device, _ALLOWED[precision.dtype]

    def __call__(self, backward: Callable[[], object] | None) -> bool:
        """Try it; False where no rank could tell, so that it is to be called again at the next step. All ranks call it together.

        backward: computes this rank's first micro-batch and adds its gradients to the parameters; None when it has none.
        """
        reason, difference = self._compare(backward) if backward else ("", None)
        found = [one for one in self._group.gather((reason, difference)) if one[1] is not None]
        if not found:
            self._way.off()
            return False
        reason, difference = max(found, key=lambda one: one[1])
        if difference <= self._allowed:
            self._way.on()
            log.info("%s is used: its gradients of the first batch are right (relative difference %.1e)", self._way.name, difference)
            return True
        why = (
            reason
            or f"its gradients of the first batch are wrong (relative difference {difference:.2g}, at most {self._allowed:g} is allowed)"
        )
        log.warning("%s is not used: %s", self._way.name, why)
        self._way.off()
        return True

    def _compare(self, backward: Callable[[], object]) -> tuple[str, float | None]:
        """(what failed, relative difference of the gradients); None where those without are not finite, and inf where it fails."""
        before = [parameter.grad for parameter in self._params]
        cuda = self._device.type == "cuda"
        with torch.random.fork_rng([self._device] if cuda else []):
            try:
                # On the host: beside the second gradients a GPU may have no room for the first ones.
                right = [gradient.cpu() if cuda else gradient for gradient in self._gradients(backward)]
                if not all(bool(gradient.isfinite().all()) for gradient in right):
                    return "", None
                try:
                    self._way.on()
                    return "", relative_difference(right, self._gradients(backward))
                except UserError:
                    raise
                except Exception as error:  # a compiler raises anything: its own errors, RuntimeError, what the system's compiler said
                    log.debug("%s", self._way.name, exc_info=True)
                    words = (str(error).strip().splitlines() or [""])[0][:200]
                    return f"it fails ({type(error).__name__}: {words})", math.inf
            finally:
                for parameter, gradient in zip(self._params, before, strict=True):
                    parameter.grad = gradient

    def _gradients(self, backward: Callable[[], object]) -> list[Tensor]:
        for parameter in self._params:
            parameter.grad = None
        backward()
        return [torch.zeros_like(one) if one.grad is None else one.grad for one in self._params]


def relative_difference(right: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of `right`, both of all tensors together; inf when `other` is not finite."""
    difference = norm = 0.0
    for one, two in zip(right, other, strict=True):
        one = one.to(two.device)
        difference += float((two.float() - one.float()).square().sum(dtype=torch.float64))
        norm += float(one.float().square().sum(dtype=torch.float64))
    if not math.isfinite(difference):
        return math.inf
    return math.sqrt(difference / norm) if norm else (math.inf if difference else 0.0)
