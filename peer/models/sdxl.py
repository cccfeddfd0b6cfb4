"""Stable Diffusion XL: two text encoders, and a UNet that is told the sizes of the picture that it was cut from."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from peer.contracts import LatentBatch, Text
from peer.models.diffusion.prompts import final_norm, hidden_states, last_layers, tokenize
from peer.models.diffusion.unet import UNetModel
from swarm.errors import UserError
from swarm.founding import check_clip_skip
from swarm.run.families.sdxl import FAMILY
from swarm.run_config import RunConfig


class SDXL(UNetModel):
    """Reads both encoders below their last layer, and the second one's embedding of the whole caption."""

    facts = FAMILY

    def __init__(self, pipeline: Any, device: torch.device | None, run: RunConfig):
        if pipeline.text_encoder is None:
            raise UserError("The model is SDXL's refiner, which has one text encoder.", fix="Give the base model.")
        if pipeline.text_encoder_2 is None:
            raise UserError(
                "The model does not load as a SDXL pipeline: it has one text encoder.",
                fix="Fetch it again, or check that it is of the family sdxl.",
            )
        depths = {name: getattr(pipeline, name).config.num_hidden_layers - 1 for name in ("text_encoder", "text_encoder_2")}
        check_clip_skip(run.clip_skip, **depths)
        super().__init__(pipeline, device, run)
        self._encoders = ((pipeline.tokenizer, pipeline.text_encoder), (pipeline.tokenizer_2, pipeline.text_encoder_2))
        self._skip, self._chunks = run.clip_skip + 1, run.max_token_chunks  # SDXL's own layer is the penultimate one

    def encode_text(self, captions: Sequence[str]) -> Text:
        """{"states": (B, 77 a chunk, both widths), "pooled": (B, width)}, float32; pooled: of the caption's first chunk."""
        found = []
        for tokenizer, encoder in self._encoders:
            ids = tokenize(self.pipeline, tokenizer, captions, self._chunks).to(self.device)
            found.append(hidden_states(encoder, ids, self._skip))
        (states, _), (states_2, pooled) = found
        return {"states": torch.cat([states, states_2], dim=-1).float(), "pooled": pooled.float()}

    def unread(self) -> Sequence[nn.Module]:
        """Of the first encoder only; the second one's embedding of the whole caption comes from its last layer."""
        first = self.parts["text_encoder"]
        return [*last_layers(first, self._skip), final_norm(first)]

    def conditioning(self, batch: LatentBatch) -> dict[str, Any]:
        height, width = (side * self.vae_factor for side in batch.latents.shape[-2:])
        whole = torch.tensor([[height, width, 0, 0, height, width]]).expand(len(batch.latents), -1)
        geometry = whole if batch.geometry is None else batch.geometry
        time_ids = geometry.to(batch.latents.device, torch.float32)
        return {**super().conditioning(batch), "added_cond_kwargs": {"text_embeds": batch.text["pooled"], "time_ids": time_ids}}


load = SDXL.load
