"""One optimizer step for all, with the mean of the peers' gradients."""

from swarm.run.strategy import Strategy

STRATEGY = Strategy(since="0.1.0", about="gradients are averaged, and all take one AdamW step", optimizer="adamw")
