"""A LoRA that others wrote, in diffusers' form or kohya's, as the parameters of a run."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from peer.contracts import Model, Params
from peer.methods.shared.parts import plain
from swarm.digest import digest_bytes
from swarm.errors import UserError
from swarm.run.methods.lora import file_of
from swarm.run_config import RunConfig

_SIDE = re.compile(r"[._](?:lora_linear_layer|lora)\.(down|up)\.weight$")
_CLIP = re.compile(r"\.self_attn\.to_(q|k|v|out)_lora\.")
"""What diffusers makes of kohya's names of CLIP."""
_ENDS = {".lora_A.weight": ".lora_A.default.weight", ".lora_B.weight": ".lora_B.default.weight"}


def read_lora(run: RunConfig, model: Model) -> dict[str, Tensor]:
    """Float32 tensors by the names of the run's parameters, as strong as the file has them at alpha = rank. Raises UserError."""
    path = _there(run)
    try:
        tensors, header = _read(path)
        unet = {"unet_config": model.parts[model.facts.denoiser].config} if model.facts.lora_processors else {}
        found = type(model.pipeline).lora_state_dict(_at_rank(tensors), **unet)
        layers = found[0] if isinstance(found, tuple) else found
        scales = _scales(header)
    except UserError:
        raise
    except Exception as error:  # whatever diffusers and safetensors raise for a file that is none
        raise _unfit(path, f"{type(error).__name__} in diffusers") from error
    given = {}
    for key, tensor in layers.items():
        name = _name(key)
        scale = scales.get(key.split(".")[0], 1.0) if ".lora_B." in name else 1.0
        given[name] = tensor.float() * scale if scale != 1 else tensor.float()
        if not given[name].isfinite().all():
            raise _unfit(path, f"{key} has numbers that are not finite")
    return given


@torch.no_grad()
def fill(params: Params, given: Mapping[str, Tensor], scale: float) -> None:
    """Let `params`, whose second matrices the run multiplies by `scale`, begin as `given`. Raises UserError unless these are the same layers."""
    fix = "Choose its layers with --lora_targets, --train_text_encoder and --use_dora; or it was made for another model."
    for names, what in (
        (given.keys() - params.keys(), "has {}, which the run does not train"),
        (params.keys() - given.keys(), "lacks {}, which the run trains"),
    ):
        if names:
            raise UserError(f"The LoRA of --lora_weights {what.format(min(names))}, and {len(names) - 1} more.", fix=fix)
    for name, parameter in params.items():
        if given[name].squeeze().shape != parameter.squeeze().shape:
            raise UserError(f"The LoRA of --lora_weights has {name} of another shape.", fix=fix)
        parameter.copy_((given[name] / scale if ".lora_B." in name and scale != 1 else given[name]).view_as(parameter))


def _there(run: RunConfig) -> Path:
    """Raises UserError when the file is not here, or is not the run's."""
    try:
        path = file_of(run.lora_weights)
        is_its = digest_bytes(path.read_bytes()) == run.lora_weights_digest
    except (UserError, OSError, ValueError, RuntimeError):  # a place may be anything
        path, is_its = None, False
    if not is_its:
        raise UserError(
            f"The run begins with the LoRA {run.lora_weights}, and {'there is none' if path is None else 'that file is another'} here.",
            fix="Ask the host for it, and give it with --lora_weights FILE.",
        )
    return path


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _at_rank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """kohya's layers with their scale in them, so that each alpha is the rank."""
    result = dict(tensors)
    if any(name.endswith(".dora_scale") for name in tensors):
        raise UserError(
            "The LoRA of --lora_weights is a DoRA in kohya's form, which diffusers does not read.", fix="Give it in diffusers' form."
        )
    for name in [name for name in tensors if name.endswith(".alpha")]:
        up, down = (f"{name.removesuffix('alpha')}lora_{side}.weight" for side in ("up", "down"))
        rank = len(tensors[down])
        result |= {up: tensors[up].float() * (tensors[name].item() / rank), name: torch.tensor(float(rank))}
    return result


def _scales(header: Mapping[str, str]) -> dict[str, float]:
    """What each part's second matrices are multiplied with, as diffusers has it in the file's header. Raises UserError where layers differ in it."""
    said = json.loads(header.get("lora_adapter_metadata", "{}"))
    if any(value for name, value in said.items() if name.endswith(("alpha_pattern", "rank_pattern"))):
        raise UserError("The LoRA of --lora_weights has layers of several ranks or alphas.", fix="Give one whose layers have the same.")
    if any(value for name, value in said.items() if name.endswith("use_rslora")):
        raise UserError("The LoRA of --lora_weights is scaled by the root of its rank (rslora).", fix="Give one that is scaled by the rank.")
    return {name.split(".")[0]: said[name] / said[name.replace("lora_alpha", "r")] for name in said if name.endswith(".lora_alpha")}


def _name(key: str) -> str:
    """A tensor's name in diffusers' older forms, kohya's as diffusers converts them included, or in peft's, as that of the run's parameter."""
    key = _CLIP.sub(r".self_attn.\1_proj.lora.", key).replace(".processor.", ".").replace(".to_out_lora.", ".to_out.0.lora.")
    part, _, key = _SIDE.sub(lambda match: f".lora_{'A' if match[1] == 'down' else 'B'}.weight", key).partition(".")
    for end, ours in _ENDS.items():
        key = key.replace(end, ours)
    if ".lora_magnitude_vector" in key:
        key = key.split(".lora_magnitude_vector")[0] + ".lora_magnitude_vector.default.weight"
    return f"{part}.{plain(key)}"


def _unfit(path: Path, why: str) -> UserError:
    return UserError(f"{path} does not load as a LoRA of this model: {why}.", fix="Check that it was made for it, and is whole.")
