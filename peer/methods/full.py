"""`--method full`: every parameter of the denoiser is trained; the VAE and the text encoder stay as they are."""

from pathlib import Path

from torch import nn

from peer.contracts import Model, Params
from swarm.run_config import RunConfig


def build(run: RunConfig) -> "Full":
    return Full()


class Full:
    """All of the UNet (or of a family's transformer), under the names that its state_dict gives them."""

    def attach(self, model: Model) -> Params:
        name = next(name for name in ("unet", "transformer") if name in model.parts)
        for part in model.parts.values():
            part.requires_grad_(False)
            part.eval()
        denoiser = model.parts[name].float().train().requires_grad_(True)
        params: Params = {f"{name}.{key}": parameter for key, parameter in denoiser.named_parameters()}
        assert all(isinstance(parameter, nn.Parameter) for parameter in params.values())
        return params

    def export(self, model: Model, params: Params, folder: Path) -> None:
        """A diffusers folder of the whole pipeline; `params` are the model's own, so nothing is copied."""
        model.save(folder)
