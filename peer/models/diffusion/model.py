"""What models of all families have in common: a pipeline's parts, the VAE, and how the result is written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peer.contracts import Text
from peer.models.diffusion.pipeline import save_pipeline
from swarm.errors import UserError


class DiffusionModel:
    """The parts of a pipeline on a device. A family adds `encode_text` and `loss`."""

    def __init__(self, pipeline: Any, device: torch.device):
        self.pipeline, self.device = pipeline.to(device), device
        names = ("unet", "transformer", "vae", "text_encoder", "text_encoder_2")
        self.parts: dict[str, nn.Module] = {name: getattr(pipeline, name) for name in names if getattr(pipeline, name, None) is not None}
        self.vae = self.parts["vae"]
        self.denoiser = self.parts["unet"] if "unet" in self.parts else self.parts["transformer"]
        self.vae_factor = 2 ** (len(self.vae.config.block_out_channels) - 1)

    def enable_gradient_checkpointing(self) -> None:
        """Of whatever may be trained: the denoiser and the text encoders, which honour it only in training mode."""
        self.denoiser.enable_gradient_checkpointing()
        for name, part in self.parts.items():
            if name.startswith("text_encoder"):
                part.gradient_checkpointing_enable()

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor) -> Tensor:
        # SDXL's VAE overflows in fp16, as its config says.
        half = torch.is_autocast_enabled(self.device.type) and not self.vae.config.force_upcast
        with torch.autocast(self.device.type, enabled=half):
            posterior = self.vae.encode(pixels.to(self.device)).latent_dist
        shift = self.vae.config.shift_factor or 0.0
        return torch.cat([posterior.mean.float() - shift, posterior.std.float()], dim=1) * self.vae.config.scaling_factor

    def encode_text(self, captions: Sequence[str]) -> Text:
        raise NotImplementedError

    def prompt_arguments(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """What the pipeline is called with, in place of the prompts, so that it reads them as captions are read in training."""
        return as_arguments(self.encode_text(prompts))

    def save(self, folder: Path) -> None:
        save_pipeline(self.pipeline, folder)


def as_arguments(text: Text, prefix: str = "") -> dict[str, Tensor]:
    """A text's tensors under the names that all pipelines' calls have for them."""
    names = {"states": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
    return {prefix + names[name]: states for name, states in text.items()}


def refuse(family: str, reason: str, **options: tuple[Any, Any]) -> None:
    """Raise UserError for the first option whose value is not its default; options: (value, default)."""
    for name, (value, default) in options.items():
        if value != default:
            raise UserError(f"{name} is {value}, but {family} {reason}.", fix=f"Remove --{name}.")
