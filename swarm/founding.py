"""What every peer would refuse of a run, found out by whoever founds it: before it is signed, and without torch."""

from dataclasses import replace
from pathlib import Path

from swarm.errors import UserError
from swarm.run.family import family_named, refused
from swarm.run.loss import losses
from swarm.run.losses.denoising import check_noise
from swarm.run_config import RunConfig


def with_noise(run: RunConfig, source: Path) -> RunConfig:
    """The run with what its loss reads of the base model at `source`, a folder or a file, where that was left open. Raises UserError."""
    family = family_named(run.family)
    return replace(run, **losses()[family.loss].found_in(run, source)) if family else run


def check_founding(run: RunConfig) -> None:
    """Raise UserError for what no peer of `run` could train; run: with its family, where that is known."""
    check_noise(run.rescale_betas_zero_snr, run.prediction_type)
    check_schedule(run)
    check_sides(run.resolution, run.num_buckets, run.bucket_side_min, run.bucket_side_max)
    check_family(run.family, run)


def check_family(family: str, run: RunConfig) -> None:
    """Raise UserError for an option of `run` that the family has no use for: whoever gave it meant another model."""
    facts = family_named(family)
    for name, reason in refused(facts).items() if facts else ():
        if run.was_given(name):
            raise UserError(f"{name} is {getattr(run, name)}, but {family} {reason}.", fix=f"Remove --{name}.")


def check_schedule(run: RunConfig) -> None:
    """Raise UserError for a learning rate that falls towards an end which the run does not have."""
    if not run.total_samples and not run.lr_scheduler.startswith("constant"):
        raise UserError(
            f"lr_scheduler '{run.lr_scheduler}' must know where the run ends.", fix="Give --max_train_steps or --total_samples."
        )


def check_sides(resolution: int, num_buckets: int, side_min: int, side_max: int) -> tuple[int, int]:
    """The shortest and longest side of a bucket; 0 stands for half and one and a half of the resolution. Raises UserError where no square is left."""
    side_min, side_max = side_min or resolution // 2, side_max or resolution * 3 // 2
    if num_buckets > 1 and not side_min <= resolution <= side_max:
        raise UserError(
            f"bucket_side_min is {side_min} and bucket_side_max {side_max}, but resolution {resolution} must lie between them.",
            fix="Leave them out: then they are half and one and a half of the resolution.",
        )
    return side_min, side_max
