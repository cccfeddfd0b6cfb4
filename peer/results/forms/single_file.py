"""`--format single_file`: a whole pipeline in one .safetensors file, with the names of the original checkpoints that A1111 and ComfyUI read.

Families whose facts say so. diffusers reads such files (`from_single_file`) but does not write them.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from peer.results.header import save
from swarm.errors import UserError
from swarm.run.family import CLIP, OPEN_CLIP, Family, family_of_pipeline

_UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_OPEN_CLIP = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_OPEN_CLIP_ENDS = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}


def write_single_file(pipeline: Any, path: Path, dtype: torch.dtype = torch.float32, said: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write the pipeline's weights as one file, with a header. Raises UserError for a pipeline that has no such layout."""
    tensors = {name: tensor.detach().cpu().to(dtype).contiguous() for name, tensor in single_file_tensors(pipeline).items()}
    scheduler = pipeline.scheduler.config
    # By these two empty tensors ComfyUI and others know an SDXL model that predicts v; of SD 2.x they know it by its widths.
    if facts_of(pipeline).marks_prediction and scheduler.get("prediction_type") == "v_prediction":
        tensors["v_pred"] = torch.tensor([])
        if scheduler.get("rescale_betas_zero_snr"):
            tensors["ztsnr"] = torch.tensor([])
    save(tensors, path, {"format": "pt", **said})


def facts_of(pipeline: Any) -> Family:
    """Raises UserError for a pipeline that has no such layout."""
    kind = type(pipeline).__name__
    family = family_of_pipeline(kind)
    if family is None or not family.single_file:
        raise UserError(
            f"This program writes no single-file layout of a {kind}.",
            fix="Use --format diffusers, which ComfyUI and others read as well; a LoRA is best kept as --format lora_diffusers.",
        )
    return family


def single_file_tensors(pipeline: Any) -> dict[str, Tensor]:
    """The pipeline's tensors under their original names."""
    encoders = _text_encoders(pipeline)
    unet, vae = pipeline.unet, pipeline.vae
    layers = unet.config.layers_per_block
    attended = {number for number, block in enumerate(unet.up_blocks) if getattr(block, "attentions", None)}
    found = [(f"model.diffusion_model.{unet_name(name, layers, attended)}", tensor) for name, tensor in unet.state_dict().items()]
    levels = len(vae.config.block_out_channels)
    found += [(f"first_stage_model.{vae_name(name, levels)}", _as_conv(name, tensor)) for name, tensor in vae.state_dict().items()]
    found += [
        item for prefix, tensors in encoders for item in ((prefix + name, tensor) for name, tensor in tensors.items())
    ]
    tensors = dict(found)
    assert len(tensors) == len(found), "two tensors under one name"
    return tensors


def _text_encoders(pipeline: Any) -> list[tuple[str, Mapping[str, Tensor]]]:
    """How the names of each encoder's tensors begin, and the tensors, in the layout of OpenAI's CLIP or of OpenCLIP (gelu)."""
    found = []
    for name, facts in facts_of(pipeline).text_encoders.items():
        encoder = getattr(pipeline, name)
        of_openai = encoder.config.hidden_act == "quick_gelu" if len(facts.layouts) > 1 else CLIP in facts.layouts
        tensors = _clip(encoder)
        found.append((facts.layouts[CLIP], tensors) if of_openai else (facts.layouts[OPEN_CLIP], open_clip(tensors)))
    return found


def _clip(encoder: Any) -> dict[str, Tensor]:
    """Its tensors, without the prefix `text_model.` that some releases of transformers have; older ones kept the positions' numbers too."""
    tensors = {name.removeprefix("text_model."): tensor for name, tensor in encoder.state_dict().items()}
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("position_ids")}


