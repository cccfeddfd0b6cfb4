"""FLUX.2 klein: told the caption by a Qwen 3, and nothing of guidance."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from peer.contracts import Text
from peer.models.diffusion.patches import PatchFlowModel
from peer.models.diffusion.prompts import between_layers
from swarm.run.families.flux2_klein import FAMILY
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

LAYERS = (9, 18, 27)
"""Of Qwen 3, whose states are read: the pipeline's own default. diffusers' script has (10, 20, 30), with which no klein draws."""


class Klein(PatchFlowModel):
    facts = FAMILY

    def __init__(self, pipeline: Any, device: torch.device | None, run: RunConfig):
        super().__init__(pipeline, device, run)
        if pipeline.config.is_distilled:
            log.warning(
                "this %s was distilled to draw in a few steps. Training works against that: the result needs more steps. "
                "Train the base model of its size; a LoRA of the base also works with the distilled model.",
                FAMILY.title,
            )

    def encode_text(self, captions: Sequence[str]) -> Text:
        """{"states": (B, T, 3 * width of Qwen) float32}: the caption as a message of a user; the answer is to come without thinking."""
        tokenizer = self.pipeline.tokenizer
        chats = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": caption}], tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            for caption in captions
        ]
        length = min(self._run.max_sequence_length, tokenizer.model_max_length)
        tokens = tokenizer(chats, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return {"states": between_layers(self.pipeline.text_encoder, tokens.input_ids, tokens.attention_mask, LAYERS, self.device).float()}


load = Klein.load
