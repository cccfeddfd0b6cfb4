"""An outer Nesterov optimizer steps along the mean of what the peers moved (DiLoCo, arXiv:2311.08105)."""


from swarm.options import option, options
from swarm.run.strategy import Strategy


@options
class Options:
    """Of the outer optimizer."""

    outer_learning_rate: float = option(0.7, "Step size of the outer Nesterov optimizer.", founding={"gt": 0}, section="the strategy diloco")
    outer_momentum: float = option(0.9, "Its momentum.", lt=1)


STRATEGY = Strategy(since="0.1.0", about="a step with momentum along the mean of what they changed", mean_alone=False, sections=(Options,))
