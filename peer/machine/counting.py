"""How much of a device's memory training takes, counted without the device: the model's own code runs on tensors that have shapes and no numbers.

Counted is what tensors hold: weights, gradients, the optimizer's state, and what the forward pass keeps for the backward pass. Not counted: what a
kernel takes for itself, the optimizer's own step (up to 0.7 GB with weights in bf16), what the allocator holds beyond what was asked of it, and
CUDA's own context (some 0.5 GB).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from peer.contracts import LatentBatch, Model, Params
from peer.machine.hollow import computed, hollow, storage_of
from swarm.run.optimizer import LocalOptimizer

HELD_BYTES = 0.7e9
"""That PyTorch's allocator holds on a GPU beyond the count: kernels' workspaces, and what it cannot give out in one piece. 0.56e9 was measured
(benchmarks/records/log.md, "A first GPU")."""
Shape = Callable[[Tensor | None], Tensor | None]
"""Makes a tensor without numbers, of the same shape and format; of None, None."""


def count_held(model: Model, params: Params, optimizer: LocalOptimizer) -> tuple[dict[str, int], int, int]:
    """Bytes that lie there between steps: what is not trained, by the model's part; what is; and the optimizer's state of it."""
    parts = {name: sum(bytes_of(part, but=ids(params)).values()) for name, part in model.parts.items()}
    states = sum(
        parameter.numel() * optimizer.state_bytes[parameter.ndim == 4 and parameter.shape[-1] > 1] for parameter in params.values()
    )
    return parts, sum(parameter.nbytes for parameter in params.values()), int(states)


def count_step(
    model: Model,
    batch: LatentBatch,
    *,
    dtype: torch.dtype | None = None,
    on_gpu: bool = True,
    micro_batches: int = 1,
    fused: bool = False,
    captions: Sequence[str] = (),
) -> int:
    """The most bytes of gradients and of what flows through the layers. `model` is placed, with its method attached; it stays as it is.

    batch: of the shapes that are trained, on any device; dtype: autocast's; on_gpu: with a GPU's rules of what autocast computes in float32;
    micro_batches: of a step, two or more make no difference; fused: each gradient is let go as soon as it is there (--fused_step);
    captions: of the batch, where a text encoder is trained and reads them in each step. A mask in the batch is taken for one that hides nothing.
    """
    with _without_numbers(model) as shape, Live() as live, _norms_in_float32(on_gpu and dtype is not None):
        told = LatentBatch(shape(batch.latents), {name: shape(states) for name, states in batch.text.items()}, shape(batch.geometry))
        live.knows(*lies_there(model))
        live.now = live.peak = 0
        if fused:
            let_go(parameter for part in model.parts.values() for parameter in part.parameters() if parameter.requires_grad)
        for _ in range(min(micro_batches, 2)):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                text = model.encode_text(captions) if captions else told.text
                losses = model.loss(replace(told, text=text), torch.Generator())
            losses.sum().backward()
            del losses, text
    return live.peak


@torch.no_grad()
def flow_through(model: Model, ask: Callable[[Shape], Any], *, dtype: torch.dtype | None = None, on_gpu: bool = True) -> tuple[int, Any]:
    """The most bytes that flow while a frozen part answers, and the answer, whose tensors have shapes alone. The model stays as it is.

    ask: is handed what makes a tensor without numbers of one that has some.
    """
    with _without_numbers(model) as shape, Live() as live, _norms_in_float32(on_gpu and dtype is not None):
        live.knows(*lies_there(model))
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            answer = ask(shape)
    return live.peak, answer


def away(blocks: Iterable[nn.Module], but: set[int] = frozenset()) -> int:
    """Of these blocks in the order in which they come, the bytes that are never on the device: two after each other are there. `but`: see `bytes_of`."""
    sizes = [sum(bytes_of(block, but).values()) for block in blocks]
    return sum(sizes) - max(one + following for one, following in pairwise(sizes))


def lies_there(model: Model) -> Iterator[Tensor]:
    """What no step makes: weights, buffers, and tables of places that some modules keep as plain attributes, as Qwen-Image's does (4 MB)."""
    for part in model.parts.values():
        yield from (*part.parameters(), *part.buffers())
        yield from (value for module in part.modules() for value in vars(module).values() if isinstance(value, Tensor))


def ids(params: Params) -> set[int]:
    """Of what is trained, as `bytes_of` knows tensors."""
    return {id(parameter) for parameter in params.values()}


def let_go(parameters: Iterable[Tensor]) -> None:
    """From now on each gradient is gone as soon as a backward pass has made it: what --fused_step takes of memory, without its step."""
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda its: setattr(its, "grad", None))


def bytes_of(part: nn.Module, but: set[int] = frozenset()) -> dict[int, int]:
    """What the part's parameters and buffers hold, each once, by their identity; `but`: those that are left out."""
    tensors = (*part.parameters(), *part.buffers())
    return {id(tensor): tensor.nbytes for tensor in tensors if id(tensor) not in but}


class Live(TorchDispatchMode):
    """Counts what the tensors hold that operations make within it, while anything refers to them. peak: the most so far, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = computed(func, args, kwargs or {})
        for tensor in made if isinstance(made, list | tuple) else (made,):
            if isinstance(tensor, Tensor):
                self._meet(storage_of(tensor))
        return made

    def knows(self, *tensors: Tensor) -> None:
        """Views of these are nothing new."""
        self._known.update(map(storage_of, tensors))

    def _meet(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size


@contextmanager
def _norms_in_float32(enabled: bool) -> Iterator[None]:
    """Within the block norms are computed as autocast does on a GPU; on a CPU it computes them in its own format."""
    own = {name: getattr(F, name) for name in ("layer_norm", "group_norm", "rms_norm")}

    def in_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, *args, **options: function(x.float(), *args, **options)

    try:
        for name, function in own.items() if enabled else ():
            setattr(F, name, in_float32(function))
        yield
    finally:
        for name, function in own.items():
            setattr(F, name, function)


@contextmanager
def _without_numbers(model: Model) -> Iterator[Shape]:
    """Within the block the model's weights have shapes and no numbers; yields what makes such a tensor of any, where something counts."""
    made: dict[int, Tensor] = {}

    def shape(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype)

    stores = [store for part in model.parts.values() for module in part.modules() for store in (module._parameters, module._buffers)]
    originals = [(store, name, tensor) for store in stores for name, tensor in store.items() if tensor is not None]
    device = model.device
    try:
        for store, name, tensor in originals:
            if id(tensor) not in made:  # tied weights stay tied
                made[id(tensor)] = hollow(tensor)
            store[name] = made[id(tensor)]
        model.device = torch.device("cpu")  # where tensors without numbers say that they are
        yield shape
    finally:
        model.device = device
        for store, name, tensor in originals:
            store[name] = tensor
