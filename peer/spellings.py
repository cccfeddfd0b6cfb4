"""Other trainers' flags: those that say here what another flag says, and those that have no meaning any more, with what to do instead."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swarm.errors import UserError
from swarm.options import build, option


@dataclass(frozen=True, kw_only=True)
class Spellings:
    """Other trainers' switches, each short for another option."""

    use_8bit_adam: bool = option(False, "The same as --optimizer adamw8bit.")
    fp16: bool = option(False, "The same as --mixed_precision fp16.")
    wandb: bool = option(False, "The same as --report_to wandb.")


_MEANT: Mapping[str, Callable[[bool], dict[str, str]]] = {
    "use_8bit_adam": lambda on: {"optimizer": "adamw8bit" if on else "adamw"},
    "fp16": lambda on: {"mixed_precision": "fp16"} if on else {},
    "wandb": lambda on: {"report_to": "wandb"} if on else {},
}

GONE = {
    "allow_tf32": "Use --mixed_precision bf16, which is faster still.",
    "device_prefetch_size": "Batches are prepared ahead by --dataloader_num_workers.",
    "enable_xformers_memory_efficient_attention": "Remove it: torch's own attention is as frugal.",
    "extended_validation": "Use --validation_prompts.",
    "image_log_scheduler": "Remove it: pictures are drawn with DDIM, or with the model's own scheduler where it has no such.",
    "inference": "Use dd-generate.",
    "loader_prefetch_factor": "Batches are prepared ahead by --dataloader_num_workers.",
    "loader_prefetch_size": "Batches are prepared ahead by --dataloader_num_workers.",
    "local_rank": "Remove it: torchrun and mpirun say it in the environment.",
    "measure_start_step": "Remove it: metrics.jsonl has the speed of every ten steps.",
    "no_migration": "Remove it: there is nothing to migrate.",
    "print_loss": "Remove it: losses are in metrics.jsonl and in --report_to.",
    "profile_duration": "Remove it: metrics.jsonl has the speed of every ten steps.",
    "resize": "Remove it: every picture is made to fit.",
    "shuffle": "Remove it: the order of the data follows --seed.",
    "skip_validation": "Remove it: nothing is drawn without --validation_prompts.",
    "use_xformers": "Remove it: torch's own attention is as frugal.",
    "validation_epochs": "Use --validation_steps.",
    "workingdirectory": "Use --cache_dir.",
}
"""A flag of the original, of diffusers' scripts or of their XLA ones that has no meaning here: what to do."""


def refuse_gone(names: Iterable[str]) -> None:
    """Raise UserError at the first flag or key that has no meaning any more."""
    for name in names:
        if name in GONE:
            raise UserError(f"--{name} has no meaning in this trainer.", fix=GONE[name])


def names_in(argv: Iterable[str]) -> list[str]:
    return [word[2:].split("=")[0] for word in argv if word.startswith("--")]


def spelled_out(said: Mapping[str, Any]) -> dict[str, Any]:
    """`said`, with each switch of `Spellings` in it replaced by what it means. Raises UserError when `said` says otherwise as well."""
    fields = {field.name for field in dataclasses.fields(Spellings)}
    build(Spellings, {name: said[name] for name in fields & said.keys()})  # checks their types
    result = {name: value for name, value in said.items() if name not in fields}
    for switch in fields & said.keys():
        for name, meant in _MEANT[switch](said[switch]).items():
            if result.get(name, meant) != meant:
                raise UserError(f"--{switch} means --{name} {meant}, and {name} is {result[name]}.", fix="Remove one of them.")
            result[name] = meant
    return result
