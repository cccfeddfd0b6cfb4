"""What a strategy must say to the engine: how peers learn between rounds, and what a round's mean does to the state."""

import importlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from peer.contracts import Member
from peer.sync.engine.codec import Wire, check_finite
from peer.sync.engine.state import State, hash_chunks, mean_digest, next_state
from peer.sync.engine.vectors import SharedBuffer
from swarm.run_config import RunConfig


@dataclass(frozen=True)
class RoundInfo:
    """What an outer step may know besides the vectors; the same bits at every peer."""

    number: int
    """Of the state that it makes; the first is 1."""
    samples: int
    """In the state before it."""
    norm: float
    """L2 norm of the whole mean, from the sums that its reducers sent with its parts: nobody adds up the vector again."""


class Strategy(Protocol):
    slots: int
    """Outer tensors besides the anchor, each as large as it: momentum, moments."""
    steps_locally: bool
    """True: the local optimizer moves `params` between rounds, and a contribution is `params - anchor`; it still counts on a newer anchor.

    False: a contribution is the mean gradient of its samples, all taken at the anchor; on a newer one it is dropped.
    """

    def outer_step(self, vectors: list[Tensor], mean: Tensor, info: RoundInfo) -> list[Tensor]:
        """[anchor, *slots] and the mean contribution, weighted by samples -> new ones. May be given any slices, equal for all.

        Only separate elementwise float32 operations that IEEE 754 rounds correctly (+ - * / sqrt), so that every CPU computes the
        same bits: no sums over elements, no fused multiply-add (`add(alpha=)`, `lerp`, `addcmul`).
        """
        ...


def advance(
    parent: State,
    members: Iterable[Member],
    mean: Tensor,
    square_norm: float,
    strategy: Strategy,
    wire: Wire,
    into: SharedBuffer | None = None,
    group: str = "",
) -> State:
    """The state after the round whose encoded mean is `mean`, (num_bytes,) uint8; square_norm: as its reducers worked it out; group: see `Header`.

    Part by part, so that besides the two states no float vector of their size exists; with `into` the parent's own memory, not even two
    states. Raises ValueError when the mean or the new state is not finite.
    """
    info = RoundInfo(parent.header.round + 1, parent.header.samples, math.sqrt(square_norm))
    old = parent.vectors(wire.size)

    def pieces() -> Iterator[list[Tensor]]:
        for part in wire.parts:
            values = strategy.outer_step([part.of(vector) for vector in old], part.decode(part.bytes_of(mean)), info)
            for vector in values:
                check_finite(vector)
            yield values

    return next_state(parent, pieces(), members, mean_digest(square_norm, hash_chunks(mean)), into, group)


def load_strategy(path: str, run: RunConfig) -> Strategy:
    """The strategy of a run from `module:function`; trainer and sidecar each make their own."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)(run)
