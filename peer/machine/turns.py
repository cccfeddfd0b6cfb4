"""Text encoders, VAE and denoiser take turns on a device that has no room for all of them: --offload, and by itself where both caches are on.

With both caches (--cache_latents, --cache_text) each picture and caption brings its part once, so that turns cost little.

A turn begins when a part is called. The frozen weights of all other parts then leave the device; what is trained never does. A frozen weight does
not change, so its copy in RAM (or in the mapped file that it was read from) is kept, and leaving copies nothing.
"""

import dataclasses
import importlib
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from peer.config import PeerConfig
from peer.contracts import Model, Params, parts_of
from peer.machine.swap import Swap
from swarm.errors import UserError

log = logging.getLogger(__name__)

_OWN_MEMORY = ("cuda", "xla")
"""Kinds of devices whose memory is not the host's."""


def in_turns(peer: PeerConfig, device: torch.device) -> bool:
    """Whether a model's parts take turns on `device`: asked for by --offload, or with both caches on."""
    cached = peer.cache_latents and peer.cache_text and not (peer.compile or peer.ipex)  # with which turns were not tried
    return device.type in _OWN_MEMORY and (peer.offload or cached)


def takes_turns(peer: PeerConfig, device: torch.device) -> bool:
    """`in_turns`, asked once at the start. Warns where --offload makes no room; raises UserError where it was not tried."""
    if peer.offload and device.type == "xla":
        raise UserError("--offload was not tried on XLA's devices.", fix="Use --cache_latents --cache_text, with which parts take turns there.")
    if peer.offload and device.type not in _OWN_MEMORY:
        log.warning("offload=no: it makes room on a GPU, and this peer computes on a %s", device.type)
    return in_turns(peer, device)


def to_try(peer: PeerConfig, device: torch.device) -> PeerConfig:
    """The peer for a step that is only tried: it keeps nothing, and its parts take turns or not as they will in training."""
    turned = device.type == "cuda" and in_turns(peer, device)
    quiet = {"cache_latents": False, "cache_text": False, "with_prior_preservation": False, "class_data_dir": "", "class_prompt": ""}
    return dataclasses.replace(peer, **quiet, offload=turned)


class Turns:
    """Has a model's parts on `device` in turns: all text encoders together, the VAE, the denoiser. The model is placed, and waits on the CPU.

    Until something is trained (`keep`) the VAE stays beside the denoiser, as who draws one picture after the other asks both of them for each.
    """

    def __init__(self, model: Model, device: torch.device, swap: Swap | None = None):
        """swap: what moves some of the denoiser's blocks while it has its turn."""
        self._parts, self._device, self._swap = model.parts, device, swap
        self._denoiser, self._texts = model.facts.denoiser, [name for name in model.facts.text_encoders if name in model.parts]
        self._others = [name for name in model.parts if name not in self._texts]
        self._groups = [self._texts, self._others]
        self._trained: set[Tensor] = set()
        self._staying: set[str] = set()
        self._there: list[str] = []
        """The parts whose turn it is; empty before the first turn, or when one did not come."""
        self._waiting: dict[Tensor, Tensor] = {}
        """Where each frozen weight that may leave waits."""
        for name, part in self._parts.items():
            part.register_forward_pre_hook(partial(self._called, name))
            part._hf_hook = _Called(partial(self.begin, name), device)

    def keep(self, params: Params) -> None:
        """`params` are trained, and stay on the device. So does each part that they are in, and all text encoders where one of them is such a part."""
        names = parts_of(params) - {self._denoiser}
        self._staying = names.union(self._texts) if names.intersection(self._texts) else names
        self._groups = [self._texts, *([name] for name in self._others)]
        self._trained, self._there, waiting = {*params.values()}, [], self._waiting
        for tensor in self._trained.union(*(_tensors(self._parts[name]) for name in self._staying)):
            _point(tensor, waiting.get(tensor, tensor.data).to(self._device))
        # After a drawing all parts have a copy on the host: what never leaves again needs none, nor what a method has replaced.
        leaving = {tensor for name in self._parts.keys() - self._staying for tensor in _tensors(self._parts[name])} - self._trained
        self._waiting = {tensor: waiting[tensor] for tensor in leaving & waiting.keys()}

    def begin(self, name: str) -> None:
        """The turn of part `name`: afterwards it is on the device."""
        if name in self._there or name in self._staying:
            return
        if self._device.type == "xla":  # what was asked of the parts that leave holds their weights until it is computed
            importlib.import_module("peer.machine.xla").compute()
        group = next(group for group in self._groups if name in group)
        self._there = []
        for other in self._parts.keys() - group - self._staying:
            self._leave(other)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # pieces of another part's memory are too small for this one's
        for part in group:
            self._come(part)
        self._there = group

    def _called(self, name: str, *_: Any) -> None:
        self.begin(name)

    def _come(self, name: str) -> None:
        for tensor in self._frozen(name):
            _point(tensor, tensor.data.to(self._device))

    def _leave(self, name: str) -> None:
        if self._swap and name == self._denoiser:
            self._swap.clear()
        for tensor in self._frozen(name):
            _point(tensor, self._waiting[tensor])

    def _frozen(self, name: str) -> Iterator[Tensor]:
        """Its weights that nobody trains, nor swaps; where each waits is known from then on."""
        others = self._trained | self._swap.tensors if self._swap else self._trained
        for tensor in _tensors(self._parts[name]):
            if tensor not in others:
                if tensor not in self._waiting:
                    self._waiting[tensor] = tensor.data.cpu()
                yield tensor


class _Called:
    """Told by diffusers when a VAE encodes or decodes, which is no call of it; says to a pipeline where it computes."""

    def __init__(self, begin: Any, device: torch.device):
        self._begin, self.execution_device = begin, device

    def pre_forward(self, module: nn.Module) -> None:
        self._begin()


def _point(tensor: Tensor, data: Tensor) -> None:
    """Have `tensor` hold `data`, on whatever device that is. The tensors of XLA are of another kind, which `.data` does not take from others."""
    if (tensor.device.type == "xla") == (data.device.type == "xla"):
        tensor.data = data
        return
    other = data.detach()
    torch.utils.swap_tensors(tensor, nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other)


def _tensors(part: nn.Module) -> Iterator[Tensor]:
    yield from part.parameters()
    yield from part.buffers()
