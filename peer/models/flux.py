"""FLUX.1: a transformer trained by flow matching, told the caption by T5 and by CLIP's embedding of it as a whole."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peer.contracts import LatentBatch, Text
from peer.models.diffusion.flow import FlowModel
from peer.models.diffusion.noising import sample_losses
from peer.models.diffusion.prompts import t5_states, tokenize
from swarm.run.families.flux import FAMILY


class Flux(FlowModel):
    facts = FAMILY

    def encode_text(self, captions: Sequence[str]) -> Text:
        """{"states": (B, T, width of T5), "pooled": (B, width of CLIP)}, float32."""
        pipeline = self.pipeline
        ids = tokenize(pipeline, pipeline.tokenizer, captions)[:, 0].to(self.device)
        states = t5_states(pipeline, pipeline.tokenizer_2, pipeline.text_encoder_2, captions, self._run.max_sequence_length, self.device)
        return {"states": states.float(), "pooled": pipeline.text_encoder(ids).pooler_output.float()}

    def loss(self, batch: LatentBatch, rng: torch.Generator) -> Tensor:
        """(B,) float32: the error of the flow, weighted by --weighting_scheme."""
        latents, states = batch.latents, batch.text["states"]
        noised = self._flow(latents, rng)
        size, channels, height, width = latents.shape
        pack, device = self.pipeline._pack_latents, latents.device
        packed = self.denoiser(
            hidden_states=pack(noised.noisy, size, channels, height, width),
            timestep=self._flow.sigmas(noised.timesteps),
            guidance=torch.full((size,), self._run.guidance_scale, device=device) if self.denoiser.config.guidance_embeds else None,
            pooled_projections=batch.text["pooled"],
            encoder_hidden_states=states,
            txt_ids=torch.zeros(states.shape[1], 3, device=device),
            img_ids=self.pipeline._prepare_latent_image_ids(size, height // 2, width // 2, device, latents.dtype),
            return_dict=False,
        )[0]
        factor = self.vae_factor
        return sample_losses(self.pipeline._unpack_latents(packed, height * factor, width * factor, factor), noised, batch.mask)


load = Flux.load
