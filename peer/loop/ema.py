"""A moving average of the weights by global steps: what is exported and drawn, and never trained, sent or hashed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from peer.contracts import Params

_MOST_STEPS_AT_ONCE = 100


class Ema:
    """diffusers' EMAModel over `params`, in float32 on their device. It begins with the state that the first global step leaves."""

    def __init__(self, params: Params, decay: float):
        from diffusers.training_utils import EMAModel

        self._params, self._average = params, EMAModel(params.values(), decay=decay)
        self._average.to(dtype=torch.float32)
        self._reached = 0

    def follow(self, step: int) -> None:
        """The run has reached this global step. Steps that a peer was away for count once each, as if they had left what it finds now."""
        missed = step - self._reached if self._average.optimization_step else 1
        for _ in range(min(missed, _MOST_STEPS_AT_ONCE)):
            self._average.step(self._params.values())
        self._reached = step

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block `params` are the average; afterwards, to the bit, what they were."""
        if not self._average.optimization_step:
            yield
            return
        self._average.store(self._params.values())
        self._average.copy_to(self._params.values())
        try:
            yield
        finally:
            self._average.restore(self._params.values())

    def state_dict(self) -> dict[str, Any]:
        return {"reached": self._reached, "average": self._average.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The decay stays the one of this start."""
        devices = [shadow.device for shadow in self._average.shadow_params]
        decay = self._average.decay
        self._reached = state["reached"]
        self._average.load_state_dict(dict(state["average"]))
        self._average.decay = decay
        self._average.shadow_params = [shadow.to(device) for shadow, device in zip(self._average.shadow_params, devices, strict=True)]
