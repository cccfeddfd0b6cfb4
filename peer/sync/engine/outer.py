"""What a strategy must say to the engine: how local work becomes a contribution, and what a round's mean does to the state."""

import importlib
from typing import Protocol

from torch import Tensor

from peer.contracts import Params
from swarm.run_config import RunConfig


class Strategy(Protocol):
    slots: int
    """Outer tensors besides the anchor, each as large as it: momentum, moments."""
    steps_locally: bool
    """Whether the local optimizer moves `params` between rounds; if not, gradients are accumulated instead."""
    rebases: bool
    """Whether a contribution made from an older anchor still counts on a newer one."""

    def accumulate(self, params: Params) -> None:
        """Take over `params`' gradients after a backward pass; called instead of the optimizer when it does not step locally."""
        ...

    def discard(self) -> None:
        """Forget what was accumulated: the samples in it are given back."""
        ...

    def gather(self, params: Params, out: Tensor) -> Tensor:
        """This peer's position as a (size,) float32 vector: the parameters, or the gradients accumulated since the last `gather`."""
        ...

    def contribution(self, position: Tensor, anchor: Tensor, samples: int) -> Tensor:
        """(size,) float32: what `samples` samples of local work have to say; peers average it weighted by samples."""
        ...

    def outer_step(self, vectors: list[Tensor], mean: Tensor) -> list[Tensor]:
        """[anchor, *slots] and the mean contribution -> the new ones.

        Only separate elementwise float32 multiplications and additions: every CPU must compute the same bits.
        """
        ...


def load_strategy(path: str, run: RunConfig) -> Strategy:
    """The strategy of a run from `module:function`; trainer and sidecar each make their own."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)(run)
