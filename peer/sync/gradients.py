"""`--sync gradients`: one AdamW step per round on the mean gradient of all its samples, as one machine with the whole batch would.

Equals torch.optim.AdamW after torch.nn.utils.clip_grad_norm_ to the rounding of float32. Exact, and therefore slow: each local step
only adds to the gradient, so a round of many samples learns no more than a large batch does.
"""

import math
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import torch
from torch import Tensor

from peer.contracts import Sync, SyncContext
from peer.loop.schedule import build_schedule
from peer.sync.engine.outer import RoundInfo
from swarm.run_config import RunConfig


class Gradients:
    """Two slots: AdamW's moments. The number of the round is the number of its step; its rate follows the committed samples."""

    slots, steps_locally = 2, False

    def __init__(self, run: RunConfig, learning_rate: Callable[[int], float]):
        self._run, self._learning_rate = run, learning_rate

    def outer_step(self, vectors: list[Tensor], mean: Tensor, info: RoundInfo) -> list[Tensor]:
        run, (anchor, first, second) = self._run, vectors
        rate = agreed(self._learning_rate(info.samples))
        gradient = mean * clip_coefficient(info.norm, run.clip_norm)
        first = (first * run.adam_beta1).add_(gradient * (1 - run.adam_beta1))
        second = (second * run.adam_beta2).add_((gradient * gradient).mul_(1 - run.adam_beta2))
        scale = math.sqrt(bias_correction(run.adam_beta2, info.number))
        step = first / _sqrt(second).div_(scale).add_(run.adam_epsilon)
        step.mul_(rate / bias_correction(run.adam_beta1, info.number))
        return [(anchor * (1 - rate * run.adam_weight_decay)).sub_(step), first, second]


def agreed(rate: float) -> float:
    """A schedule's rate to nine digits: two C libraries' cosines may differ in the last bit, and then the peers' states would."""
    return float(f"{rate:.8e}")


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What torch.nn.utils.clip_grad_norm_ multiplies gradients of this norm with; max_norm 0: never clip."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0


def bias_correction(beta: float, step: int) -> float:
    """1 - beta ** step; in decimals, since a C library's pow may differ from another one's in the last bit."""
    return float(1 - Decimal(beta) ** step)


def _sqrt(vector: Tensor) -> Tensor:
    # torch.sqrt may call Intel's vector library, which promises less than a correctly rounded root; numpy's is the processor's own.
    return torch.from_numpy(np.sqrt(vector.numpy()))


def strategy(run: RunConfig) -> Gradients:
    return Gradients(run, build_schedule(run))


def build(context: SyncContext) -> Sync:
    from peer.sync.engine.trainer.swarm_sync import SwarmSync

    return SwarmSync(context, f"{__name__}:strategy")
