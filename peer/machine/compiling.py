"""`--compile`: the denoiser by way of torch.compile, for the batches that its trial has seen the like of."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

BACKEND = "inductor"


class Compiled:
    """A module whose forward is compiled while switched on. The module stays the same object, with the same parameters under the same names.

    Compiled is training, in the shape of the first batch after `on`; other shapes and whatever needs no gradient (validation) are computed as ever:
    each would be compiled again, which takes minutes, and nobody would have looked at its gradients.
    """

    name = "torch.compile"

    def __init__(self, module: nn.Module, backend: Any = None):
        self._module, self._backend, self._shape = module, backend or BACKEND, None

    def on(self) -> None:
        if "forward" in vars(self._module):
            return
        eager = self._module.forward
        compiled = torch.compile(eager, backend=self._backend, dynamic=False)

        @functools.wraps(eager)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (torch.is_grad_enabled() and self._module.training):
                return eager(*args, **kwargs)
            shape = _shape((args, kwargs))
            self._shape = self._shape or shape
            return (compiled if shape == self._shape else eager)(*args, **kwargs)

        self._module.forward = forward

    def off(self) -> None:
        vars(self._module).pop("forward", None)
        self._shape = None


def _shape(value: Any) -> Any:
    """Of tensors shape and dtype, of containers that of what is in them, of anything else the value itself."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _shape(inner)) for key, inner in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_shape, value))
    return value
