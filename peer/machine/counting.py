"""How much of a device's memory training takes, counted without the device: the model's own code runs on tensors that have shapes and no numbers.

Counted is what tensors hold: weights, gradients, the optimizer's state, and what the forward pass keeps for the backward pass. Not counted: what a
kernel takes for itself, the optimizer's own step (up to 0.7 GB with weights in bf16), what the allocator holds beyond what was asked of it, and
CUDA's own context (some 0.5 GB).
"""

import functools
import importlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from peer.contracts import LatentBatch, Model, Params
from peer.machine.swap import spread
from swarm.run.optimizer import LocalOptimizer

_aten = torch.ops.aten
HELD_BYTES = 0.7e9
"""That PyTorch's allocator holds on a GPU beyond the count: kernels' workspaces, and what it cannot give out in one piece. 0.56e9 was measured
(benchmarks/records/log.md, "A first GPU")."""
Shape = Callable[[Tensor | None], Tensor | None]
"""Makes a tensor without numbers, of the same shape and format; of None, None."""


@dataclass(frozen=True)
class Need:
    """Bytes of the device's memory."""

    parts: Mapping[str, int]
    """What is not trained, by the model's part, buffers included."""
    trained: int
    optimizer: int
    """Its state."""
    step: int
    """Gradients and what flows through the layers, at the moment when both together are most."""

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + self.trained + self.optimizer + self.step


def count(
    model: Model,
    params: Params,
    batch: LatentBatch,
    optimizer: LocalOptimizer,
    *,
    dtype: torch.dtype | None = None,
    on_gpu: bool = True,
    micro_batches: int = 1,
    fused: bool = False,
    swapped: int = 0,
) -> Need:
    """What a step of `model`, placed and with its method attached, takes; its weights may be on the meta device.

    swapped: blocks that wait elsewhere (--blocks_to_swap). For all else see `count_held` and `count_step`.
    """
    parts, trained, states = count_held(model, params, optimizer)
    if swapped:
        parts[model.facts.denoiser] -= away(spread(model, swapped), but=ids(params))
    step = count_step(model, batch, dtype=dtype, on_gpu=on_gpu, micro_batches=micro_batches, fused=fused)
    return Need(parts, trained, states, step)


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
        live.knows(*(tensor for part in model.parts.values() for tensor in (*part.parameters(), *part.buffers())))
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
def count_encoding(model: Model, pixels: Tensor, *, dtype: torch.dtype | None = None, on_gpu: bool = True) -> int:
    """The most bytes that flow through the VAE of `model` while it encodes (B, 3, H, W) `pixels`."""
    return flow_through(model, lambda shape: model.encode_pixels(shape(pixels)), dtype=dtype, on_gpu=on_gpu)[0]


@torch.no_grad()
def flow_through(model: Model, ask: Callable[[Shape], Any], *, dtype: torch.dtype | None = None, on_gpu: bool = True) -> tuple[int, Any]:
    """The most bytes that flow while a frozen part answers, and the answer, whose tensors have shapes alone. The model stays as it is.

    ask: is handed what makes a tensor without numbers of one that has some.
    """
    with _without_numbers(model) as shape, Live() as live, _norms_in_float32(on_gpu and dtype is not None):
        live.knows(*(tensor for part in model.parts.values() for tensor in (*part.parameters(), *part.buffers())))
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            answer = ask(shape)
    return live.peak, answer


def away(blocks: Iterable[nn.Module], but: set[int] = frozenset()) -> int:
    """Of these blocks in the order in which they come, the bytes that are never on the device: two after each other are there. `but`: see `bytes_of`."""
    sizes = [sum(bytes_of(block, but).values()) for block in blocks]
    return sum(sizes) - max(one + following for one, following in pairwise(sizes))


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
        if func is _DEVICE:  # two of three calls: asked of the mode below, an answer takes as long as an operation
            return args[0].fake_device
        made = _hiding_nothing(func, args) if func in _BY_NUMBERS else None
        made = _computed(func, args, kwargs or {}) if made is None else made
        for tensor in made if isinstance(made, list | tuple) else (made,):
            if isinstance(tensor, Tensor):
                self._meet(tensor.untyped_storage())
        return made

    def knows(self, *tensors: Tensor) -> None:
        """Views of these are nothing new."""
        self._known.update(tensor.untyped_storage() for tensor in tensors)

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


_CPU = torch.device("cpu")
_DEVICE = torch.ops.prim.device.default
_BY_NUMBERS = (_aten._local_scalar_dense.default, _aten.index.Tensor)


def _hiding_nothing(func: Any, args: Any) -> Any:
    """What a question about a mask's numbers is answered with where there are none; None for another operation."""
    if func is _aten._local_scalar_dense.default:
        return True if args[0].dtype is torch.bool else None
    tensor, (mask, *others) = args[0], args[1]
    if others or mask is None or mask.dtype is not torch.bool:
        return None
    return tensor.reshape(-1, *tensor.shape[mask.ndim :]).clone()



def _computed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What an operation makes of tensors without numbers.

    PyTorch's mode says the same of its own tensors, after questions of all kinds that take as long again: a step of a tiny Chroma was counted in
    2.1 CPU seconds with them, and in 1.0 without.
    """
    fake = _fake()
    tensors = [each for arg in (*args, *kwargs.values()) for each in (arg if isinstance(arg, list | tuple) else (arg,)) if isinstance(each, Tensor)]
    known = all(isinstance(tensor, fake.FakeTensor) and tensor.constant is None for tensor in tensors)
    if not tensors or not known or func.namespace != "aten" or "device" in kwargs:
        return func(*args, **kwargs)
    mode = _shapes()

    def told(made: Any) -> Any:
        return fake.FakeTensor(mode, made, _CPU) if isinstance(made, Tensor) and not isinstance(made, fake.FakeTensor) else made

    try:
        with fake.in_kernel_invocation_manager(mode):
            made = func(*args, **kwargs)
    except NotImplementedError:  # an operation that is made of others
        return func(*args, **kwargs)
    return type(made)(map(told, made)) if isinstance(made, list | tuple) else told(made)


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


@functools.cache
def _fake() -> Any:
    return importlib.import_module("torch._subclasses.fake_tensor")


@functools.cache
def _shapes() -> Any:
    """PyTorch's mode of tensors without numbers. One for all counts: a module may keep what it has computed in one of them, such as places of
    pictures, for the next. Made where something is counted: with it PyTorch loads its compiler, 2.7 s of a core.
    """
    return _fake().FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def _without_numbers(model: Model) -> Iterator[Shape]:
    """Within the block the model's weights, and all tensors, have shapes and no numbers; yields what makes one of any."""
    made: dict[int, Tensor] = {}

    def shape(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype)

    def weight(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:  # tied weights stay tied
            made[id(tensor)] = nn.Parameter(shape(tensor), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape(tensor)
        return made[id(tensor)]

    stores = [store for part in model.parts.values() for module in part.modules() for store in (module._parameters, module._buffers)]
    originals = [(store, name, tensor) for store in stores for name, tensor in store.items() if tensor is not None]
    device = model.device
    try:
        with _shapes():
            for store, name, tensor in originals:
                store[name] = weight(tensor)
            model.device = torch.device("cpu")  # where tensors without numbers say that they are
            yield shape
    finally:
        model.device = device
        for store, name, tensor in originals:
            store[name] = tensor
