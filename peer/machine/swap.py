"""Some of the denoiser's frozen blocks wait in the host's memory or on its disk, and are on the device while they compute: --blocks_to_swap.

A block is there for its forward, for its recomputation and for its backward, and the next one is on its way meanwhile. So two of those that wait are on
the device at a time, beside all that never leaves. What is trained does not travel. A frozen weight does not change: leaving copies nothing.

A block leaves when another is asked for. Backward that is in time: autograd takes first what was computed last, so all of a block has gone backwards
before the block in front of it is asked for. A forward hook would be too early, and a recomputation that stops early never calls it.
"""

import functools
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from peer.config import PeerConfig
from peer.contracts import Model
from peer.machine.waiting import room
from swarm.errors import ExitCode, UserError
from swarm.run.method import method_named
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

_OWN_MEMORY = ("cuda",)
"""Kinds of devices whose memory is not the host's."""
LEAST = 3
"""Of two blocks that wait, both would be on the device."""


def swaps(peer: PeerConfig, run: RunConfig, device: torch.device) -> bool:
    """Whether blocks are swapped on `device`, where --blocks_to_swap asks for it; asked before a model is loaded. Raises UserError where they cannot be."""
    if not peer.blocks_to_swap:
        return False
    if method_named(run.method).whole:
        raise UserError(
            f"--blocks_to_swap moves weights that nobody trains, and --method {run.method} trains all of the denoiser's.",
            fix="Remove it; --fused_step, --weights bf16 and --optimizer adafactor take less memory there.",
        )
    if device.type == "xla":
        raise UserError("--blocks_to_swap was not tried on XLA's devices.", fix="Remove it.")
    swapping = device.type in _OWN_MEMORY
    if not swapping:
        log.warning("blocks_to_swap=0: it makes room on a GPU, and this peer computes on a %s", device.type)
    return swapping


