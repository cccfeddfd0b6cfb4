"""What Stable Diffusion and SDXL have in common: a UNet that DDPM's noise is taken from."""

from typing import Any

import torch
from torch import Tensor

from peer.contracts import LatentBatch
from peer.models.diffusion.model import DiffusionModel
from peer.models.diffusion.noising import Noising, sample_losses, sampler
from swarm.errors import UserError
from swarm.founding import check_family
from swarm.run_config import RunConfig


class UNetModel(DiffusionModel):
    """Adds the loss; a family says what else the UNet is told besides the text's states."""

    def __init__(self, pipeline: Any, device: torch.device | None, run: RunConfig):
        check_family(self.facts.name, run)
        if pipeline.unet.config.in_channels != pipeline.vae.config.latent_channels:
            raise UserError(
                f"The model's UNet takes {pipeline.unet.config.in_channels} channels instead of {pipeline.vae.config.latent_channels}: "
                "it fills in parts of pictures.",
                fix="Use the model that draws whole pictures.",
            )
        if pipeline.vae.config.get("latents_mean") or pipeline.vae.config.get("latents_std"):
            raise UserError(
                "The model's VAE has latents_mean and latents_std, by which its UNet takes latents: such a model cannot be trained.",
                fix="Use a model whose VAE has a scaling_factor alone.",
            )
        super().__init__(pipeline, device)
        self.unet = self.denoiser
        self.noising = Noising(pipeline.scheduler, run)
        pipeline.scheduler = sampler(pipeline.scheduler, run)
        # The UNet halves the latents once per level; sides that do not divide evenly fail at its skip connections.
        self.resolution_multiple = self.vae_factor * 2 ** (len(self.unet.config.block_out_channels) - 1)

    @property
    def trained_by(self) -> str:
        config = self.noising.config
        return f"prediction_type={config.prediction_type} rescale_betas_zero_snr={config.rescale_betas_zero_snr}"

    def loss(self, batch: LatentBatch, rng: torch.Generator) -> Tensor:
        """(B,) float32: the error of the noise, the velocity or the picture, as the scheduler or the run says, weighted."""
        noised = self.noising(batch.latents, rng)
        predicted = self.unet(noised.noisy, noised.timesteps, return_dict=False, **self.conditioning(batch))[0]
        return sample_losses(predicted, noised, batch.mask)

    def conditioning(self, batch: LatentBatch) -> dict[str, Any]:
        """What the UNet is told of the batch, by the names of its forward."""
        return {"encoder_hidden_states": batch.text["states"]}
