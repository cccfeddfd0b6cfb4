"""The names that a run may choose its parts by, each with the version of this program that first had it.

The parts themselves are modules of `peer`, which need torch. Whoever founds a run knows their names without it, so that a misspelt one is
found before the run is signed and not by the first peer. Tests compare these tables with the modules and with diffusers.
"""

from swarm.run.family import families
from swarm.run.method import methods
from swarm.run.optimizer import AUTO, OPTIMIZERS
from swarm.run.strategy import strategies

FAMILIES = {name: family.since for name, family in families().items()}
METHODS = {name: method.since for name, method in methods().items()}
SYNCS = {name: strategy.since for name, strategy in strategies().items()}
LOCAL_OPTIMIZERS = {AUTO: "0.1.0", **{name: facts.since for name, facts in OPTIMIZERS.items()}}
LR_SCHEDULERS = {
    "linear": "0.1.0",
    "cosine": "0.1.0",
    "cosine_with_restarts": "0.1.0",
    "polynomial": "0.1.0",
    "constant": "0.1.0",
    "constant_with_warmup": "0.1.0",
}
FALLING = tuple(name for name in LR_SCHEDULERS if not name.startswith("constant"))
"""Schedules that fall towards the run's end."""

SINCE = {"family": FAMILIES, "method": METHODS, "sync": SYNCS, "optimizer": LOCAL_OPTIMIZERS, "lr_scheduler": LR_SCHEDULERS}
"""By option."""
