"""The peers' parameters are averaged."""

from swarm.run.strategy import Strategy

STRATEGY = Strategy(since="0.1.0", usual=True)
