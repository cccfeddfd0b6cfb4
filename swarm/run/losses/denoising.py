"""DDPM's discrete steps: the noise, the velocity or the picture is predicted."""

from dataclasses import dataclass

from swarm.errors import UserError
from swarm.options import option
from swarm.run.loss import Loss


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of denoising."""

    prediction_type: str = option(
        "auto",
        "What the UNet predicts; auto: what the model's scheduler says.",
        choices=("auto", "epsilon", "v_prediction", "sample"),
        section="the loss: denoising",
    )
    rescale_betas_zero_snr: bool | None = option(
        None, "Noise that leaves nothing of the picture at the last step; auto: as the model's scheduler has it."
    )
    snr_gamma: float = option(0.0, "Weight the loss by min-SNR with this gamma, 5 is usual; 0: not.")
    noise_offset: float = option(0.0, "Add so much noise that is the same in all of a channel, for very dark and bright pictures.")
    input_perturbation: float = option(0.0, "Add so much further noise to what the UNet sees, but not to its target.")
    timestep_bias_strategy: str = option(
        "none",
        "Which timesteps are drawn more often: the first or last of the schedule (--timestep_bias_portion) or a range.",
        choices=("none", "earlier", "later", "range"),
    )
    timestep_bias_multiplier: float = option(1.0, "How much more often; below 1: less often.")
    timestep_bias_begin: int = option(0, "First timestep of the range.")
    timestep_bias_end: int = option(1000, "Timestep before which the range ends.")
    timestep_bias_portion: float = option(0.25, "Share of the timesteps that earlier and later mean.", le=1)

    def check(self) -> None:
        if self.timestep_bias_strategy != "none" and self.timestep_bias_multiplier == 0:
            raise UserError("timestep_bias_multiplier is 0.", fix="Use more than 0; 2 draws them twice as often.")
        if not 0 <= self.timestep_bias_begin < self.timestep_bias_end:
            raise UserError(
                f"timestep_bias_begin is {self.timestep_bias_begin}, timestep_bias_end {self.timestep_bias_end}.",
                fix="Begin before the end.",
            )


LOSS = Loss(title="denoising", options=Options)
