"""`--method lora`: beside each of the chosen layers two narrow matrices are trained (Hu et al. 2021, arXiv:2106.09685).

The layers are peft's, under the names it gives them; the result is what diffusers' `load_lora_weights` reads.
"""

import re
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from peer.contracts import Model, Params
from peer.methods.shared.adapters import add_adapters, layers, shown, uniform
from peer.methods.shared.lora_file import fill, read_lora
from peer.methods.shared.parts import plain, trained_parts
from swarm.digest import seed_of
from swarm.run.adapters import alpha, targets
from swarm.run_config import RunConfig

_ATTENTION = re.compile(r"\.(to_q|to_k|to_v|to_out)(?:\.0)?\.lora\.")
_LENGTH = ".lora_magnitude_vector."
"""peft's word for what DoRA trains beside the two matrices."""
_SIDES = {".lora_A.": ".lora.down.", ".lora_B.": ".lora.up."}


def build(run: RunConfig) -> "Lora":
    return Lora(run)


class Lora:
    """LoRA on the denoiser, and with `--train_text_encoder` on the CLIP text encoders."""

    def __init__(self, run: RunConfig):
        self._run = run
        self._lengths: dict[str, Tensor] | None = None
        """Of a DoRA, by the layers' names: each output's, (outputs,) float32."""
        self._given: dict[str, Tensor] | None = None
        """Of the LoRA that the run begins with, by the parameters' names."""

    def whole(self, model: Model) -> tuple[str, ...]:
        return ()

    def begin(self, model: Model) -> None:
        """Measure the lengths of a DoRA, and read the LoRA that the run begins with."""
        self._measure(model)
        if self._run.lora_weights_digest:  # the place alone is any stranger's word, and no part of the run's id
            self._given = read_lora(self._run, model)

    def _measure(self, model: Model) -> None:
        ends = targets(self._run, model.facts) if self._run.use_dora else ()
        parts = {name: model.parts[name] for name in trained_parts(model, self._run)}
        found = {f"{name}.{plain(key)}": part.get_submodule(key) for name, part in parts.items() for key in layers(part, ends)}
        self._lengths = {name: _lengths(layer.weight) for name, layer in found.items()}

    def attach(self, model: Model) -> Params:
        from peft import LoraConfig

        if self._lengths is None:
            self._measure(model)
        config = partial(
            LoraConfig, r=self._run.rank, lora_alpha=alpha(self._run), lora_dropout=self._run.lora_dropout, use_dora=self._run.use_dora
        )
        params = add_adapters(model, trained_parts(model, self._run), targets(self._run, model.facts), config)
        for key, parameter in params.items():
            if _LENGTH in key:
                parameter.data.copy_(self._lengths[key.split(_LENGTH)[0]].view_as(parameter))
            else:
                _initialise(key, parameter, self._run)
        if self._given is not None:
            fill(params, self._given, alpha(self._run) / self._run.rank)
        return params

    def export(self, model: Model, params: Params, folder: Path) -> None:
        """`pytorch_lora_weights.safetensors`: the layers with their scale in them, so that alpha is the rank, under names that ComfyUI reads too."""
        from peft.utils import get_peft_model_state_dict

        options = {}
        for name in trained_parts(model, self._run):
            part = model.parts[name]
            tensors = _scaled(get_peft_model_state_dict(part), alpha(self._run) / self._run.rank)
            if name != model.facts.denoiser:
                tensors = _with_text_model(tensors)
            elif model.facts.lora_processors:
                tensors = _with_processors(tensors)
            options[f"{name}_lora_layers"] = tensors
            options[f"{name}_lora_adapter_metadata"] = _shown(part.peft_config["default"])
        type(model.pipeline).save_lora_weights(folder, **options)


def _lengths(weight: Tensor) -> Tensor:
    """(outputs,) float32: the length of each output's weights, rounded once.

    Every peer must have the same bits, and a sum depends on its order: here it is folded in halves, in float64, where squares of float32 are exact.
    """
    host = weight.detach() if weight.is_meta else weight.detach().cpu()  # without numbers where memory is counted
    sums = host.double().flatten(1).square()
    while (width := sums.shape[1]) > 1:
        sums = nn.functional.pad(sums, (0, width % 2))
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums[:, 0].sqrt().float()


@torch.no_grad()
def _initialise(name: str, parameter: nn.Parameter, run: RunConfig) -> None:
    """B is 0, so that training starts from the base model; A is drawn as --lora_init says.

    Every peer must have the same bits whatever its device, release and processor, so whole numbers are drawn for each tensor by
    its name, and each is rounded once.
    """
    if "lora_B" in name:
        parameter.zero_()
        return
    rng = torch.Generator().manual_seed(seed_of(run.seed, name))
    if run.lora_init == "gaussian":
        parameter.copy_(_normal(parameter.shape, rng) / run.rank)
        return
    parameter.copy_(uniform(parameter.shape, rng))


def _normal(shape: torch.Size, rng: torch.Generator) -> Tensor:
    """As good as N(0, 1): the sum of twelve uniform draws, whose variance is 1. Logarithms and cosines would differ between processors."""
    drawn = sum(torch.randint(-(2**20), 2**20, shape, generator=rng) for _ in range(12))
    return drawn.float() * 2.0**-21


def _scaled(layers: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The layers for readers that take alpha for the rank: ComfyUI and kohya's FLUX converter know alpha as a tensor only, diffusers from the header only."""
    return {key: tensor * scale if "lora_B" in key and scale != 1 else tensor for key, tensor in layers.items()}


def _with_text_model(layers: dict[str, Tensor]) -> dict[str, Tensor]:
    """CLIP's keys as `text_model.*`, with which every release of diffusers and other tools read them.

    A DoRA's lengths as peft has them in memory: without `.weight`, transformers 5 passes over them without a word.
    """
    ends = {key: ".weight" if key.endswith(_LENGTH.removesuffix(".")) else "" for key in layers}
    return {f"text_model.{plain(key)}{ends[key]}": tensor for key, tensor in layers.items()}


def _with_processors(layers: dict[str, Tensor]) -> dict[str, Tensor]:
    """A UNet's keys as `attn1.processor.to_q_lora.down` and `ff.net.2.lora.down`: the older of diffusers' names, which ComfyUI has in its list."""
    sides = re.compile("|".join(map(re.escape, _SIDES)))
    older = {sides.sub(lambda match: _SIDES[match[0]], key): tensor for key, tensor in layers.items()}
    return {_ATTENTION.sub(r".processor.\1_lora.", key): tensor for key, tensor in older.items()}


def _shown(config: object) -> dict:
    """peft's configuration as diffusers writes it into the file, of layers that have their scale in them: without the sets, which JSON lacks,
    paths of this machine, and dropout: diffusers puts layers onto a model without a word that they are only to be drawn with."""
    values = shown(config)
    return {**values, "lora_alpha": values["r"], "lora_dropout": 0.0}
