"""A strategy that accumulates gradients and steps once per round: the engine must serve it as it serves `parameters`."""

import torch
from torch import Tensor

from peer.contracts import Params
from peer.sync.engine.vectors import flatten


class Gradients:
    """Contribution: the mean gradient of its samples. Outer step: plain descent on the anchor, and a count of rounds in one outer tensor."""

    slots, steps_locally, rebases = 1, False, False

    def __init__(self):
        self._sum: dict[str, Tensor] = {}

    def accumulate(self, params: Params) -> None:
        for name, parameter in params.items():
            if parameter.grad is not None:
                self._sum[name] = self._sum.get(name, 0) + parameter.grad
                parameter.grad = None

    def discard(self) -> None:
        self._sum = {}

    def gather(self, params: Params, out: Tensor) -> Tensor:
        sums, self._sum = self._sum, {}
        return flatten({name: sums.get(name, torch.zeros_like(parameter)) for name, parameter in params.items()}, out)

    def contribution(self, position: Tensor, anchor: Tensor, samples: int) -> Tensor:
        return position / samples

    def outer_step(self, vectors: list[Tensor], mean: Tensor) -> list[Tensor]:
        return [vectors[0] - 0.1 * mean, vectors[1] + 1.0]


def gradients(run) -> Gradients:
    return Gradients()
