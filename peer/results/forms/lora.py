"""`--format lora_diffusers` and `lora_kohya`: LoRA weights in one file, under diffusers' names or those of kohya's scripts."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from peer.methods.shared.tensor_file import read
from peer.results import header
from peer.results.loading import LORA
from peer.results.result import read_result
from swarm.errors import UserError
from swarm.run.family import Family, families, family_named

_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
Layer = tuple[Tensor, Tensor]
"""Its two matrices: (rank, inputs) and (outputs, rank), of convolutions with two dimensions more."""


def write_lora_diffusers(result: Path, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """The result's own file, with its header."""
    tensors, said = _read(result)
    header.save({name: tensor.to(dtype) for name, tensor in tensors.items()}, path, said)


def write_lora_kohya(result: Path, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Each layer's alpha is its rank, with the scale in its second matrix. Raises UserError for a DoRA, where nothing says which family the LoRA is of, and for what is none of it."""
    tensors, said = _read(result)
    family = _family(result, tensors)
    if any("lora_magnitude_vector" in name for name in tensors):
        raise UserError(
            "kohya's form cannot hold this DoRA: ComfyUI would divide by other lengths than the training did, and draw something else.",
            fix="Use --format single_file, with the DoRA in the model's weights, or --format diffusers.",
        )
    values = json.loads(said.pop("lora_adapter_metadata", "{}"))
    if any(value for name, value in values.items() if name.endswith(("alpha_pattern", "use_rslora"))):
        raise UserError(f"{result} has layers of different scales.", fix="Use --format lora_diffusers, which keeps them.")
    try:
        found = _layers(_as_peft(tensors), values, family)
    except Exception:  # whatever diffusers and torch raise for layers that no model of the family has
        found = {}
    if not found:
        raise UserError(
            f"{result} does not load as a LoRA of {family.title}.", fix="Use --format lora_diffusers, which copies it unchanged."
        )
    kohya = {}
    for place, (down, up) in found.items():
        ends = {"lora_down.weight": down.to(dtype), "lora_up.weight": up.to(dtype), "alpha": torch.tensor(float(len(down)))}
        kohya |= {f"{place}.{end}": tensor for end, tensor in ends.items()}
    header.save(kohya, path, {**(header.original(said, family) if family.original else said), "format": "pt"})


def _layers(tensors: dict[str, Tensor], values: Mapping[str, float], family: Family) -> dict[str, Layer]:
    """By kohya's names, at the strength that peft gives them: `lora_alpha` of their part over each layer's own rank."""
    result = {}
    for part, prefix in family.prefixes.items():
        layers = {}
        for key in [key for key in tensors if key.startswith(f"{part}.") and key.endswith(_DOWN)]:
            down, up = tensors.pop(key), tensors.pop(key.replace(_DOWN, _UP))
            scale = values.get(f"{part}.lora_alpha", len(down)) / len(down)
            layers[key.removeprefix(f"{part}.").removesuffix(_DOWN)] = down, up.float() * scale if scale != 1 else up
        own = as_original(layers, family) if part == family.denoiser else layers
        result |= {f"{prefix}_{name.replace('.', '_')}": layer for name, layer in own.items()}
    if tensors:
        raise ValueError(f"{min(tensors)} is in none of its layers")
    return result


def _family(result: Path, tensors: Mapping[str, Tensor]) -> Family:
    """The one that the result says, else the least one with the parts that the layers' names say, if all such have the same names."""
    about, parts = read_result(result), {name.split(".")[0] for name in tensors}
    known = family_named(about.run.family) if about else None
    found = [known] if known else [family for family in families().values() if family.denoiser in parts and parts <= {*family.parts}]
    if not found or any(family.original != found[0].original for family in found):
        raise UserError(f"{result} does not name its model family.", fix="Use --format lora_diffusers.")
    return min(found, key=lambda family: len(family.text_encoders))


def as_original(layers: Mapping[str, Layer], family: Family) -> dict[str, Layer]:
    """The denoiser's layers as original checkpoints have them: several of diffusers' may be one."""
    places: dict[tuple[str, tuple[str, ...]], dict[str, Layer]] = {}
    for name, (down, up) in layers.items():
        if name.endswith(family.swapped) and len(up) == 2 * down.shape[1]:
            up = torch.cat(up.chunk(2)[::-1])
        places.setdefault(family.original_layer(name), {})[name] = (down, up)
    return {name: _joined(parts, own, family) for (name, parts), own in places.items()}


def _joined(parts: tuple[str, ...], own: Mapping[str, Layer], family: Family) -> Layer:
    """One layer of all: each part's rank is its own, and the outputs of parts that are not trained stay as they are."""
    if len(parts) == 1:
        return own[parts[0]]
    outputs = {part: next((times for end, times in family.outputs.items() if part.endswith(f".{end}")), 1) for part in parts}
    name, (_, up) = next(iter(own.items()))
    once = len(up) // outputs[name]
    rows = [own[part][1] if part in own else up.new_zeros(once * outputs[part], 0) for part in parts]
    return torch.cat([own[part][0] for part in parts if part in own]), torch.block_diag(*rows)


def _as_peft(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under peft's own names; results have the UNet's, and had the text encoders', under older ones of diffusers."""
    from diffusers.utils import convert_state_dict_to_peft, convert_unet_state_dict_to_peft
    from diffusers.utils.state_dict_utils import StateDictType

    return convert_state_dict_to_peft(convert_unet_state_dict_to_peft(tensors), StateDictType.DIFFUSERS)


def _read(result: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not (result / LORA).is_file():
        raise UserError(f"{result} is not a LoRA: it has no {LORA}.", fix="Use --format diffusers or single_file.")
    try:
        tensors, said = read(result / LORA)
        return tensors, _without_places(said)
    except Exception:  # whatever safetensors and json raise for a file that is none
        raise UserError(f"{result / LORA} does not load as a LoRA.", fix="Fetch it again, or export it from its run.") from None


def _without_places(said: dict[str, str]) -> dict[str, str]:
    """Results of 0.1.0 say where the base model lay on the machine that trained."""
    values = json.loads(said.get("lora_adapter_metadata", "{}"))
    places = {name: None for name, _ in values.items() if name.endswith("base_model_name_or_path")}
    return {**said, "lora_adapter_metadata": json.dumps({**values, **places})} if places else said
