"""Fused backward and step: each tensor is stepped as soon as the backward pass has made its gradient, so that one gradient is there at a time.

A step is the same as one of all tensors at once, to the bit in float32, and so is the optimizer's state: a run may go on with the other. It needs
an optimizer that steps each tensor by itself, and nothing that wants all gradients together. On a GPU each tensor waits for its norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peer.config import PeerConfig
from peer.contracts import Params
from peer.loop.clipping import Clip
from peer.loop.optim import kind_of
from peer.machine.device import precision_of
from swarm.errors import UserError
from swarm.run.optimizer import OPTIMIZERS
from swarm.run.strategy import strategies
from swarm.run_config import RunConfig


def check_fused(peer: PeerConfig, run: RunConfig, device: torch.device, world: int) -> None:
    """Raise UserError where --fused_step cannot do what the run wants of a step; asked before a model is loaded. world: ranks of this launch."""
    if not peer.fused_step:
        return
    facts, strategy = OPTIMIZERS[kind_of(run, device)], strategies()[run.sync]
    refused = [
        (strategy.optimizer, f"--sync {run.sync} adds up all gradients of a round", "Remove --fused_step."),
        (not facts.by_tensor, f"{facts.title} steps all tensors at once", "Remove --fused_step, or use another --optimizer."),
        (world > 1, f"the gradients of {world} ranks are added up", "Remove --fused_step, or start one rank."),
        (device.type == "xla", "it was not tried on XLA's devices", "Remove --fused_step."),
        (
            precision_of(peer, run, device, 0).scaled,  # which a model's size does not decide on a GPU
            "the scaled gradients of fp16 are looked at all together",
            "Remove --fused_step, or use --mixed_precision no.",
        ),
        (
            run.clip_grad == "global" and run.clip_norm,
            f"the run clips the gradient of all tensors together (--clip_grad global, --max_grad_norm {run.max_grad_norm:g})",
            "Remove --fused_step; or found a run with --clip_grad tensor, or none.",
        ),
    ]
    for found, reason, fix in refused:
        if found:
            raise UserError(f"--fused_step steps one tensor at a time, but {reason}.", fix=fix)


@dataclass
class Stepped:
    """What became of a step."""

    tensors: int = 0
    """How many were stepped."""
    broken: bool = False
    """Whether a gradient was not finite; no tensor was stepped from there on."""


class FusedStep:
    """Steps `params` with `optimizer` while a backward pass goes on."""

    def __init__(self, params: Params, optimizer: Any, clip: Clip):
        assert clip.by_tensor or not clip.max_norm
        self._params, self._optimizer, self._clip = [*params.values()], optimizer, clip
        self._groups: dict[int, dict[str, Any]] = {}
        self._waiting: dict[int, Tensor] = {}
        self._unread: set[int] = set()
        self._samples, self._stepped = 0, Stepped()
        for parameter in self._params:
            parameter.register_post_accumulate_grad_hook(self._step)

    def backward(self, loss: Tensor, samples: int, unread: Sequence[Tensor] = ()) -> Stepped:
        """Step by the mean of `samples` losses' gradients; loss: their sum, finite; unread: parameters that no loss ever depends on.

        No gradient is left.
        """
        self._waiting = {id(parameter): parameter for parameter in self._params}
        self._unread = {id(parameter) for parameter in unread}
        self._samples, self._stepped = samples, Stepped()
        whole = [(group, group["params"]) for group in self._optimizer.param_groups]  # others, once a state is loaded
        self._groups = {id(parameter): group for group, parameters in whole for parameter in parameters}
        try:
            for group, _ in whole:
                group["params"] = []
            loss.backward()
            for parameter in [*self._waiting.values()]:  # this loss does not depend on them, but their moments move them
                parameter.grad = torch.zeros_like(parameter)
                self._step(parameter)
        finally:
            for group, parameters in whole:
                group["params"] = parameters
        return self._stepped

    def _step(self, parameter: Tensor) -> None:
        del self._waiting[id(parameter)]
        norm = self._clip.norms([parameter.grad]) / self._samples
        self._stepped.broken = self._stepped.broken or not norm.isfinite().item()
        if not self._stepped.broken and id(parameter) not in self._unread:  # some of these get a gradient of zeros, others none
            self._clip.average_([parameter.grad], self._samples, norm)
            group = self._groups[id(parameter)]
            group["params"] = [parameter]
            self._optimizer.step()
            group["params"] = []
            self._stepped.tensors += 1
        parameter.grad = None
