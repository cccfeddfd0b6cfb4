"""Facts about losses: a family says by which it is trained, and its options are that one's."""

import functools
from dataclasses import dataclass

from swarm.run.rooms import modules


@dataclass(frozen=True, kw_only=True)
class Loss:
    title: str
    """For people: 'is trained by TITLE'."""
    options: type


@functools.cache
def losses() -> dict[str, Loss]:
    return {name: module.LOSS for name, module in modules("losses").items()}
