"""Qwen-Image: a transformer trained by flow matching, told the caption by Qwen 2.5 VL, by as many tokens as the caption has; its VAE takes videos."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from peer.contracts import LatentBatch, Text
from peer.models.diffusion.flow import FlowModel
from peer.models.diffusion.noising import sample_losses
from peer.models.diffusion.prompts import between_layers, padded
from swarm.run.families.qwen_image import FAMILY
from swarm.run_config import RunConfig


class QwenImage(FlowModel):
    facts = FAMILY
    arguments = MappingProxyType({"states": "prompt_embeds", "mask": "prompt_embeds_mask"})

    def __init__(self, pipeline: Any, device: torch.device | None, run: RunConfig):
        super().__init__(pipeline, device, run)
        self.drawn_with = {"max_sequence_length": run.max_sequence_length}  # else the pipeline cuts texts at 512

    def framed(self, pixels: Tensor) -> Tensor:
        """(B, 3, 1, H, W): videos of one frame."""
        return pixels.unsqueeze(2)

    def scaled(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Of the one frame, each channel by its own mean and deviation."""
        config = self.vae.config
        shift, factor = (mean.new_tensor(each).view(1, -1, 1, 1) for each in (config.latents_mean, config.latents_std))
        return (mean.squeeze(2) - shift) / factor, std.squeeze(2) / factor

    def encode_text(self, captions: Sequence[str]) -> Text:
        """{"states": (B, T, width), "mask": (B, T)}, float32: the last states, without those of the question that precedes each caption."""
        pipeline, question = self.pipeline, self.pipeline.prompt_template_encode_start_idx
        told = [pipeline.prompt_template_encode.format(caption) for caption in captions]
        length = self._run.max_sequence_length + question
        read = pipeline.tokenizer(told, padding=True, max_length=length, truncation=True, return_tensors="pt")
        states = between_layers(pipeline.text_encoder, read.input_ids, read.attention_mask, [-1], self.device).float()
        kept = read.attention_mask.bool().to(states.device)
        return padded([row[mask][question:] for row, mask in zip(states, kept, strict=True)])

    def unread(self) -> Sequence[nn.Module]:
        """What the last block makes of the text: nothing comes after it that reads the answer."""
        block = self.denoiser.transformer_blocks[-1]
        return [block.attn.add_q_proj, block.attn.norm_added_q, block.attn.to_add_out, block.txt_mlp]

    def loss(self, batch: LatentBatch, rng: torch.Generator) -> Tensor:
        """(B,) float32: the error of the flow, weighted by --weighting_scheme."""
        latents, mask = batch.latents, batch.text["mask"].bool()
        noised = self._flow(latents, rng)
        size, channels, height, width = latents.shape
        packed = self.denoiser(
            hidden_states=self.pipeline._pack_latents(noised.noisy, size, channels, height, width),
            timestep=self._flow.sigmas(noised.timesteps),
            encoder_hidden_states=batch.text["states"],
            encoder_hidden_states_mask=None if mask.all() else mask,  # without one attention is faster, as the pipeline has it
            img_shapes=[[(1, height // 2, width // 2)]] * size,
            return_dict=False,
        )[0]
        factor = self.vae_factor
        return sample_losses(self.pipeline._unpack_latents(packed, height * factor, width * factor, factor).squeeze(2), noised, batch.mask)


load = QwenImage.load
