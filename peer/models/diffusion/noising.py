"""Noise, targets and weights of denoisers that were trained with DDPM's discrete steps."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from peer.models.diffusion.distance import distance_of
from swarm.errors import UserError
from swarm.run.losses.denoising import check_noise
from swarm.run_config import RunConfig


@dataclass(frozen=True)
class Noised:
    """noisy: (B, C, h, w), what the denoiser sees; target: of the same shape, what it is to answer; timesteps, weights: (B,).

    distance: how much each number of target - answer counts.
    """

    noisy: Tensor
    timesteps: Tensor
    target: Tensor
    weights: Tensor
    distance: Callable[[Tensor], Tensor] = torch.square


class Noising:
    """The scheduler's noise with the run's changes to it."""

    def __init__(self, scheduler: Any, run: RunConfig):
        """scheduler: the pipeline's, of which only the config counts. Raises UserError for one of another kind of noise, and for options that do not go together."""
        from diffusers import DDPMScheduler

        _check_schedule(scheduler)
        self._scheduler = DDPMScheduler.from_config(scheduler.config, **changes(run))
        self._run = run
        check_noise(run.rescale_betas_zero_snr, self.prediction_type)

    @property
    def config(self) -> Any:
        """Of the scheduler, with the run's changes."""
        return self._scheduler.config

    @property
    def prediction_type(self) -> str:
        return self.config.prediction_type

    def __call__(self, latents: Tensor, rng: torch.Generator) -> Noised:
        """Draw noise and a timestep for each of (B, C, h, w) latents; all of chance is from rng."""
        from diffusers.training_utils import compute_snr

        scheduler, run = self._scheduler, self._run
        noise = normal(latents.shape, rng).to(latents.device)
        timesteps = self._timesteps(len(latents), rng).to(latents.device)
        if run.noise_offset:
            noise = noise + run.noise_offset * normal((*latents.shape[:2], 1, 1), rng).to(latents.device)
        if run.multires_noise_iterations:
            noise = multires(noise, rng, run.multires_noise_iterations, run.multires_noise_discount)
        seen = noise
        if run.input_perturbation:
            seen = noise + run.input_perturbation * normal(latents.shape, rng).to(latents.device)
        target = {
            "epsilon": lambda: noise,
            "v_prediction": lambda: scheduler.get_velocity(latents, noise, timesteps),
            "sample": lambda: latents,
        }[self.prediction_type]()
        distance = distance_of(run, timesteps / scheduler.config.num_train_timesteps, partial(compute_snr, scheduler, timesteps))
        return Noised(scheduler.add_noise(latents, seen, timesteps), timesteps, target, self.weights(timesteps), distance)

    def _timesteps(self, count: int, rng: torch.Generator) -> Tensor:
        """(count,) int64: each as likely as any other, but for --timestep_bias_strategy."""
        run, steps = self._run, self._scheduler.config.num_train_timesteps
        if run.timestep_bias_strategy == "none":
            return torch.randint(0, steps, (count,), generator=rng, device=rng.device)
        portion = round(run.timestep_bias_portion * steps)
        first, end = {
            "earlier": (0, portion),
            "later": (steps - portion, steps),
            "range": (run.timestep_bias_begin, run.timestep_bias_end),
        }[run.timestep_bias_strategy]
        likely = torch.ones(steps, device=rng.device)
        likely[first:end] *= run.timestep_bias_multiplier
        return torch.multinomial(likely, count, replacement=True, generator=rng)

    def weights(self, timesteps: Tensor) -> Tensor:
        """(B,): ones, or min-SNR's weights for what is predicted; finite also where the signal-to-noise ratio is 0.

        Source: Hang et al. 2023, arXiv:2303.09556, section 3.4.
        """
        from diffusers.training_utils import compute_snr

        gamma = self._run.snr_gamma
        if not gamma:
            return torch.ones(len(timesteps), device=timesteps.device)
        snr = compute_snr(self._scheduler, timesteps)
        return {
            "epsilon": lambda: (gamma / snr).clamp(max=1.0),  # min(snr, gamma) / snr, which is 1 at an SNR of 0
            "v_prediction": lambda: snr.clamp(max=gamma) / (snr + 1),
            "sample": lambda: snr.clamp(max=gamma),
        }[self.prediction_type]()


