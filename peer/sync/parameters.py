"""`--sync parameters`: every peer trains on its own; a round adds the mean of what they learned to the anchor."""

from torch import Tensor

from peer.contracts import Params, Sync, SyncContext
from peer.sync.engine.vectors import flatten
from swarm.run_config import RunConfig


class Parameters:
    """Contribution: parameters minus anchor. Outer step: anchor plus mean. No outer tensors."""

    slots, steps_locally, rebases = 0, True, True

    def accumulate(self, params: Params) -> None:
        pass

    def discard(self) -> None:
        pass

    def gather(self, params: Params, out: Tensor) -> Tensor:
        return flatten(params, out)

    def contribution(self, position: Tensor, anchor: Tensor, samples: int) -> Tensor:
        return position - anchor

    def outer_step(self, vectors: list[Tensor], mean: Tensor) -> list[Tensor]:
        return [vectors[0] + mean]


def strategy(run: RunConfig) -> Parameters:
    return Parameters()


def build(context: SyncContext) -> Sync:
    from peer.sync.engine.swarm_sync import SwarmSync

    return SwarmSync(context, f"{__name__}:strategy")
