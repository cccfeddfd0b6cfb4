"""Stable Diffusion 3 and 3.5: a transformer trained by flow matching, told the caption by two CLIPs and, unless the pipeline has none, by T5."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from peer.contracts import LatentBatch, Text
from peer.models.diffusion.flow import FlowModel
from peer.models.diffusion.noising import sample_losses
from peer.models.diffusion.prompts import hidden_states, t5_states, tokenize
from swarm.run.families.sd3 import FAMILY


class SD3(FlowModel):
    facts = FAMILY

    def encode_text(self, captions: Sequence[str]) -> Text:
        """{"states": (B, 77 + T, width of T5), "pooled": (B, widths of both CLIPs)}, float32: CLIPs side by side, zeros up to T5's width, then T5."""
        pipeline, width, found = self.pipeline, self.denoiser.config.joint_attention_dim, []
        for tokenizer, encoder in ((pipeline.tokenizer, pipeline.text_encoder), (pipeline.tokenizer_2, pipeline.text_encoder_2)):
            found.append(hidden_states(encoder, tokenize(pipeline, tokenizer, captions).to(self.device), 1))
        states, pooled = (torch.cat(each, dim=-1).float() for each in zip(*found, strict=True))
        length = self._run.max_sequence_length
        if pipeline.text_encoder_3 is None:
            t5 = states.new_zeros(len(captions), length, width)
        else:
            t5 = t5_states(pipeline, pipeline.tokenizer_3, pipeline.text_encoder_3, captions, length, self.device).float()
        return {"states": torch.cat([pad(states, (0, width - states.shape[-1])), t5], dim=1), "pooled": pooled}

    def unread(self) -> Sequence[nn.Module]:
        """What the last block asks for the text: nothing comes after it that reads the answer."""
        attention = self.denoiser.transformer_blocks[-1].attn
        return [module for module in (attention.add_q_proj, attention.norm_added_q) if module is not None]

    def loss(self, batch: LatentBatch, rng: torch.Generator) -> Tensor:
        """(B,) float32: the error of the flow, weighted by --weighting_scheme and --precondition_outputs."""
        noised = self._flow(batch.latents, rng)
        predicted = self.denoiser(
            hidden_states=noised.noisy,
            timestep=noised.timesteps,
            encoder_hidden_states=batch.text["states"],
            pooled_projections=batch.text["pooled"],
            return_dict=False,
        )[0]
        loss = sample_losses(predicted, noised, batch.mask)
        # noisy - sigma * flow is a picture: it is off by sigma times what the flow is off by.
        return loss * self._flow.sigmas(noised.timesteps) ** 2 if self._run.precondition_outputs else loss


load = SD3.load
