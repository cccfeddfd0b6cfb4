"""All options of a run, each declared by the part that it belongs to."""

from swarm.run.core import Agreement, Distance, Optimizer, Pictures
from swarm.run.family import families
from swarm.run.loss import losses
from swarm.run.method import methods
from swarm.run.strategy import strategies

_OWNERS = [*methods().values(), *families().values(), *strategies().values()]
SECTIONS: tuple[type, ...] = tuple(
    dict.fromkeys(
        [
            *(Agreement, Optimizer, Pictures),
            *(section for owner in _OWNERS for section in owner.sections),
            Distance,
            *(loss.options for loss in losses().values()),
        ]
    )
)
