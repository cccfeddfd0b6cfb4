"""Flow matching: pictures go to noise on straight lines, and the denoiser predicts the way at a point of it (Esser et al. 2024, arXiv:2403.03206)."""

from typing import Any

import torch
from torch import Tensor

from peer.models.diffusion.distance import distance_of
from peer.models.diffusion.model import DiffusionModel
from peer.models.diffusion.noising import Noised, normal
from swarm.founding import check_family
from swarm.run_config import RunConfig


class Flow:
    """Points of the way as the scheduler shifts them, drawn and weighted as --weighting_scheme says."""

    def __init__(self, scheduler: Any, run: RunConfig):
        """scheduler: the pipeline's, of which only the config counts: drawing pictures sets its own steps."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        # A dynamic shift depends on the size of the picture that is drawn; in training diffusers' scripts then shift by nothing.
        asked = {"shift": run.timestep_shift, "use_dynamic_shifting": False} if run.timestep_shift else {}
        self._scheduler = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config, **asked)
        self._run = run

    def sigmas(self, timesteps: Tensor) -> Tensor:
        """(B,): the share of noise at each timestep."""
        return timesteps / self._scheduler.config.num_train_timesteps

    def __call__(self, latents: Tensor, rng: torch.Generator) -> Noised:
        """Noise and a point of the way for each of (B, C, h, w) latents; the target is noise - latents."""
        from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

        run, steps = self._run, self._scheduler.config.num_train_timesteps
        noise = normal(latents.shape, rng).to(latents.device)
        place = compute_density_for_timestep_sampling(
            run.weighting_scheme, len(latents), run.logit_mean, run.logit_std, run.mode_scale, device=rng.device, generator=rng
        )
        index = (place * steps).long().clamp(0, steps - 1).cpu()  # 'mode' may answer 1
        sigmas = self._scheduler.sigmas[index].to(latents.device)
        at = sigmas.view(-1, 1, 1, 1)
        return Noised(
            noisy=(1 - at) * latents + at * noise,
            timesteps=self._scheduler.timesteps[index].to(latents.device),
            target=noise - latents,
            weights=compute_loss_weighting_for_sd3(run.weighting_scheme, sigmas),
            distance=distance_of(run, sigmas, lambda: ((1 - sigmas) / sigmas) ** 2),
        )


class FlowModel(DiffusionModel):
    """Predicts the way from the picture to the noise, noise - latents, at a point of that way. A family adds its loss by `_flow`."""

    def __init__(self, pipeline: Any, device: torch.device | None, run: RunConfig):
        check_family(self.facts.name, run)
        super().__init__(pipeline, device)
        self._run = run
        self._flow = Flow(pipeline.scheduler, run)
        self.resolution_multiple = self.vae_factor * self.facts.patch
