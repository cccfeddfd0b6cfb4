"""Tensors without numbers: a model's own code runs on them, and holds no memory.

PyTorch has two kinds of its own. Those of the device `meta` do not say that they are on a CPU, so autocast passes over them. Its fake
ones ask Python for their device three times in an operation, and come with its compiler, which takes 2.7 s of a core to load. A hollow
tensor says that it is on the CPU, and has one of `meta` within: four steps of a tiny FLUX of up to nine blocks were counted in 9.0 CPU
seconds with fake ones, and in 4.7 with these.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_aten = torch.ops.aten
_CPU, _META = torch.device("cpu"), torch.device("meta")
_BY_NUMBERS = (_aten._local_scalar_dense.default, _aten.index.Tensor)


class Hollow(Tensor):
    """bare: its shape, strides and format, on the device `meta`. What has the same memory has bare tensors of the same storage."""

    bare: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, bare: Tensor) -> "Hollow":
        made = Tensor._make_wrapper_subclass(
            cls, bare.shape, strides=bare.stride(), storage_offset=bare.storage_offset(), dtype=bare.dtype, device=_CPU
        )
        made.bare = bare
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"Hollow(shape={tuple(self.shape)}, dtype={self.dtype})"


def hollow(tensor: Tensor) -> Hollow:
    """One of the shape and format of `tensor`; of a parameter, a parameter."""
    made = Hollow(torch.empty(tensor.shape, dtype=tensor.dtype, device=_META))
    made._is_param = isinstance(tensor, nn.Parameter)  # by which PyTorch knows parameters of other classes than its own
    return made.requires_grad_(tensor.requires_grad)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.bare if isinstance(tensor, Hollow) else tensor).untyped_storage()


def computed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What an operation makes of these arguments; new tensors are hollow. Of tensors with numbers alone it makes such: a model's constants.

    Raises TypeError where it asks for a number that is not there; of a mask it is told that it hides nothing.
    """
    if func in _BY_NUMBERS and (answer := _hiding_nothing(func, args)) is not None:
        return answer
    given: dict[int, Tensor] = {}
    bare_args, bare_kwargs = _bare(args, given), {name: _bare(value, given) for name, value in kwargs.items()}
    if not given:
        bare_kwargs["device"] = _META
    elif not any(isinstance(each, Hollow) or each.is_meta for each in given.values()):
        return func(*args, **kwargs)
    return _told(func(*bare_args, **bare_kwargs), given)


# No functions within `computed`: one that calls itself would keep the tensors of its operation until the collector comes by, and they
# would be counted.
def _bare(each: Any, given: dict[int, Tensor]) -> Any:
    """An argument as the device `meta` takes it; given: notes the tensor that it was, by the bare one's identity."""
    if isinstance(each, Tensor):
        own = each.bare if isinstance(each, Hollow) else each.to(_META)
        given[id(own)] = each
        return own
    if isinstance(each, list | tuple):
        return [_bare(one, given) for one in each]
    return _META if isinstance(each, torch.device) else None if isinstance(each, torch.Generator) else each


def _told(made: Any, given: Mapping[int, Tensor]) -> Any:
    """What was made on the device `meta` as it is told; what was changed in place is the tensor that was given."""
    if isinstance(made, list | tuple):
        return [_told(one, given) for one in made]
    if not isinstance(made, Tensor):
        return made
    if id(made) not in given:
        return Hollow(made)
    assert made.shape == given[id(made)].shape, "a hollow tensor keeps its shape"
    return given[id(made)]


def _hiding_nothing(func: Any, args: Any) -> Any:
    """What a question about a mask's numbers is answered with where there are none; None for another operation."""
    tensor = args[0]
    if func is _aten._local_scalar_dense.default:
        if not isinstance(tensor, Hollow):
            return None
        if tensor.dtype is not torch.bool:
            raise TypeError(f"a number of {tensor} is asked for, and it has none")
        return True
    mask, *others = args[1]
    if others or mask is None or mask.dtype is not torch.bool or not (isinstance(mask, Hollow) or isinstance(tensor, Hollow)):
        return None
    return tensor.reshape(-1, *tensor.shape[mask.ndim :]).clone()
