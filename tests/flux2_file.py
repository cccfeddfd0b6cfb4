"""FLUX.2's transformer in one file under the original names."""

import re

import torch
from torch import Tensor

_ENDS = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_DOUBLE = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
_SINGLE = {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2", "attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm"}
_JOINED = {  # three of diffusers' layers are one there
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}


def transformer_tensors(transformer) -> dict[str, Tensor]:
    ours, found = transformer.state_dict(), {}
    for name, tensor in ours.items():
        layer, end = name.rsplit(".", 1)
        if match := re.fullmatch(r"(single_)?transformer_blocks\.(\d+)\.(.+)", layer):
            kind, names = ("single_blocks", _SINGLE) if match[1] else ("double_blocks", _DOUBLE)
            block, layer = f"{kind}.{match[2]}", match[3]
            if layer in names:
                found[f"{block}.{names[layer]}.{'scale' if 'norm_' in layer else end}"] = tensor
            for joined, layers in _JOINED.items():
                if layer == layers[0]:
                    found[f"{block}.{joined}.{end}"] = torch.cat([ours[name.replace(f".{layer}.", f".{part}.")] for part in layers])
        else:
            found[f"{_ENDS[layer]}.{end}"] = torch.cat(tensor.chunk(2)[::-1]) if layer == "norm_out.linear" else tensor
    return found
