"""Facts about the ways to agree: whoever needs one asks here, and names none."""

import functools
from dataclasses import dataclass

from swarm.run.rooms import modules


@dataclass(frozen=True, kw_only=True)
class Strategy:
    since: str
    """The version of this program that first had it."""
    about: str
    """For people, after its name and a colon."""
    swarms: bool = True
    """Whether there is a swarm at all."""
    usual: bool = False
    optimizer: str = ""
    """The one whose step it takes itself, for all peers at once; '': each peer steps with its own."""
    mean_alone: bool = True
    """Whether a round moves the parameters by the mean of what the members moved them, and by nothing else."""
    sections: tuple[type, ...] = ()
    """The options that it has."""


@functools.cache
def strategies() -> dict[str, Strategy]:
    return {name: module.STRATEGY for name, module in modules("strategies").items()}


def told() -> str:
    """All of them, for people."""
    return "; ".join(f"{name}: {strategy.about}" for name, strategy in strategies().items())


def usual() -> str:
    return next(name for name, strategy in strategies().items() if strategy.usual)


def swarms(sync: str) -> bool:
    """Whether a run with this --sync has a swarm, and not each peer for itself."""
    return sync not in strategies() or strategies()[sync].swarms
