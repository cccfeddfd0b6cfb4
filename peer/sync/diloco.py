"""`--sync diloco`: as `parameters`, but what the swarm learned in a round is a gradient for an outer optimizer with Nesterov momentum.

Source: DiLoCo, arXiv:2311.08105. Equals torch.optim.SGD(nesterov=True) on the anchor, whose gradient is the negative mean.
"""

from torch import Tensor

from peer.contracts import Sync, SyncContext
from peer.sync.engine.outer import RoundInfo
from swarm.run_config import RunConfig


class DiLoCo:
    """One slot: the momentum, v' = momentum * v + mean. Outer step: anchor + learning_rate * (mean + momentum * v')."""

    slots, steps_locally = 1, True

    def __init__(self, learning_rate: float, momentum: float):
        self._learning_rate, self._momentum = learning_rate, momentum

    def outer_step(self, vectors: list[Tensor], mean: Tensor, info: RoundInfo) -> list[Tensor]:
        anchor, velocity = vectors
        velocity = (velocity * self._momentum).add_(mean)
        step = (velocity * self._momentum).add_(mean).mul_(self._learning_rate)
        return [step.add_(anchor), velocity]


def strategy(run: RunConfig) -> DiLoCo:
    return DiLoCo(run.outer_learning_rate, run.outer_momentum)


def build(context: SyncContext) -> Sync:
    from peer.sync.engine.trainer.swarm_sync import SwarmSync

    return SwarmSync(context, f"{__name__}:strategy")
