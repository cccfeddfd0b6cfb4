"""No swarm: this peer alone."""

from swarm.run.strategy import Strategy

STRATEGY = Strategy(since="0.1.0", about="each trains for itself", swarms=False)
