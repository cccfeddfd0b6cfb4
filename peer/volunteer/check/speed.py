"""How long a step of the run takes here: its model, forward and backward, on noise in place of pictures. No weight is changed by it."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from peer.config import PeerConfig
from peer.contracts import PixelBatch
from peer.machine.counting import let_go
from peer.machine.making_room import useless
from peer.machine.noise_step import noise_batch, noise_losses
from swarm.errors import ExitCode, UserError, of_machine
from swarm.memory_advice import memory_advice
from swarm.run_config import RunConfig

_SAY_EVERY_SECONDS = 10.0
_WARM_UP, _MEASURED = 1, 2


@dataclass(frozen=True)
class Step:
    """seconds: of one, without the first, which also allocates and compiles."""

    seconds: float
    samples: int
    where: str


def measure_step(
    learner: Any,
    run: RunConfig,
    peer: PeerConfig,
    deadline: float,
    say: Callable[[str], None],
    step: Callable[..., None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Step:
    """Raises UserError when memory runs out, or when it is not done within `deadline` seconds; a step that hangs is left behind then."""
    outcome: list[BaseException | list[float]] = []
    if peer.fused_step:
        let_go(learner.params.values())

    def work() -> None:
        try:
            batch = noise_batch(learner, run, peer.train_batch_size)
            outcome.append([_timed(step or _step, learner, peer, batch, clock) for _ in range(_WARM_UP + _MEASURED)])
        except BaseException as error:
            outcome.append(error)

    thread, began = threading.Thread(target=work, name="step", daemon=True), clock()
    thread.start()
    while thread.is_alive() and clock() - began < deadline:
        thread.join(min(_SAY_EVERY_SECONDS, max(deadline - (clock() - began), 0.01)))
        if thread.is_alive():
            say(f"measuring a step: {clock() - began:.0f} s of at most {deadline:.0f} s ...")
    if not outcome:
        raise UserError(
            f"{_WARM_UP + _MEASURED} steps were not done after {deadline:.0f} s.",
            fix="This machine is too slow for this run, or other programs use it; with a GPU, check that torch sees it (--device cuda).",
            code=ExitCode.FAILED,
        )
    if isinstance(outcome[0], BaseException):
        raise _readable(outcome[0], run, peer, learner.precision.device)
    seconds = outcome[0][_WARM_UP:]
    return Step(min(seconds), peer.train_batch_size * peer.gradient_accumulation_steps, _where(learner))


def _timed(step: Callable[..., None], learner: Any, peer: PeerConfig, batch: PixelBatch, clock: Callable[[], float]) -> float:
    began = clock()
    step(learner, peer, batch)
    if learner.precision.device.type == "cuda":
        torch.cuda.synchronize(learner.precision.device)
    return clock() - began


def _step(learner: Any, peer: PeerConfig, batch: PixelBatch) -> None:
    """Forward and backward of all micro-batches of a local step."""
    for _ in range(peer.gradient_accumulation_steps):
        noise_losses(learner, batch).sum().backward()
    for parameter in learner.params.values():
        parameter.grad = None


def _readable(error: BaseException, run: RunConfig, peer: PeerConfig, device: torch.device) -> UserError:
    if isinstance(error, UserError):
        return error
    short = of_machine(error)
    if short is None:
        return UserError(f"A step failed: {error!r}.", fix="Run again with --debug, and report it.", code=ExitCode.FAILED)
    if short.code != ExitCode.MEMORY:
        return short
    pictures = f"{peer.train_batch_size} picture{'s' if peer.train_batch_size > 1 else ''}"
    fix = memory_advice(useless=useless(run, peer, device))
    return UserError(f"A step of {pictures} does not fit into the memory.", fix=fix, code=ExitCode.MEMORY)


def _where(learner: Any) -> str:
    device = learner.precision.device
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        return f"{torch.cuda.get_device_name(device)}, mixed_precision {learner.precision.reason}; {peak:.1f} GiB of its memory at most"
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' * (threads != 1)}, mixed_precision {learner.precision.reason}"
