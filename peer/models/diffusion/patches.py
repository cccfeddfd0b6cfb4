"""Flow matching on latents that are normalised in patches of 2x2 places, told a caption by a language model."""

import torch
from torch import Tensor

from peer.contracts import LatentBatch
from peer.models.diffusion.flow import FlowModel
from peer.models.diffusion.noising import sample_losses


class PatchFlowModel(FlowModel):
    """Latents are (B, 4 * C, h / 2, w / 2): each place has what 2x2 places of the VAE have, normalised by the VAE's batch norm. A family adds `encode_text`."""

    def scaled(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        norm, patches = self.vae.bn, self.pipeline._patchify_latents
        deviation = torch.sqrt(norm.running_var + self.vae.config.batch_norm_eps).view(1, -1, 1, 1)
        return (patches(mean) - norm.running_mean.view(1, -1, 1, 1)) / deviation, patches(std) / deviation

    def loss(self, batch: LatentBatch, rng: torch.Generator) -> Tensor:
        """(B,) float32: the error of the flow, weighted by --weighting_scheme."""
        noised, states, device = self._flow(batch.latents, rng), batch.text["states"], batch.latents.device
        answer = self.denoiser(
            hidden_states=self.pipeline._pack_latents(noised.noisy),
            timestep=self._flow.sigmas(noised.timesteps),
            guidance=torch.full((len(states),), self._run.guidance_scale, device=device) if self.denoiser.config.guidance_embeds else None,
            encoder_hidden_states=states,
            txt_ids=self.pipeline._prepare_text_ids(states).to(device),
            img_ids=self.pipeline._prepare_latent_ids(noised.noisy).to(device),
            return_dict=False,
        )[0]
        # In one piece: a mean over a view in another order of memory has other last bits.
        return sample_losses(answer.transpose(1, 2).contiguous().view(batch.latents.shape), noised, batch.mask)
