"""`--format lora_diffusers` and `lora_kohya`: LoRA weights in one file, under diffusers' names or those of kohya's scripts and A1111."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peer.results.loading import LORA
from peer.results.result import read_result
from swarm import files
from swarm.errors import UserError
from swarm.run.family import Family, families, family_named

_PARTS = {
    "lora_unet": next(family.denoiser for family in families().values() if family.kohya),
    **{f"lora_te{number}": name for family in families().values() for number, name in enumerate(family.text_encoders, start=1)},
}
"""kohya's prefix of each part's names, as diffusers writes them."""


def write_lora_diffusers(result: Path, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """The result's own file, with its header."""
    tensors, header = _read(result)
    _save({name: tensor.to(dtype) for name, tensor in tensors.items()}, path, header)


def write_lora_kohya(result: Path, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Raises UserError for families that diffusers does not convert."""
    from diffusers.utils import convert_state_dict_to_kohya

    tensors, header = _read(result)
    others = [family.title for family in _families(result, tensors) if not family.kohya]
    if others:
        raise UserError(
            f"A {' or '.join(others)} LoRA is not written in kohya's form.", fix="Use --format lora_diffusers, which ComfyUI, Forge and others read as it is."
        )
    if any("lora_magnitude_vector" in name for name in tensors):
        raise UserError(
            "A DoRA is not written in kohya's form: ComfyUI would divide by other lengths than it was trained with, and draw something else.",
            fix="Use --format single_file, with the DoRA in the model's weights, or --format diffusers.",
        )
    kohya = convert_state_dict_to_kohya(_as_peft(tensors))
    alphas = json.loads(header.get("lora_adapter_metadata", "{}"))
    for name in kohya:
        if name.endswith(".alpha"):
            kohya[name] = torch.tensor(float(alphas.get(f"{_part(name)}.lora_alpha", kohya[name])))
    if not any(name.startswith("lora_te2_") for name in kohya):
        # Where there is one text encoder, kohya calls it so, and passes over what is called otherwise without a word.
        kohya = {name.replace("lora_te1_", "lora_te_", 1): tensor for name, tensor in kohya.items()}
    _save({name: tensor if name.endswith(".alpha") else tensor.to(dtype) for name, tensor in kohya.items()}, path, {"format": "pt"})


def _families(result: Path, tensors: Mapping[str, Tensor]) -> list[Family]:
    """The one that the result says, else those whose denoiser is called as the layers' names have it."""
    about = read_result(result)
    known = family_named(about.run.family) if about else None
    return [known] if known else [family for family in families().values() if any(name.startswith(f"{family.denoiser}.") for name in tensors)]


def _as_peft(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under peft's own names; results have the UNet's, and had the text encoders', under older ones of diffusers."""
    from diffusers.utils import convert_state_dict_to_peft, convert_unet_state_dict_to_peft
    from diffusers.utils.state_dict_utils import StateDictType

    return convert_state_dict_to_peft(convert_unet_state_dict_to_peft(tensors), StateDictType.DIFFUSERS)


def _part(name: str) -> str:
    return next(part for prefix, part in _PARTS.items() if name.startswith(prefix))


def _read(result: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import safe_open

    if not (result / LORA).is_file():
        raise UserError(f"{result} is no LoRA: it has no {LORA}.", fix="Use --format diffusers or single_file.")
    with safe_open(result / LORA, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, _without_places(file.metadata() or {})  # noqa: SIM118


def _without_places(header: dict[str, str]) -> dict[str, str]:
    """Results of 0.1.0 say where the base model lay on the machine that trained."""
    values = json.loads(header.get("lora_adapter_metadata", "{}"))
    places = {name: None for name in values if name.endswith("base_model_name_or_path")}
    return {**header, "lora_adapter_metadata": json.dumps({**values, **places})} if places else header


def _save(tensors: dict[str, Tensor], path: Path, header: dict[str, str]) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=header)
    files.as_new(path)
