"""A LoRA that others wrote, in diffusers' form or kohya's, as the parameters of a run."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from peer.contracts import Model, Params
from peer.methods.shared.adapters import layers
from peer.methods.shared.parts import plain
from peer.methods.shared.tensor_file import read
from swarm.errors import UserError
from swarm.run.adapters import targets
from swarm.run.methods.lora import there
from swarm.run_config import RunConfig

_SIDE = re.compile(r"[._](?:lora_linear_layer|lora)\.(down|up)\.weight$")
_CLIP = re.compile(r"\.self_attn\.to_(q|k|v|out)_lora\.")
"""What diffusers makes of kohya's names of CLIP."""
_ENDS = {".lora_A.weight": ".lora_A.default.weight", ".lora_B.weight": ".lora_B.default.weight"}


def read_lora(run: RunConfig, model: Model) -> dict[str, Tensor]:
    """Float32 tensors by the names of the run's parameters, as strong as the file has them at alpha = rank. Raises UserError."""
    path = there(run)
    try:
        tensors, header = read(path)
        unet = {"unet_config": model.parts[model.facts.denoiser].config} if model.facts.lora_processors else {}
        found = type(model.pipeline).lora_state_dict(_as_diffusers(_at_rank(tensors), run, model), **unet)
        tensors = found[0] if isinstance(found, tuple) else found
        scales = _scales(header)
    except UserError:
        raise
    except Exception as error:  # whatever diffusers and safetensors raise for a file that is none
        raise _unfit(path, f"{type(error).__name__} in diffusers") from error
    given = {}
    for key, tensor in tensors.items():
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


def _as_diffusers(tensors: dict[str, Tensor], run: RunConfig, model: Model) -> dict[str, Tensor]:
    """Layers of original checkpoints under kohya's names as those of diffusers, of which several may be in one; any other file as it is. Raises UserError."""
    facts = model.facts
    if not facts.original or not any(name.startswith("lora_") for name in tensors):
        return tensors  # diffusers converts what has its own names, and knows the original ones of FLUX at the real width alone
    prefixes = {part: prefix for part, prefix in facts.prefixes.items() if part in model.parts}
    trained = {*layers(model.parts[facts.denoiser], targets(run, facts))}
    found, left = {}, {name for name in tensors if not name.endswith(".alpha")}
    for part, prefix in prefixes.items():
        linear = [name for name, module in model.parts[part].named_modules() if isinstance(module, nn.Linear)]
        known = {facts.original_layer(name) if part == facts.denoiser else (f"text_model.{plain(name)}", (name,)) for name in linear}
        for place, names in known:
            ends = [f"{prefix}_{place.replace('.', '_')}.lora_{side}.weight" for side in ("down", "up")]
            if ends[0] not in tensors:
                continue
            left -= {*ends}
            outputs = [model.parts[part].get_submodule(name).out_features for name in names]
            for name, down, up in _split(tensors[ends[0]], tensors[ends[1]], run.rank, dict(zip(names, outputs, strict=True)), trained):
                if name.endswith(facts.swapped) and len(up) == 2 * down.shape[1]:
                    up = torch.cat(up.chunk(2)[::-1])
                found |= {f"{part}.{name}.lora_A.weight": down, f"{part}.{name}.lora_B.weight": up}
    if left:
        raise UserError(f"The LoRA of --lora_weights has {min(left)}, which this model does not have.", fix="Check that it was made for it.")
    return found


def _split(down: Tensor, up: Tensor, rank: int, outputs: Mapping[str, int], trained: Collection[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The layers in one, each with its number of outputs: all with the same first matrix, or each with its own part of it, as `dd-export` writes them.

    A layer that adds nothing, and that the run does not train, was not trained when the file was written. Raises UserError.
    """
    ups = {name: own for name, own in zip(outputs, up.split([*outputs.values()]), strict=True) if name in trained or own.any()}
    if len(down) == rank:
        yield from ((name, down, own) for name, own in ups.items())
        return
    columns = {name: slice(number * rank, (number + 1) * rank) for number, name in enumerate(ups)}
    if len(ups) * rank != len(down) or any(ups[name].count_nonzero() != ups[name][:, own].count_nonzero() for name, own in columns.items()):
        raise UserError(f"The LoRA of --lora_weights has layers of rank {len(down)} and of rank {rank}.", fix="Give one whose layers all have the same rank and alpha.")
    yield from ((name, down[own], ups[name][:, own]) for name, own in columns.items())


def _scales(header: Mapping[str, str]) -> dict[str, float]:
    """What each part's second matrices are multiplied with, as diffusers has it in the file's header. Raises UserError where layers differ in it."""
    said = json.loads(header.get("lora_adapter_metadata", "{}"))
    if any(value for name, value in said.items() if name.endswith(("alpha_pattern", "rank_pattern"))):
        raise UserError("The LoRA of --lora_weights has layers of several ranks or alphas.", fix="Give one whose layers all have the same rank and alpha.")
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
