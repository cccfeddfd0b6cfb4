"""bf16 weights that lose no update: what is smaller than their last bit moves it with the chance that it is worth."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from peer.contracts import Params
from swarm.digest import seed_of

_AT_ONCE = 64 << 20
"""Elements that are float32 at a time while the optimizer steps, 256 MiB of them."""


def round_stochastically(values: Tensor, rng: torch.Generator) -> Tensor:
    """float32 `values` in bf16, up or down with such chances that the mean is right; rng: on their device.

    A bf16 is the upper half of a float32: the lower half, plus an equally distributed number of its length, carries into it.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=rng)
    bits = noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(-(1 << 16))
    return torch.where(values.isfinite(), bits.view(torch.float32), values).bfloat16()


def keep_in_bf16(params: Params) -> None:
    """From now on `params` are bf16, in the memory of half as many bytes; so are their gradients."""
    for parameter in params.values():
        parameter.data = parameter.data.bfloat16()


class RoundingOptimizer:
    """An optimizer of bf16 parameters that computes and keeps its state in float32. The same bits for the same seed and step."""

    def __init__(self, inner: Any, seed: str):
        """inner: steps each tensor by itself."""
        self._inner, self._seed, self._steps = inner, seed, 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    def zero_grad(self) -> None:
        self._inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """Chunk by chunk, so that little is float32 at a time. A step of some of the parameters draws numbers of its own."""
        groups = self.param_groups
        whole = [group["params"] for group in groups]
        rng = torch.Generator(next(parameter for parameters in whole for parameter in parameters).device)
        rng.manual_seed(seed_of(self._seed, self._steps))
        self._steps += 1
        try:
            for group in groups:
                group["params"] = []
            for group, parameters in zip(groups, whole, strict=True):
                for chunk in _chunks(parameters):
                    group["params"] = chunk
                    with _in_float32(chunk, rng):
                        self._inner.step()
                group["params"] = []
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        with _as_float32([parameter for group in self.param_groups for parameter in group["params"]]):  # a state is loaded in their dtype
            self._inner.load_state_dict(dict(state["inner"]))


@contextmanager
def _as_float32(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Within the block parameters say that they are float32, and are empty: copies of all would take 4 bytes for each of the 2 that they have."""
    memory = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = torch.empty(0, dtype=torch.float32, device=parameter.device)
    try:
        yield
    finally:
        for parameter, kept in zip(parameters, memory, strict=True):
            parameter.data = kept


@contextmanager
def _in_float32(parameters: Sequence[Tensor], rng: torch.Generator) -> Iterator[None]:
    """Within the block parameters and gradients are float32; afterwards rounded by chance.

    The parameters' own memory comes back: others look at it.
    """
    memory = [parameter.data for parameter in parameters]
    for parameter, kept in zip(parameters, memory, strict=True):
        gradient, parameter.grad = parameter.grad, None
        parameter.data = kept.float()
        parameter.grad = None if gradient is None else gradient.float()
    try:
        yield
    finally:
        for parameter, kept in zip(parameters, memory, strict=True):
            gradient, parameter.grad = parameter.grad, None
            kept.copy_(round_stochastically(parameter.data, rng))
            parameter.data = kept
            parameter.grad = None if gradient is None else gradient.bfloat16()


def _chunks(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    before = itertools.accumulate((parameter.numel() for parameter in parameters), initial=0)
    pairs = zip(parameters, before, strict=False)
    for _, chunk in itertools.groupby(pairs, key=lambda pair: pair[1] // _AT_ONCE):
        yield [parameter for parameter, _ in chunk]


def moments_for(optimizer: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """`state`, which an optimizer with these or the other --weights saved, as `optimizer` loads it.

    Moments are float32 with both, so nothing is lost. With bf16 the steps are counted beside them, for the seed of the rounding.
    """
    rounds = isinstance(optimizer, RoundingOptimizer)
    if rounds == ("inner" in state):
        return state
    return {"steps": 0, "inner": state} if rounds else state["inner"]


def innermost(optimizer: Any) -> Any:
    """The optimizer that computes: the one within a RoundingOptimizer, or itself."""
    return optimizer._inner if isinstance(optimizer, RoundingOptimizer) else optimizer
