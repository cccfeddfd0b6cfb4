"""Lengths in global steps, as other trainers count them, in the run's own unit: samples. Converted once, when the run is known, and printed.

A global step is one optimizer step of a fixed world (`train_batch_size` x `gradient_accumulation_steps` x ranks samples), and one round
(`target_batch_size` samples) of a swarm, whose size is not fixed.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from peer.config import PeerConfig
from swarm.errors import UserError
from swarm.options import build
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

_VALIDATION_STEPS = 100
"""Steps between two drawings and measurements of the held-out loss, alone and without --validation_steps."""
_HELD_OUT_SHARE = 0.01
"""Without --validation_steps, measuring the held-out loss takes this share of each peer's time at most."""
_CHECKPOINT_SAMPLES = 10_000
"""Samples between two checkpoints, alone and without --checkpointing_steps."""
_CHECKPOINT_SHARE = 0.01
"""In a swarm and without --checkpointing_steps, checkpoints take this share of the time at most. The swarm has the model; they save the optimizer's
moments. Stable Diffusion 1.5 writes 5 GB: after every round of some minutes that is 1 TB a day, and on a hard disk a tenth of the time."""
SAID_TWICE = {"max_train_steps": "total_samples", "lr_warmup_steps": "lr_warmup_samples"}
"""An option in steps: the run's option that says the same in samples."""


def local_step_samples(peer: PeerConfig, world: int) -> int:
    """Samples of one step of all ranks; world: ranks of this launch."""
    return peer.train_batch_size * peer.gradient_accumulation_steps * world


def step_samples(peer: PeerConfig, target_batch_size: int, world: int = 1) -> int:
    """Samples of one global step."""
    return target_batch_size if peer.swarming else local_step_samples(peer, world)


def check_step(peer: PeerConfig, run: RunConfig, world: int) -> None:
    """Raise UserError for a local step that is more than a round."""
    step, target = local_step_samples(peer, world), run.target_batch_size
    if peer.swarming and step > target:
        raise UserError(
            f"One step of this peer takes {step} samples, more than a round of the whole swarm ({target}).",
            fix="Lower --train_batch_size or --gradient_accumulation_steps.",
        )


@dataclass(frozen=True)
class Every:
    """After how many global steps this peer does what it does now and then; 0: never."""

    validation: int
    held_out: int
    held_out_share: float
    """Of the time that the held-out loss may take at most; 0: as much as it takes."""
    checkpoint: int
    checkpoint_share: float
    """Of the time that checkpoints may take at most; 0: as much as they take."""

    @classmethod
    def of(cls, peer: PeerConfig, run: RunConfig, world: int) -> "Every":
        every = peer.validation_steps or (1 if peer.swarming else _steps_to_look(peer, run, world))
        drawn, held_out = every if peer.validation_prompts else 0, every if run.validation_split else 0
        seen = drawn, held_out, _HELD_OUT_SHARE if held_out and not peer.validation_steps else 0
        if peer.checkpointing_steps:
            return cls(*seen, peer.checkpointing_steps, 0)
        if peer.swarming:
            return cls(*seen, 1, _CHECKPOINT_SHARE)
        return cls(*seen, max(1, _CHECKPOINT_SAMPLES // local_step_samples(peer, world)), 0)


def _steps_to_look(peer: PeerConfig, run: RunConfig, world: int) -> int:
    """Between two drawings alone, unasked: a run of fewer steps is looked at once, at its end."""
    steps = math.ceil(run.total_samples / local_step_samples(peer, world))
    return min(steps, _VALIDATION_STEPS) or _VALIDATION_STEPS


def of_epochs(run: RunConfig, peer: PeerConfig, samples: int) -> RunConfig:
    """A run alone that ends with its --num_train_epochs over its data of this many samples; 0: unknown."""
    total = samples * peer.num_train_epochs
    share = peer.lr_warmup_steps if peer.lr_warmup_steps < 1 else 0
    return replace(run, total_samples=total, **({"lr_warmup_samples": warm_up(share, total)} if share else {}))


def of_joiner(given: Mapping[str, Any], peer: PeerConfig, run: RunConfig) -> dict[str, Any]:
    """What this peer says of a run that there is, in that run's units, so that it can be compared."""
    return in_samples(given, peer, run.target_batch_size, run.total_samples)


def of_founder(given: Mapping[str, Any], peer: PeerConfig, world: int = 1) -> dict[str, Any]:
    """What this peer says of a run that begins with it, in samples; alone, a round is one optimizer step. Says in the log what was converted."""
    step = step_samples(peer, given.get("target_batch_size", RunConfig.target_batch_size), world)
    said = {**given, "target_batch_size": given.get("target_batch_size", step)}
    if peer.scale_lr:
        said["learning_rate"] = build(RunConfig, given).learning_rate  # also where it is left to its default
    converted = in_samples(said, peer, step)
    changed = {name: value for name, value in converted.items() if said.get(name) != value}
    if changed:
        log.info("one step is %d samples: %s", step, " ".join(f"{name}={value:g}" for name, value in changed.items()))
    return converted


def in_samples(said: Mapping[str, Any], peer: PeerConfig, step: int, total_samples: int = 0) -> dict[str, Any]:
    """`said`, of a run whose global step has `step` samples, with this peer's lengths in steps and its scaled learning rate in it.

    total_samples: the run's, where `said` is silent on it. Alone, a warm-up's share may wait until the data's size is known.
    """
    converted = dict(said)
    if peer.max_train_steps:
        converted["total_samples"] = peer.max_train_steps * step
    total = converted.get("total_samples") or total_samples
    if peer.lr_warmup_steps >= 1:
        converted["lr_warmup_samples"] = round(peer.lr_warmup_steps) * step
    elif peer.lr_warmup_steps and (total or peer.swarming):
        converted["lr_warmup_samples"] = warm_up(peer.lr_warmup_steps, total)
    if peer.scale_lr and said.get("learning_rate"):
        converted["learning_rate"] = said["learning_rate"] * step
    return converted


def warm_up(share: float, total_samples: int) -> int:
    """Samples of a warm-up that takes this share of the run. Raises UserError where nobody knows the run's end."""
    if not total_samples:
        raise UserError(
            f"--lr_warmup_steps {share} is a share of the run's length, and this run has no end.",
            fix="Give whole steps, or --max_train_steps as well.",
        )
    return round(share * total_samples)


def refuse_both(said: Mapping[str, Any]) -> None:
    """Raise UserError when the same length is given in steps and in samples."""
    for steps, samples in SAID_TWICE.items():
        if said.get(steps) and said.get(samples):
            raise UserError(f"--{steps} and --{samples} set the same thing in two units.", fix="Give one of them.")
