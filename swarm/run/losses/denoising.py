"""DDPM's discrete steps: the noise, the velocity or the picture is predicted."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.options import option, options
from swarm.run.loss import Loss

PREDICTIONS = ("epsilon", "v_prediction", "sample")


@options
class Options:
    """Of denoising."""

    prediction_type: str = option(
        "auto",
        "What the UNet predicts; auto: the founder reads it from the model's scheduler.",
        choices=("auto", *PREDICTIONS),
        found_out=True,
        section="the loss: denoising",
    )
    rescale_betas_zero_snr: bool | None = option(
        None,
        "Noise that leaves nothing of the picture at the last step; auto: as the model's scheduler has it, which the founder reads.",
        found_out=True,
    )
    snr_gamma: float = option(0.0, "Weight the loss by min-SNR with this gamma, 5 is usual; 0: not.")
    noise_offset: float = option(0.0, "Strength of noise that is the same in all of a channel, for very dark and bright pictures; 0: none.")
    multires_noise_iterations: int = option(
        0, "Add coarser and coarser noise this many times, for darker and brighter pictures; 6 to 10 are usual, 0: none.",
        le=100, since="0.1.1", unsaid=0,
    )
    multires_noise_discount: float = option(
        0.3, "How much of it: iteration i, from 0, counts discount ** i.", le=1, since="0.1.1", unsaid=0.3
    )
    input_perturbation: float = option(0.0, "Strength of further noise in what the UNet sees, but not in its target; 0: none.")
    timestep_bias_strategy: str = option(
        "none",
        "Which timesteps are drawn more often: the first or last of the schedule (--timestep_bias_portion) or a range.",
        choices=("none", "earlier", "later", "range"),
    )
    timestep_bias_multiplier: float = option(
        1.0, "How much more often; below 1: less often.", only_with={"timestep_bias_strategy": ("earlier", "later", "range")}
    )
    timestep_bias_begin: int = option(0, "First timestep of the range.", only_with={"timestep_bias_strategy": ("range",)})
    timestep_bias_end: int = option(1000, "Timestep before which the range ends.", only_with={"timestep_bias_strategy": ("range",)})
    timestep_bias_portion: float = option(
        0.25, "Share of the timesteps that earlier and later mean.", le=1, only_with={"timestep_bias_strategy": ("earlier", "later")}
    )

    def check(self) -> None:
        if self.timestep_bias_strategy != "none" and self.timestep_bias_multiplier == 0:
            raise UserError("timestep_bias_multiplier is 0.", fix="Use more than 0; 2 draws them twice as often.")
        if not 0 <= self.timestep_bias_begin < self.timestep_bias_end:
            raise UserError(
                f"timestep_bias_begin is {self.timestep_bias_begin}, timestep_bias_end {self.timestep_bias_end}.",
                fix="Give a begin below the end.",
            )


def _found_in(run: Any, source: Path) -> Mapping[str, Any]:
    """What the scheduler says of the noise: no digest covers its file, and a joiner's own could say otherwise.

    A single file's scheduler is in `model_config`: where that is no folder here, all stays open.
    """
    folder = Path(run.model_config or "no folder") if source.is_file() else source
    try:
        said = json.loads((folder / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
        kind, zero_snr = said.get("prediction_type", "epsilon"), bool(said.get("rescale_betas_zero_snr", False))  # diffusers' defaults
    except (OSError, ValueError, AttributeError):  # no peer can load such a model, and each says why
        return {}
    found: dict[str, Any] = {}
    if run.prediction_type == "auto":
        if kind not in PREDICTIONS:
            raise UserError(
                f"The scheduler of {run.model} says that the model predicts '{kind}', which cannot be trained.",
                fix=f"Use another model, or set it with --prediction_type: one of {', '.join(PREDICTIONS)}.",
            )
        found["prediction_type"] = kind
    return {**found, "rescale_betas_zero_snr": zero_snr} if run.rescale_betas_zero_snr is None else found


def check_noise(zero_snr: bool | None, prediction_type: str) -> None:
    """Raise UserError for zero-terminal SNR where the noise is predicted; prediction_type: also 'auto', of which nothing is known here."""
    if zero_snr and prediction_type == "epsilon":
        raise UserError(
            "rescale_betas_zero_snr needs a model that does not predict the noise: at the last step its input is noise alone.",
            fix="Add --prediction_type v_prediction, or remove --rescale_betas_zero_snr.",
        )


LOSS = Loss(title="denoising", options=Options, found_in=_found_in)
