"""Other trainers' flags that have no meaning here, with what to do instead."""

from collections.abc import Iterable

from swarm.errors import UserError

GONE = {
    "allow_tf32": "Use --mixed_precision bf16, which is faster still.",
    "enable_xformers_memory_efficient_attention": "Remove it: torch's own attention is as frugal.",
    "extended_validation": "Use --validation_prompts.",
    "image_log_scheduler": "Remove it: pictures are drawn with DDIM, or with the model's own scheduler where it has no such.",
    "inference": "Use dd-generate.",
    "loader_prefetch_factor": "Use --loader_prefetch_size, which counts local steps.",
    "local_rank": "Remove it: torchrun and mpirun say it in the environment.",
    "measure_start_step": "Remove it: metrics.jsonl has the speed of every ten steps.",
    "no_migration": "Remove it: there is nothing to migrate.",
    "resize": "Remove it: every picture is made to fit.",
    "shuffle": "Remove it: the order of the data follows --seed.",
    "skip_validation": "Remove it: nothing is drawn without --validation_prompts.",
    "use_xformers": "Remove it: torch's own attention is as frugal.",
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