def _check_schedule(scheduler: Any) -> None:
    """Raises UserError for a scheduler without betas, as of EDM (Karras et al. 2022, arXiv:2206.00364): DDPM's defaults would be taken in their place."""
    if "sigma_data" in scheduler.config or "beta_schedule" not in scheduler.config:
        raise UserError(
            f"The model's scheduler is {type(scheduler).__name__}, whose noise has no beta_schedule: it cannot be trained.",
            fix="Use a model with DDPM's noise; Playground v2.5 and CosXL, for example, have EDM's.",
        )


def normal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng, device=rng.device)


def multires(noise: Tensor, rng: torch.Generator, iterations: int, discount: float) -> Tensor:
    """Noise (B, C, h, w) with coarser noise added, each time 2 to 4 times as coarse as before, and scaled to a deviation of 1 in each picture.

    Source: kohya-ss/sd-scripts at 48d368fa557731ad0488c07304dfeba8c07910eb, library/custom_train_functions.py, `pyramid_noise_like`, after Whitaker
    2023 (https://wandb.ai/johnowhitaker/multires_noise). It scales the whole batch together; a picture's noise would then depend on the others.
    """
    size = noise.shape[2:]
    for power in range(iterations):
        ratio = 2 + 2 * torch.rand((), generator=rng, device=rng.device).item()
        coarse = [max(1, int(side / ratio**power)) for side in size]
        added = nn.functional.interpolate(normal((*noise.shape[:2], *coarse), rng), size, mode="bilinear")
        noise = noise + discount**power * added.to(noise.device)
        if min(coarse) == 1:
            break
    return noise / noise.std(dim=(1, 2, 3), keepdim=True)


def sample_losses(predicted: Tensor, noised: Noised, mask: Tensor | None = None) -> Tensor:
    """(B,) float32: each sample's weighted mean of --loss_type; the mean squared error by default.

    mask: (B, 1, h, w), what each place's distance is multiplied with. The mean is over all places, as in kohya-ss/sd-scripts at
    48d368fa557731ad0488c07304dfeba8c07910eb, `apply_masked_loss`: a picture counts as much as its mask is large.
    """
    distances = noised.distance(predicted.float() - noised.target.float())
    return (distances if mask is None else distances * mask).mean(dim=(1, 2, 3)) * noised.weights


def changes(run: RunConfig) -> dict[str, Any]:
    """What the run says otherwise than a scheduler's config."""
    asked = {
        "prediction_type": None if run.prediction_type == "auto" else run.prediction_type,
        "rescale_betas_zero_snr": run.rescale_betas_zero_snr,
    }
    return {name: value for name, value in asked.items() if value is not None}


def sampler(scheduler: Any, run: RunConfig) -> Any:
    """The pipeline's scheduler as pictures are to be drawn from what the run trains; the same object where nothing differs."""
    return changed(scheduler, changes(run))


def changed(scheduler: Any, wanted: Mapping[str, Any]) -> Any:
    """The scheduler with these values in its config; the same object where nothing differs.

    With zero-terminal SNR sampling has to begin at the last step (Lin et al. 2023, arXiv:2305.08891); DDIM takes the place of schedulers that cannot.
    """
    from diffusers import DDIMScheduler

    asked = {name: value for name, value in wanted.items() if scheduler.config.get(name, False) != value}
    if not asked:
        return scheduler
    kind = type(scheduler)
    if asked.get("rescale_betas_zero_snr"):
        asked["timestep_spacing"] = "trailing"
        if "rescale_betas_zero_snr" not in inspect.signature(kind.__init__).parameters:
            kind = DDIMScheduler
    return ddim(scheduler.config, **asked) if kind is DDIMScheduler else kind.from_config(scheduler.config, **asked)


def ddim(config: Mapping[str, Any], **values: Any) -> Any:
    """DDIM in place of the scheduler with this config. Where that was of a kind which says nothing of it, DDIM would clip latents at 1; they reach 4."""
    from diffusers import DDIMScheduler

    return DDIMScheduler.from_config(config, **{name: False for name in ("clip_sample", "set_alpha_to_one") if name not in config}, **values)
