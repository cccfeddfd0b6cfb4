"""Qwen-Image: its VAE takes videos and has a mean and a deviation for each channel; the question before a caption is 34 tokens, as in the real one."""

import torch

from peer.models.diffusion.prompts import padded
from tests.tiny.facts import Tiny
from tests.tiny.parts import qwen25_vl, qwen_tokenizer


def _tokenizer(question):
    """Reads the question as 34 tokens, which the pipeline counts on: its first part as 29, then what follows."""
    tokenizer, first = qwen_tokenizer(128), question.removeprefix("<|im_start|>").partition("<|im_end|>")[0]
    tokenizer.add_tokens([first[len(first) * i // 29 : len(first) * (i + 1) // 29] for i in range(29)] + ["user\n"])
    return tokenizer


def _qwen_image():
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel

    pipeline = QwenImagePipeline(
        vae=AutoencoderKLQwenImage(base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False]),
        transformer=QwenImageTransformer2DModel(
            in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16, axes_dims_rope=(4, 6, 6)
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=1.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, base_image_seq_len=256, max_image_seq_len=8192, shift_terminal=0.02
        ),
        text_encoder=None, tokenizer=None,
    )  # fmt: skip
    tokenizer = _tokenizer(pipeline.prompt_template_encode.partition("{}")[0])
    pipeline.register_modules(tokenizer=tokenizer, text_encoder=qwen25_vl(tokenizer, width=16))
    return pipeline


def _encode(pipeline, captions):
    states, mask = pipeline.encode_prompt(list(captions), max_sequence_length=32)
    return padded([row[:length] for row, length in zip(states, mask.sum(1), strict=True)])


def _framed(pixels):
    return pixels.unsqueeze(2)


def _scale(vae):
    vae.decoder.conv_out.weight.mul_(5.0)  # its pictures are all but grey, and hide what was learned
    vae.quant_conv.bias[len(vae.quant_conv.bias) // 2 :] -= 10.0
    pixels = torch.rand(4, 3, 1, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = vae.encode(pixels).latent_dist.mean.transpose(0, 1).flatten(1)
    vae.register_to_config(latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist())


def _decoded(pipeline, latents):
    config = pipeline.vae.config
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (config.latents_mean, config.latents_std))
    return latents.unsqueeze(2) * std + mean


MODELS = {
    "qwen_image": Tiny(
        family="qwen_image",
        build=_qwen_image,
        encode=_encode,
        framed=_framed,
        scale=_scale,
        decoded=_decoded,
        keys=("transformer_blocks.0.txt_mod.1.weight", "txt_norm.weight"),
        run={"max_sequence_length": 32},
        drawing={"max_sequence_length": 32, "true_cfg_scale": 1.0},
        hearing={"weighting_scheme": "logit_normal", "logit_mean": -3.0},
        foreign={
            "reads captions with Qwen 2.5 VL": {"clip_skip": 1, "max_token_chunks": 2},
            "is trained by flow matching": {"prediction_type": "epsilon", "snr_gamma": 5.0, "noise_offset": 0.1},
            "has no such thing": {"guidance_scale": 2.0, "precondition_outputs": False},
        },
    )
}
