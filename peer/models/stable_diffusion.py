"""Stable Diffusion 1.x (and 2.x: the scheduler's prediction type decides): one text encoder, a VAE and a UNet."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from peer.contracts import LatentBatch, Text
from peer.models.diffusion.pipeline import load_pipeline, save_pipeline
from swarm.run_config import RunConfig


def load(source: Path, device: torch.device, run: RunConfig) -> "StableDiffusion":
    """The model from a diffusers folder, a Hub id or a .safetensors file, in float32. Raises UserError when it is none of Stable Diffusion."""
    from diffusers import DDPMScheduler

    pipeline = load_pipeline("StableDiffusionPipeline", source, run.model_config)
    return StableDiffusion(pipeline.to(device), DDPMScheduler.from_config(pipeline.scheduler.config), device)


class StableDiffusion:
    """The family's parts, how they encode a batch, and the loss of the denoiser."""

    def __init__(self, pipeline, noise_scheduler, device: torch.device):
        self.pipeline, self._noise_scheduler, self._device = pipeline, noise_scheduler, device
        self.unet, self.vae, self.text_encoder, self.tokenizer = pipeline.unet, pipeline.vae, pipeline.text_encoder, pipeline.tokenizer
        self.parts: dict[str, nn.Module] = {"unet": self.unet, "vae": self.vae, "text_encoder": self.text_encoder}
        factor = 2 ** (len(self.vae.config.block_out_channels) - 1)
        # The UNet halves the latents once per level; sides that do not divide evenly fail at its skip connections.
        self.resolution_multiple = factor * 2 ** (len(self.unet.config.block_out_channels) - 1)

    def enable_gradient_checkpointing(self) -> None:
        self.unet.enable_gradient_checkpointing()

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor) -> Tensor:
        posterior = self.vae.encode(pixels.to(self._device)).latent_dist
        return torch.cat([posterior.mean, posterior.std], dim=1).float() * self.vae.config.scaling_factor

    def encode_text(self, captions: Sequence[str]) -> Text:
        """{"states": (B, 77, width) float32}, the text encoder's last states."""
        ids = self.tokenizer(
            list(captions), padding="max_length", max_length=self.tokenizer.model_max_length, truncation=True, return_tensors="pt"
        ).input_ids
        return {"states": self.text_encoder(ids.to(self._device))[0].float()}

    def loss(self, batch: LatentBatch, rng: torch.Generator) -> Tensor:
        """(B,) float32: mean squared error of the predicted noise, or of the velocity, as the scheduler's config says."""
        scheduler, latents = self._noise_scheduler, batch.latents
        noise = torch.randn(latents.shape, generator=rng, device=latents.device)
        steps = scheduler.config.num_train_timesteps
        timesteps = torch.randint(0, steps, (len(latents),), generator=rng, device=latents.device)
        predicted = self.unet(scheduler.add_noise(latents, noise, timesteps), timesteps, batch.text["states"], return_dict=False)[0]
        target = {
            "epsilon": lambda: noise,
            "v_prediction": lambda: scheduler.get_velocity(latents, noise, timesteps),
            "sample": lambda: latents,
        }[scheduler.config.prediction_type]()
        return (predicted.float() - target.float()).square().mean(dim=(1, 2, 3))

    def save(self, folder: Path) -> None:
        """Write a folder that plain `StableDiffusionPipeline.from_pretrained` loads, in this and older releases."""
        save_pipeline(self.pipeline, folder)
