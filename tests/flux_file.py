"""A FLUX pipeline, or Chroma's transformer, in one file under the original names: the transformer alone, as most are, or with text encoders and VAE, as ComfyUI's are."""

import inspect
import re
from pathlib import Path

import torch
from torch import Tensor

from peer.results.forms.single_file import vae_name

_ENDS = {
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "context_embedder": "txt_in",
    "x_embedder": "img_in",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_DOUBLE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
}
_SINGLE = {"norm.linear": "modulation.lin", "proj_out": "linear2", "attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm"}
_JOINED = {  # several of diffusers' layers are one there
    "double_blocks": {
        "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    },
    "single_blocks": {"linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")},
}


def transformer_tensors(transformer) -> dict[str, Tensor]:
    """The transformer's tensors, FLUX's or Chroma's, under the original names, without a prefix."""
    ours, found = transformer.state_dict(), {}
    for name, tensor in ours.items():
        if match := re.fullmatch(r"(single_)?transformer_blocks\.(\d+)\.(.+)\.(weight|bias)", name):
            kind, names = ("single_blocks", _SINGLE) if match[1] else ("double_blocks", _DOUBLE)
            block, layer, end = f"{kind}.{match[2]}", match[3], match[4]
            if layer in names:
                found[f"{block}.{names[layer]}.{'scale' if 'norm_' in layer else end}"] = tensor
            for joined, layers in _JOINED[kind].items():
                if layer == layers[0]:
                    parts = [ours[name.replace(f".{layer}.", f".{part}.")] for part in layers]
                    found[f"{block}.{joined}.{end}"] = torch.cat(parts)
        elif name.startswith("distilled_guidance_layer."):
            scale = re.sub(r"(norms\.\d+)\.weight", r"\1.scale", name)
            found[scale.replace("linear_1", "in_layer").replace("linear_2", "out_layer")] = tensor
        else:
            layer, end = name.rsplit(".", 1)
            halves = tensor.chunk(2)
            found[f"{_ENDS[layer]}.{end}"] = torch.cat(halves[::-1]) if layer == "norm_out.linear" else tensor
    return found


def whole_tensors(pipeline) -> dict[str, Tensor]:
    """All of the pipeline's tensors as ComfyUI's checkpoints have them."""
    found = {f"model.diffusion_model.{name}": tensor for name, tensor in transformer_tensors(pipeline.transformer).items()}
    for name, tensor in pipeline.text_encoder.state_dict().items():
        found[f"text_encoders.clip_l.transformer.text_model.{name.removeprefix('text_model.')}"] = tensor
    for name, tensor in pipeline.text_encoder_2.state_dict().items():
        if name != "encoder.embed_tokens.weight":  # shared.weight again
            found[f"text_encoders.t5xxl.transformer.{name}"] = tensor
    levels = len(pipeline.vae.config.block_out_channels)
    return found | {f"vae.{vae_name(name, levels)}": tensor for name, tensor in pipeline.vae.state_dict().items()}


def write(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Path:
    from safetensors.torch import save_file

    save_file({name: tensor.detach().to(dtype).contiguous() for name, tensor in tensors.items()}, path)
    return path


def converter(width: int, family: str = "flux"):
    """diffusers' own reader of the transformer's names, which knows the real model's width only, for one of another width."""
    from diffusers.loaders import single_file_utils

    name = f"convert_{family}_transformer_checkpoint_to_diffusers"
    source = inspect.getsource(getattr(single_file_utils, name))
    assert "inner_dim = 3072" in source
    names = dict(vars(single_file_utils))
    exec(source.replace("inner_dim = 3072", f"inner_dim = {width}"), names)
    return names[name]
