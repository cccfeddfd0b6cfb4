"""Stable Diffusion 1.x and 2.x: one text encoder, a VAE and a UNet."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from peer.contracts import Text
from peer.models.diffusion.prompts import final_norm, hidden_states, last_layers, tokenize
from peer.models.diffusion.unet import UNetModel
from swarm.founding import check_clip_skip
from swarm.run.families.stable_diffusion import FAMILY
from swarm.run_config import RunConfig


class StableDiffusion(UNetModel):
    """Both generations: the scheduler's config says whether the noise or the velocity is predicted."""

    facts = FAMILY

    def __init__(self, pipeline: Any, device: torch.device | None, run: RunConfig):
        check_clip_skip(run.clip_skip, text_encoder=pipeline.text_encoder.config.num_hidden_layers)
        super().__init__(pipeline, device, run)
        self.text_encoder, self.tokenizer = pipeline.text_encoder, pipeline.tokenizer
        self._skip, self._chunks = run.clip_skip, run.max_token_chunks

    def encode_text(self, captions: Sequence[str]) -> Text:
        """{"states": (B, 77 a chunk, width) float32}, of the text encoder's last layer or of one below, normalised as the last."""
        ids = tokenize(self.pipeline, self.tokenizer, captions, self._chunks).to(self.device)
        states, _ = hidden_states(self.text_encoder, ids, self._skip)
        return {"states": final_norm(self.text_encoder)(states).float()}

    def unread(self) -> Sequence[nn.Module]:
        return last_layers(self.text_encoder, self._skip)


load = StableDiffusion.load
