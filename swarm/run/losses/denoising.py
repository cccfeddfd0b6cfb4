"""DDPM's discrete steps: the noise, the velocity or the picture is predicted."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.digest import read_header, read_metadata
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

    A single file's scheduler is in `model_config`, and the file itself may say more. Where neither does, all stays open.
    """
    if source.is_file():
        said = {**_said_by_scheduler(Path(run.model_config or "no folder")), **_said_by_file(source, bool(run.model_config))}
    else:
        said = _said_by_scheduler(source)
    kind = said.get("prediction_type", "epsilon")
    if run.prediction_type == "auto" and kind not in PREDICTIONS:
        raise UserError(
            f"The scheduler of {run.model} says that the model predicts '{kind}', which cannot be trained.",
            fix=f"Use another model, or set it with --prediction_type: one of {', '.join(PREDICTIONS)}.",
        )
    left_open = {"prediction_type": run.prediction_type == "auto", "rescale_betas_zero_snr": run.rescale_betas_zero_snr is None}
    return {name: value for name, value in said.items() if left_open[name]}


def _said_by_scheduler(folder: Path) -> dict[str, Any]:
    try:
        said = json.loads((folder / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
        return {  # diffusers' defaults
            "prediction_type": said.get("prediction_type", "epsilon"),
            "rescale_betas_zero_snr": bool(said.get("rescale_betas_zero_snr", False)),
        }
    except (OSError, ValueError, AttributeError):  # no peer can load such a model, and each says why
        return {}


def _said_by_file(path: Path, configured: bool) -> dict[str, Any]:
    """What a .safetensors file says of its noise, by the names of the options; {}: nothing.

    The empty tensors `v_pred` and `ztsnr` say it to ComfyUI, and ModelSpec's header says it too. configured: whether a --model_config was
    given. It counts for more than a header with 'epsilon', which tools also write where nobody told them what is predicted.
    """
    names, told = read_header(path), read_metadata(path).get("modelspec.prediction_type")
    if "v_pred" in names or told == "v":
        return {"prediction_type": "v_prediction", **({"rescale_betas_zero_snr": True} if "ztsnr" in names else {})}
    return {"prediction_type": "epsilon"} if told == "epsilon" and not configured else {}


def check_noise(zero_snr: bool | None, prediction_type: str) -> None:
    """Raise UserError for zero-terminal SNR where the noise is predicted; prediction_type: also 'auto', of which nothing is known here."""
    if zero_snr and prediction_type == "epsilon":
        raise UserError(
            "rescale_betas_zero_snr needs a model that does not predict the noise: at the last step its input is noise alone.",
            fix="Add --prediction_type v_prediction, or remove --rescale_betas_zero_snr.",
        )


LOSS = Loss(title="denoising", options=Options, found_in=_found_in, said_by_file=_said_by_file)
