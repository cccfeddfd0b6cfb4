"""Stable Diffusion 1.x (and 2.x: the scheduler's prediction type decides): one text encoder, a VAE and a UNet."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from peer.contracts import LatentBatch, Text
from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)


def locate(source: str) -> Path:
    """The folder of a model: `source` itself, or the Hub's copy of it, fetched when it is not there yet.

    Raises UserError when there is neither such a folder nor such a model.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    if source.count("/") > 1 or source.startswith((".", "/", "~")):
        raise UserError(f"There is no model folder {source}.", fix="Give a diffusers folder, or a Hub id such as owner/name.")
    from diffusers import StableDiffusionPipeline

    try:
        return Path(StableDiffusionPipeline.download(source))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"'{source}' is no folder here, and the Hub did not give it: {reason}",
            fix="Check the name and the network, or give a folder.",
            code=ExitCode.NETWORK,
        ) from error


def load(source: Path, device: torch.device) -> "StableDiffusion":
    """The model from a diffusers folder or a Hub id, in float32. Raises UserError when it is no Stable Diffusion pipeline."""
    folder = locate(str(source))
    if not (folder / "model_index.json").is_file():
        raise UserError(
            f"{folder} is no diffusers pipeline: it has no model_index.json.", fix="Give the folder that save_pretrained wrote."
        )
    _quiet()
    from diffusers import DDPMScheduler, StableDiffusionPipeline

    try:
        pipeline = StableDiffusionPipeline.from_pretrained(
            folder, safety_checker=None, requires_safety_checker=False, local_files_only=True
        )
        noise_scheduler = DDPMScheduler.from_config(pipeline.scheduler.config)
    except Exception as error:  # diffusers raises whatever its parts raise: ValueError, OSError, KeyError, SafetensorError, ...
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(f"{folder} does not load as a Stable Diffusion pipeline: {reason}", fix="Save or fetch it again.") from error
    return StableDiffusion(pipeline.to(device), noise_scheduler, device)


class StableDiffusion:
    """The family's parts, how they encode a batch, and the loss of the denoiser."""

    def __init__(self, pipeline, noise_scheduler, device: torch.device):
        self.pipeline, self._noise_scheduler, self._device = pipeline, noise_scheduler, device
        self.unet, self.vae, self.text_encoder, self.tokenizer = pipeline.unet, pipeline.vae, pipeline.text_encoder, pipeline.tokenizer
        self.parts: dict[str, nn.Module] = {"unet": self.unet, "vae": self.vae, "text_encoder": self.text_encoder}
        for part in self.parts.values():
            part.float()  # a folder may hold fp16 weights
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
        self.pipeline.save_pretrained(folder, safe_serialization=True)
        _restore_text_model_prefix(folder / "text_encoder" / "model.safetensors")


def _restore_text_model_prefix(path: Path) -> None:
    """Write CLIP's keys as `text_model.*` again: transformers 5 drops the prefix, 4 and other tools find no weights without it."""
    from safetensors.torch import load_file, save_file

    if not path.is_file():
        return
    tensors = load_file(path)
    if not any(name.startswith("text_model.") for name in tensors):
        save_file({f"text_model.{name}": tensor for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _quiet() -> None:
    """No bars for files that are read in milliseconds, no notes on libraries that we do not use; errors are raised anyway."""
    for name in ("bitsandbytes", "transformers", "diffusers"):  # before their import, which is when they speak
        logging.getLogger(name).setLevel(logging.ERROR)
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
