"""`--train_batch_size auto`: the largest micro-batch whose step fits on this machine's device. Real steps on noise find it.

A step that fits once may still not fit later: what is left free here is for validation pictures, fragments and other programs.
"""

import gc
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from peer.config import PeerConfig
from peer.loop.clipping import Clip
from peer.loop.ema import Ema
from peer.loop.fused import FusedStep
from peer.loop.rounding import keep_in_bf16
from peer.machine.needs import CAPTION
from peer.machine.noise_step import noise_batch, noise_losses
from swarm.errors import ExitCode, of_machine
from swarm.run.strategy import strategies
from swarm.run_config import RunConfig

MOST = 64
"""A GPU that has room for more computes no faster with it."""
_LONGEST_SECONDS = 60.0
"""Of a step that is tried: a CPU gains nothing by a larger one."""
CARD_SHARE, HOST_SHARE = 0.95, 0.8
"""Of a GPU's memory, all programs together; and of what was free of the host's, which a desktop wants, too."""


class CardMemory:
    """A GPU's: a step that does not fit is answered by an error, so each may be tried."""

    def __init__(self, device: torch.device, info: Callable[[torch.device], tuple[int, int]] = torch.cuda.mem_get_info):
        self._device, self._info = device, info

    def allows(self, count: int) -> bool:
        """Whether a step of `count` samples may be tried."""
        gc.collect()
        torch.cuda.empty_cache()
        return True

    def holds(self, count: int) -> bool:
        """Whether the step of `count` samples, which was just made, left enough free."""
        torch.cuda.synchronize(self._device)
        free, total = self._info(self._device)  # the allocator keeps what the step took at most
        return total - free <= CARD_SHARE * total


class HostMemory:
    """The host's, where a step that does not fit ends other programs: one that would take too much, by those before it, is not tried."""

    def __init__(self, available: float, used: Callable[[], int] = lambda: _memory("VmRSS"), peak: Callable[[], int] = lambda: _memory("VmHWM")):
        """available: bytes that are free now. used, peak: of this process, in bytes, now and at most."""
        self._peak, self._before = peak, used()
        self._most = self._before + HOST_SHARE * available
        self._each = 0.0

    def allows(self, count: int) -> bool:
        return self._before + count * self._each <= self._most

    def holds(self, count: int) -> bool:
        peak = self._peak()
        self._each = max(peak - self._before, 0) / count  # gradients and the optimizer's state with it: rather too much
        return peak <= self._most


def _memory(name: str) -> int:
    """Bytes that this process has in memory (VmRSS), or had at most (VmHWM)."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, 0 where 1 does not: doubled while it does, then halfway between."""
    fit, too_many = 0, most + 1
    while too_many - fit > 1:
        tried = min(max(1, 2 * fit), most) if too_many > most else (fit + too_many) // 2
        if fits(tried):
            fit = tried
        else:
            too_many = tried
    return fit


def try_sizes(
    learner: Any,
    run: RunConfig,
    peer: PeerConfig,
    memory: CardMemory | HostMemory,
    most: int,
    report: Callable[[int], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """The largest micro-batch that fits, 0 where none does; `report` is told each that does. The learner is of no use afterwards."""
    step, seconds = _Step(learner, run, peer), 0.0

    def fits(count: int) -> bool:
        nonlocal seconds
        if count * seconds > _LONGEST_SECONDS or not memory.allows(count):
            return False
        began = clock()
        try:
            step(count)
        except Exception as error:
            if (short := of_machine(error)) is None or short.code != ExitCode.MEMORY:
                raise
            return False
        finally:
            learner.optimizer.zero_grad()
        if not memory.holds(count):
            return False
        seconds = (clock() - began) / count
        report(count)
        return True

    return largest(fits, most)


class _Step:
    """Makes a whole step of a micro-batch of N, with all that such a step has in memory at once."""

    def __init__(self, learner: Any, run: RunConfig, peer: PeerConfig):
        self._learner, self._run, self._peer = learner, run, peer
        params = learner.params
        if peer.weights == "bf16":
            keep_in_bf16(params)
        clip = Clip(run.clip_norm, by_tensor=run.clip_grad == "tensor")
        self._average = Ema(params, peer.ema_decay) if peer.use_ema else None
        self._fused = FusedStep(params, learner.optimizer, clip) if peer.fused_step else None
        self._of_round = [torch.zeros_like(parameter) for parameter in params.values()] if strategies()[run.sync].optimizer else []

    def __call__(self, count: int) -> None:
        with getattr(self._learner.optimizer, "gradient_point", nullcontext)():  # as in the loop: schedule-free AdamW steps nowhere else
            self._step(count)

    def _step(self, count: int) -> None:
        beside = 2 if self._peer.with_prior_preservation else 1
        batch = noise_batch(self._learner, self._run, count * beside, CAPTION)
        for _ in range(min(self._peer.gradient_accumulation_steps, 2)):  # the first one's gradients are there in the second
            losses = noise_losses(self._learner, batch)
            if self._fused:
                self._fused.backward(losses.sum(), count)
            else:
                losses.sum().backward()
        if not self._fused:
            self._learner.optimizer.step()
