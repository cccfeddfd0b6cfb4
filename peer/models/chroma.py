"""Chroma: a transformer trained by flow matching, told the caption by T5 without the padding."""

from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from peer.contracts import LatentBatch, Text
from peer.models.diffusion.flow import FlowModel
from peer.models.diffusion.noising import sample_losses
from peer.models.diffusion.prompts import written_out
from swarm.run.families.chroma import FAMILY


class Chroma(FlowModel):
    facts = FAMILY
    arguments = MappingProxyType({"states": "prompt_embeds", "mask": "prompt_attention_mask"})
    _call_anew: Any = None
    """diffusers' way to call a block whose insides are computed anew when it goes backwards; None: they are kept."""

    def encode_text(self, captions: Sequence[str]) -> Text:
        """{"states": (B, T, width of T5), "mask": (B, T)}, float32; mask: 1 for the caption's tokens and the first of the padding, else 0."""
        tokenizer, encoder = self.pipeline.tokenizer, self.pipeline.text_encoder
        length = min(self._run.max_sequence_length, tokenizer.model_max_length)
        captions = written_out(self.pipeline, tokenizer, captions)
        tokens = tokenizer(captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt").to(self.device)
        states = encoder(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
        read = torch.arange(length, device=self.device) <= tokens.attention_mask.sum(1, keepdim=True)
        return {"states": states.float(), "mask": read.float()}

    def loss(self, batch: LatentBatch, rng: torch.Generator) -> Tensor:
        """(B,) float32: the error of the flow, weighted by --weighting_scheme."""
        latents, states = batch.latents, batch.text["states"]
        noised = self._flow(latents, rng)
        size, channels, height, width = latents.shape
        pack, device = self.pipeline._pack_latents, latents.device
        packed = pack(noised.noisy, size, channels, height, width)
        # Of bools, as Chroma was trained: 1 and 0 would be added to what attention compares, and padding be read almost as words are.
        mask = torch.cat([batch.text["mask"], torch.ones(packed.shape[:2], device=device)], dim=1) > 0
        if self._call_anew:
            self.denoiser._gradient_checkpointing_func = partial(_masked, self._call_anew, mask)
        answer = self.denoiser(
            hidden_states=packed,
            timestep=self._flow.sigmas(noised.timesteps),
            encoder_hidden_states=states,
            txt_ids=torch.zeros(states.shape[1], 3, device=device),
            img_ids=self.pipeline._prepare_latent_image_ids(size, height // 2, width // 2, device, latents.dtype),
            attention_mask=mask,
            return_dict=False,
        )[0]
        factor = self.vae_factor
        return sample_losses(self.pipeline._unpack_latents(answer, height * factor, width * factor, factor), noised, batch.mask)

    def enable_gradient_checkpointing(self) -> None:
        super().enable_gradient_checkpointing()
        self._call_anew = self.denoiser._gradient_checkpointing_func


def _masked(call: Any, mask: Tensor, block: Any, *given: Any) -> Any:
    """diffusers (up to 0.42) forgets the mask of single blocks there: they would read the padding."""
    return call(block, *given, *([mask] if len(given) == 3 else []))


load = Chroma.load