class Swap:
    """Has `count` of the denoiser's blocks on `device` only while they compute, spread among the others. The model is placed, frozen, and on the CPU."""

    def __init__(self, model: Model, count: int, device: torch.device, *, as_they_are: bool = False):
        """as_they_are: blocks wait where their tensors are now, in files; else each in a piece of memory that a GPU reads while it computes.

        Raises UserError where the denoiser has no blocks that can be swapped, or not as many, or where there is no memory for them to wait in.
        """
        modules = spread(model, count)
        self._device, self._stream = device, torch.cuda.Stream(device) if device.type == "cuda" else None
        self._blocks = [_Block(module) for module in modules]
        for block in self._blocks if not as_they_are else ():
            block.gather(pinned=device.type == "cuda")
        self._there: list[_Block] = []
        """On the device or on their way to it: two at most."""
        self._at: int | None = None
        """The block that was asked for last, while it is there."""
        self.tensors = {tensor for block in self._blocks for tensor in block.tensors}
        """All that travels."""
        for number, module in enumerate(modules):
            module.register_forward_pre_hook(functools.partial(self._forward, number))
            module.register_forward_hook(functools.partial(self._answered, number))
        self._keep_places(model.parts[model.facts.denoiser])

    def bring_others(self, model: Model) -> None:
        """All that does not travel to the device."""
        for part in model.parts.values():
            for tensor in (*part.parameters(), *part.buffers()):
                if tensor not in self.tensors:
                    tensor.data = tensor.data.to(self._device)

    def clear(self) -> None:
        """All blocks leave, until they are asked for again."""
        self._leave(self._there)

    def _forward(self, number: int, *_: Any) -> None:
        """A block is called, to go forwards or to be computed anew. What comes after the last one is its own backward, or the next forward."""
        last = number + 1 == len(self._blocks)
        after_last = number - 1 if torch.is_grad_enabled() else 0
        self._ask_for(number, after_last if last else number + 1)

    def _answered(self, number: int, _module: nn.Module, _inputs: Any, answer: Any) -> None:
        """Its backward begins with the gradient of its answer."""
        for tensor in answer if isinstance(answer, tuple) else (answer,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(self._backward, number))

    def _backward(self, number: int, *_: Any) -> None:
        self._ask_for(number, number - 1 if number else 1)

    def _ask_for(self, number: int, following: int) -> None:
        """Afterwards block `number` is there, and `following` on its way."""
        if number == self._at:
            return
        block, next_block = self._blocks[number], self._blocks[following]
        self._leave([other for other in self._there if other not in (block, next_block)])
        if block not in self._there:
            self._send(block)
            self._arrive()
        if next_block not in self._there:
            self._send(next_block)
        self._at = number

    def _leave(self, blocks: Iterable["_Block"]) -> None:
        self._arrive()  # their memory is given to others from here on, and one of them may still be on its way
        self._at = None
        for block in [*blocks]:
            block.leave()
            self._there.remove(block)

    def _send(self, block: "_Block") -> None:
        # Memory of the stream that computes, which is where it is used and given back.
        flat = torch.empty(block.num_bytes, dtype=torch.uint8, device=self._device)
        with self._beside():
            block.come(flat)
        self._there.append(block)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Within it the device copies while it computes; not before it has computed what was asked for so far, which may use the same memory."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _arrive(self) -> None:
        """What the device computes from here on waits for all blocks that are on their way."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    # ------------------------------------------------------------ without gradient checkpointing, autograd keeps weights for the way back

    def _keep_places(self, denoiser: nn.Module) -> None:
        """In a forward of the denoiser, autograd keeps places within blocks, and not the memory in which these are now."""
        forward = denoiser.forward

        @functools.wraps(forward)
        def keeping_places(*args: Any, **options: Any) -> Any:
            with saved_tensors_hooks(self._place, self._found):
                return forward(*args, **options)

        denoiser.forward = keeping_places

    def _place(self, tensor: Tensor) -> Any:
        """(block, dtype, shape, strides, offset) of a view of a swapped weight; other tensors as they are."""
        memory = tensor.untyped_storage().data_ptr()
        for block in self._there:
            if block.flat.untyped_storage().data_ptr() == memory:
                return self._blocks.index(block), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        return tensor

    def _found(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        number, dtype, shape, strides, offset = kept
        self._backward(number)
        return self._blocks[number].flat.view(dtype).as_strided(shape, strides, offset)


class _Block:
    """A block's tensors, which travel into one piece of the device's memory, one after the other."""

    def __init__(self, module: nn.Module):
        self.tensors = [*{tensor: None for tensor in (*module.parameters(), *module.buffers())}]
        self.num_bytes = sum(map(room, self.tensors))
        self.flat: Tensor | None = None
        """(num_bytes,) uint8 on the device; None while it waits."""
        self._waiting = [tensor.data for tensor in self.tensors]

    def gather(self, pinned: bool) -> None:
        """Have them wait in one piece of memory, too."""
        memory = torch.empty(self.num_bytes, dtype=torch.uint8)
        if pinned:
            _pin(memory)
        views = self._views(memory)
        for view, tensor in zip(views, self._waiting, strict=True):
            view.copy_(tensor)
        self._waiting = views
        self.leave()

    def come(self, flat: Tensor) -> None:
        """flat: (num_bytes,) uint8."""
        views = self._views(flat)
        for view, waiting in zip(views, self._waiting, strict=True):
            view.copy_(waiting, non_blocking=True)
        self._are(views, flat)

    def leave(self) -> None:
        self._are(self._waiting, None)

    def _are(self, views: Sequence[Tensor], flat: Tensor | None) -> None:
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.data = view
        self.flat = flat

    def _views(self, flat: Tensor) -> list[Tensor]:
        views, begin = [], 0
        for tensor in self.tensors:
            views.append(flat[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            begin += room(tensor)
        return views


def _pin(memory: Tensor) -> None:
    """Have a GPU read it while it computes. By hand: torch's own pinned memory is rounded up to a power of two, a FLUX block's 0.68 GB to 1.07."""
    cuda = torch.cuda.cudart()
    if code := int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        raise UserError(
            f"CUDA cannot pin {memory.nbytes / 1e9:.1f} GB of this machine's memory for a block that waits (error {code}).",
            fix="End other programs, or lower --blocks_to_swap.",
            code=ExitCode.MEMORY,
        )
    weakref.finalize(memory.untyped_storage(), cuda.cudaHostUnregister, memory.data_ptr())


def spread(model: Model, count: int) -> list[nn.Module]:
    """`count` of the denoiser's blocks in the order of its forward, among which the others lie evenly: they compute while the next one travels.

    Raises UserError where it has no blocks, or not as many, or where so few make no room.
    """
    blocks, title = model.blocks(), model.facts.title
    if not blocks:
        raise UserError(f"--blocks_to_swap is for transformers; the denoiser of {title} is none.", fix="Remove it; --offload makes room, too.")
    if not LEAST <= count <= len(blocks):
        why = "Two of them are on the GPU at a time" if count < LEAST else f"This {title} has {len(blocks)} blocks"
        raise UserError(f"{why}, and blocks_to_swap is {count}.", fix=f"Use {LEAST} to {len(blocks)}, or remove it.")
    return [blocks[number * len(blocks) // count] for number in range(count)]
