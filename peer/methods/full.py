"""`--method full`: every parameter of the denoiser is trained, and with `--train_text_encoder` of the CLIP text encoders; the rest stays."""

from pathlib import Path

from peer.contracts import Model, Params
from peer.methods.shared.parts import freeze, plain, trained_parts
from swarm.run_config import RunConfig


def build(run: RunConfig) -> "Full":
    return Full(run)


class Full:
    """All of the UNet (or of a family's transformer), under the names that its state_dict gives them."""

    def __init__(self, run: RunConfig):
        self._run = run

    def whole(self, model: Model) -> list[str]:
        return trained_parts(model, self._run)

    def begin(self, model: Model) -> None:
        return None

    def attach(self, model: Model) -> Params:
        freeze(model)
        names = self.whole(model)
        for name in names:
            model.parts[name].float().train().requires_grad_(True)
        return {f"{name}.{plain(key)}": parameter for name in names for key, parameter in model.parts[name].named_parameters()}

    def export(self, model: Model, params: Params, folder: Path) -> None:
        """A diffusers folder of the whole pipeline; `params` are the model's own, so nothing is copied."""
        model.save(folder)
