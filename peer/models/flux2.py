"""FLUX.2 dev: told the caption by a Mistral 3, after a message that the pipeline has for it."""

from collections.abc import Sequence

from peer.contracts import Text
from peer.models.diffusion.patches import PatchFlowModel
from peer.models.diffusion.prompts import between_layers
from swarm.run.families.flux2 import FAMILY

LAYERS = (10, 20, 30)
"""Of Mistral 3, whose states are read: the pipeline's own default."""


class Flux2(PatchFlowModel):
    facts = FAMILY

    def encode_text(self, captions: Sequence[str]) -> Text:
        """{"states": (B, T, 3 * width of Mistral) float32}: the caption as a message of a user, after the pipeline's own message of the system."""
        tokenizer = self.pipeline.tokenizer
        chats = [
            [_message("system", self.pipeline.system_message), _message("user", caption.replace("[IMG]", ""))]  # a token for pictures
            for caption in captions
        ]
        tokens = tokenizer.apply_chat_template(
            chats,
            return_dict=True,
            return_tensors="pt",
            padding="max_length",
            truncation=True,
            max_length=min(self._run.max_sequence_length, tokenizer.model_max_length),
        )
        return {"states": between_layers(self.pipeline.text_encoder, tokens["input_ids"], tokens["attention_mask"], LAYERS, self.device).float()}


def _message(role: str, text: str) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text}]}


load = Flux2.load
