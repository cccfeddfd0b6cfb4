"""The peers' parameters are averaged."""

from swarm.run.strategy import Strategy

STRATEGY = Strategy(since="0.1.0", about="what each one's steps changed is averaged", usual=True)
