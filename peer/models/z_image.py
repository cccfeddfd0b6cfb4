"""Z-Image: a transformer trained by flow matching, told the caption by a language model, by as many tokens as the caption has."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from peer.contracts import LatentBatch, Text
from peer.models.diffusion.flow import FlowModel
from peer.models.diffusion.noising import sample_losses
from peer.models.diffusion.prompts import padded, rows
from swarm.run.families.z_image import FAMILY
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

_SHIFT_OF_TURBO = 3.0
"""Of its scheduler's config, in which it differs from Z-Image: that has 6.0."""


class ZImage(FlowModel):
    facts = FAMILY

    def __init__(self, pipeline: Any, device: torch.device | None, run: RunConfig):
        super().__init__(pipeline, device, run)
        if pipeline.scheduler.config.shift == _SHIFT_OF_TURBO:
            self.drawn_with = {FAMILY.guided_by: 0.0}
            log.warning(
                "the scheduler of this %s shifts by 3, as Turbo's does, which was distilled to draw in eight steps. Training works against that: "
                "the result needs more steps, and guidance. Train Z-Image itself; a LoRA of it also works with Turbo.",
                FAMILY.title,
            )

    def encode_text(self, captions: Sequence[str]) -> Text:
        """{"states": (B, T, width), "mask": (B, T)}, float32: the states below the last layer, of a user's message; T: tokens of the longest."""
        tokenizer, encoder = self.pipeline.tokenizer, self.pipeline.text_encoder
        chats = [[{"role": "user", "content": caption}] for caption in captions]
        told = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True, enable_thinking=True)
        read = tokenizer(told, padding=True, max_length=self._run.max_sequence_length, truncation=True, return_tensors="pt").to(self.device)
        mask = read.attention_mask.bool()
        states = encoder(read.input_ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states[-2].float()
        return padded([row[kept] for row, kept in zip(states, mask, strict=True)])

    def loss(self, batch: LatentBatch, rng: torch.Generator) -> Tensor:
        """(B,) float32: the error of the flow, weighted by --weighting_scheme."""
        noised = self._flow(batch.latents, rng)
        # The transformer takes videos, and the share of the picture; it answers with the way from the noise to the picture.
        answers = self.denoiser(
            list(noised.noisy.unsqueeze(2)), 1 - self._flow.sigmas(noised.timesteps), rows(batch.text), return_dict=False
        )[0]
        return sample_losses(-torch.stack(answers).squeeze(2), noised, batch.mask)

    def _as_arguments(self, text: Text, prefix: str = "") -> dict[str, Any]:
        return {f"{prefix}prompt_embeds": rows(text)}


load = ZImage.load
