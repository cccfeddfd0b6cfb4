"""Facts about local optimizers: one table. Whoever needs one asks here, and decides nothing by a name; peer/loop/optim.py builds them."""

from dataclasses import dataclass

AUTO = "auto"
"""8-bit AdamW on a GPU, AdamW elsewhere: each machine's own choice, so that a run says `auto` for ever."""
_BETAS = ("adam_beta1", "adam_beta2", "adam_epsilon")


@dataclass(frozen=True, kw_only=True)
class LocalOptimizer:
    """Everything about an optimizer that is not a tensor. Its state is the peer's own: the swarm averages parameters and nothing else."""

    since: str
    """The version of this program that first had it."""
    title: str
    """What people call it."""
    state_bytes: tuple[float, float]
    """Of its state for each parameter, of a large matrix and of convolutions of 3 x 3; a weight and its gradient take 4 each besides."""
    reads: tuple[str, ...] = _BETAS
    """The options of its own kind that it reads, weight decay left out: all read that."""
    package: str = ""
    """What it needs besides torch and transformers, as pip is asked for it."""
    of_method: float = 1.0
    """What --learning_rate 0 stands for, as a share of the method's rate."""
    finds_rate: bool = False
    """Whether it finds the rate itself, one for all parameters, and the learning rate is a factor of it, usually 1."""
    averages: bool = False
    """Whether its result is an average of all its steps, in place of a falling learning rate (schedule-free)."""
    by_tensor: bool = True
    """Whether it steps each tensor by itself. If not, bf16 weights cannot be stepped some at a time."""
    matrices: bool = False
    """Whether it is for matrices that map vectors, and steps all else as AdamW."""
    on_xla: bool = False
    """Whether it was tried there."""


OPTIMIZERS = {
    "adamw": LocalOptimizer(since="0.1.0", title="AdamW", state_bytes=(8, 8), on_xla=True),
    "adamw8bit": LocalOptimizer(since="0.1.0", title="8-bit AdamW", state_bytes=(2, 2), package="bitsandbytes>=0.48"),
    "adafactor": LocalOptimizer(since="0.1.0", title="Adafactor", state_bytes=(0, 2.7), reads=(), on_xla=True),
    "lion8bit": LocalOptimizer(
        since="0.1.1",
        title="8-bit Lion",
        state_bytes=(1, 1),
        reads=(),
        package="bitsandbytes>=0.50",  # before, on a CPU, its weight decay was part of the gradient, whose sign is all that Lion sees
        of_method=0.2,  # "3-10x smaller than that for AdamW" (Chen et al. 2023, arXiv:2302.06675, section 5)
    ),
    "ademamix8bit": LocalOptimizer(since="0.1.1", title="8-bit AdEMAMix", state_bytes=(3, 3), package="bitsandbytes>=0.50"),
    "prodigy": LocalOptimizer(
        since="0.1.1", title="Prodigy", state_bytes=(16, 16), package="prodigyopt>=1.1,<2", finds_rate=True, by_tensor=False
    ),
    "adamw_schedulefree": LocalOptimizer(
        since="0.1.1", title="schedule-free AdamW", state_bytes=(8, 8), package="schedulefree>=1.4,<2", averages=True, by_tensor=False
    ),
    "came": LocalOptimizer(since="0.1.1", title="CAME", state_bytes=(4, 9.3), reads=(), package="came-pytorch>=0.1.3,<0.2"),
    "muon": LocalOptimizer(since="0.1.1", title="Muon", state_bytes=(4, 8), matrices=True),
}


def optimizer_named(name: str) -> LocalOptimizer:
    """Of `auto`, what all machines' choices have in common: they are AdamW."""
    return OPTIMIZERS["adamw" if name == AUTO else name]


def default_rate(name: str, of_method: float) -> float:
    """What --learning_rate 0 stands for, where the method's own rate is `of_method`."""
    facts = optimizer_named(name)
    return 1.0 if facts.finds_rate else of_method * facts.of_method


def reading(option: str) -> tuple[str, ...]:
    """The optimizers beside which an option of one kind says something."""
    return AUTO, *(name for name, facts in OPTIMIZERS.items() if option in facts.reads)
