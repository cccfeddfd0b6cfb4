"""FLUX.2: a transformer trained by flow matching, told the caption by layers of a language model, on latents that are normalised in patches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peer.contracts import LatentBatch, Text
from peer.models.diffusion.flow import FlowModel
from peer.models.diffusion.noising import mean_square
from peer.models.diffusion.prompts import between_layers
from swarm.run.families.flux2 import FAMILY

LAYERS = (10, 20, 30)
"""Of Mistral 3, whose states are read: the pipeline's own default."""


class Flux2(FlowModel):
    """Latents are (B, 4 * C, h / 2, w / 2): each place has what 2x2 places of the VAE have, normalised by the VAE's batch norm."""

    facts = FAMILY

    def scaled(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        norm, patches = self.vae.bn, self.pipeline._patchify_latents
        deviation = torch.sqrt(norm.running_var + self.vae.config.batch_norm_eps).view(1, -1, 1, 1)
        return (patches(mean) - norm.running_mean.view(1, -1, 1, 1)) / deviation, patches(std) / deviation

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
        return {"states": between_layers(self.pipeline.text_encoder, tokens["input_ids"], tokens["attention_mask"], LAYERS).float()}

    def loss(self, batch: LatentBatch, rng: torch.Generator) -> Tensor:
        """(B,) float32: mean squared error of the flow, weighted by --weighting_scheme."""
        noised, states, device = self._flow(batch.latents, rng), batch.text["states"], batch.latents.device
        answer = self.denoiser(
            hidden_states=self.pipeline._pack_latents(noised.noisy),
            timestep=self._flow.sigmas(noised.timesteps),
            guidance=self._guidance(len(states), device),
            encoder_hidden_states=states,
            txt_ids=self.pipeline._prepare_text_ids(states).to(device),
            img_ids=self.pipeline._prepare_latent_ids(noised.noisy).to(device),
            return_dict=False,
        )[0]
        return mean_square(answer.transpose(1, 2).contiguous().view(batch.latents.shape), noised)

    def _guidance(self, size: int, device: torch.device) -> Tensor | None:
        """(size,): what the transformer's guidance embedding is told; None where it has none."""
        return torch.full((size,), self._run.guidance_scale, device=device)


def _message(role: str, text: str) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text}]}


load = Flux2.load