def unet_name(name: str, layers: int, attended: Collection[int] = ()) -> str:
    """The original name of a tensor of a UNet with `layers` resnets a block; blocks are numbered through, a down- or upsampler last in each.

    attended: the numbers of the up blocks that have attention, behind which their upsampler stands.
    """
    for ours, theirs in _UNET_ENDS.items():
        if name.startswith(f"{ours}."):
            return theirs + name.removeprefix(ours)
    block = layers + 1
    if match := re.fullmatch(r"(down_blocks|up_blocks)\.(\d+)\.(resnets|attentions)\.(\d+)\.(.+)", name):
        where, level, kind, number, rest = match[1], int(match[2]), match[3], int(match[4]), match[5]
        start = f"input_blocks.{block * level + number + 1}" if where == "down_blocks" else f"output_blocks.{block * level + number}"
        return f"{start}.0.{_resnet(rest)}" if kind == "resnets" else f"{start}.1.{rest}"
    if match := re.fullmatch(r"down_blocks\.(\d+)\.downsamplers\.0\.conv\.(.+)", name):
        return f"input_blocks.{block * (int(match[1]) + 1)}.0.op.{match[2]}"
    if match := re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)", name):
        number = 2 * int(match[2])
        return f"middle_block.{number}.{_resnet(match[3])}" if match[1] == "resnets" else f"middle_block.{number + 1}.{match[3]}"
    if match := re.fullmatch(r"up_blocks\.(\d+)\.upsamplers\.0\.(.+)", name):
        level = int(match[1])
        return f"output_blocks.{block * level + layers}.{2 if level in attended else 1}.{match[2]}"
    raise UserError(f"The UNet's {name} has no place in a single file.", fix="Use --format diffusers.")


def _resnet(rest: str) -> str:
    part, _, end = rest.partition(".")
    return f"{_RESNET[part]}.{end}"


def vae_name(name: str, levels: int) -> str:
    """The original name of a tensor of a VAE; its decoder's levels are numbered from the other end."""
    name = re.sub(r"encoder\.down_blocks\.(\d+)\.resnets\.", r"encoder.down.\1.block.", name)
    name = re.sub(r"encoder\.down_blocks\.(\d+)\.downsamplers\.0\.", r"encoder.down.\1.downsample.", name)
    name = re.sub(r"decoder\.up_blocks\.(\d+)\.resnets\.", lambda match: f"decoder.up.{levels - 1 - int(match[1])}.block.", name)
    name = re.sub(r"decoder\.up_blocks\.(\d+)\.upsamplers\.0\.", lambda match: f"decoder.up.{levels - 1 - int(match[1])}.upsample.", name)
    name = re.sub(r"mid_block\.resnets\.(\d+)\.", lambda match: f"mid.block_{int(match[1]) + 1}.", name)
    for ours, theirs in _VAE_ATTENTION.items():
        name = name.replace(f"mid_block.attentions.0.{ours}.", f"mid.attn_1.{theirs}.")
    return name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")


def _as_conv(name: str, tensor: Tensor) -> Tensor:
    """The VAE's attention was made of 1x1 convolutions, in diffusers it is linear."""
    return tensor[..., None, None] if re.search(r"attentions\.0\.to_(q|k|v|out\.0)\.weight$", name) else tensor


def open_clip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CLIP's tensors as OpenCLIP has them: queries, keys and values in one, the projection transposed."""
    found = {}
    for name, tensor in tensors.items():
        if name == "text_projection.weight":
            found["text_projection"] = tensor.T
        elif name in _OPEN_CLIP_ENDS:
            found[_OPEN_CLIP_ENDS[name]] = tensor
        elif match := re.fullmatch(r"encoder\.layers\.(\d+)\.self_attn\.q_proj\.(weight|bias)", name):
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            found[f"transformer.resblocks.{match[1]}.attn.in_proj_{match[2]}"] = torch.cat(parts)
        elif match := re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name):
            if match[2] in _OPEN_CLIP:
                found[f"transformer.resblocks.{match[1]}.{_OPEN_CLIP[match[2]]}.{match[3]}"] = tensor
        else:
            raise UserError(f"The text encoder's {name} has no place in a single file.", fix="Use --format diffusers.")
    return found
