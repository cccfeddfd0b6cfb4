"""`--sync parameters`: every peer trains on its own; a round adds the mean of what they learned to the anchor."""

from torch import Tensor

from peer.contracts import Sync, SyncContext
from peer.sync.engine.outer import RoundInfo
from swarm.run_config import RunConfig


class Parameters:
    """Outer step: anchor plus mean."""

    slots, steps_locally = 0, True

    def outer_step(self, vectors: list[Tensor], mean: Tensor, info: RoundInfo) -> list[Tensor]:
        return [vectors[0] + mean]


def strategy(run: RunConfig) -> Parameters:
    return Parameters()


def build(context: SyncContext) -> Sync:
    from peer.sync.engine.trainer.swarm_sync import SwarmSync

    return SwarmSync(context, f"{__name__}:strategy")
