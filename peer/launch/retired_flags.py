"""Other trainers' flags that have no meaning here, with what to do instead."""

from collections.abc import Iterable

from swarm.errors import UserError

GONE = {
    "allow_tf32": "Use --mixed_precision bf16, which is faster still.",
    "enable_xformers_memory_efficient_attention": "Remove it: torch's own attention is as frugal.",
    "extended_validation": "Use --validation_prompts.",
    "image_log_scheduler": "Remove it: pictures are drawn with DDIM, or with the model's own scheduler where it has no such.",
    "inference": "Use --validation_prompts, which draws while it trains; dd-generate draws with a result.",
    "loader_prefetch_factor": "Use --loader_prefetch_size, which counts local steps.",
    "local_rank": "Remove it: torchrun and mpirun say it in the environment.",
    "measure_start_step": "Remove it: metrics.jsonl has the speed of every ten steps, and --profile_duration records from the third step on.",
    "non_ema_revision": "Remove it: training begins with the weights of --model.",
    "no_migration": "Remove it: there is nothing to migrate.",
    "resize": "Remove it: every picture is made to fit.",
    "revision": "Fetch it with `hf download MODEL --revision REVISION --local-dir FOLDER`, and give --model FOLDER.",
    "shuffle": "Remove it: the order of the data follows --seed.",
    "skip_validation": "Remove it: nothing is drawn without --validation_prompts.",
    "tokenizer_name": "Remove it: the tokenizer is the model's.",
    "use_xformers": "Remove it: torch's own attention is as frugal.",
    "variant": "Fetch it with `hf download`, and give --model FOLDER, its files without the variant in their names.",
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
