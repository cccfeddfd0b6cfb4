"""Stable Diffusion 3 and 3.5, medium and large: a transformer told by two CLIPs, by their embeddings of the whole caption, and by T5.

Licence: Stability AI Community License, which asks for more above one million dollars a year.
"""

from collections.abc import Mapping
from typing import Any

from swarm.options import option, options
from swarm.run.family import CLIP_LAYERS, Family, Layers, Names, TextEncoder
from swarm.run.texts import T5Text

_ATTENTION = (
    *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0"),
    *("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out"),
)


@options
class Options:
    """Of the loss."""

    precondition_outputs: bool = option(
        True,
        "Compare pictures, as diffusers' script does: the loss of the flow times the square of the share of noise. Else the flow itself.",
        section="the family sd3",
        since="0.1.1",
        unsaid=True,
    )


def _called(config: Mapping[str, Any], predicts_v: bool) -> Names:
    size = "medium" if not config["qk_norm"] else "5-medium" if config["dual_attention_layers"] else "5-large"
    return Names(architecture=f"stable-diffusion-3-{size}", version=size)


FAMILY = Family(
    title="Stable Diffusion 3",
    since="0.1.1",
    pipeline="StableDiffusion3Pipeline",
    is_in_file=lambda names: any(name.endswith("joint_blocks.0.context_block.adaLN_modulation.1.bias") for name in names),
    denoiser="transformer",
    blocks=("transformer_blocks",),
    patch=2,
    text_encoders={
        "text_encoder": TextEncoder(tokenizer="tokenizer", trainable=True, in_file=("text_encoders.clip_l.",), layers=CLIP_LAYERS),
        "text_encoder_2": TextEncoder(tokenizer="tokenizer_2", trainable=True, in_file=("text_encoders.clip_g.",), layers=CLIP_LAYERS),
        "text_encoder_3": TextEncoder(tokenizer="tokenizer_3", trainable=False, in_file=("text_encoders.t5xxl.",), optional=True),
    },
    learned_words=False,
    lora=_ATTENTION,
    layers=Layers(
        attention=(*_ATTENTION, "attn2.to_k", "attn2.to_q", "attn2.to_v", "attn2.to_out.0"),  # the latter in 3.5 medium
        feed_forward=("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
        linear=("norm1.linear", "norm1_context.linear"),
    ),
    lora_processors=False,
    original={
        "transformer_blocks": (
            "joint_blocks",
            {
                "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
                "x_block.attn.proj": ("attn.to_out.0",),
                "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
                "x_block.attn2.proj": ("attn2.to_out.0",),
                "x_block.mlp.fc1": ("ff.net.0.proj",),
                "x_block.mlp.fc2": ("ff.net.2",),
                "x_block.adaLN_modulation.1": ("norm1.linear",),
                "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
                "context_block.attn.proj": ("attn.to_add_out",),
                "context_block.mlp.fc1": ("ff_context.net.0.proj",),
                "context_block.mlp.fc2": ("ff_context.net.2",),
                "context_block.adaLN_modulation.1": ("norm1_context.linear",),
            },
        )
    },
    swapped=("norm1_context.linear",),
    single_file=False,
    caption_tokens=256,
    loss="flow_matching",
    sections=(T5Text, Options),
    # 3.5 was trained with 256 tokens at most: beyond, artifacts are possible (its model card).
    defaults={"weighting_scheme": "logit_normal", "max_sequence_length": 256},
    tag="stable-diffusion-3",
    called=_called,
    implementation="https://github.com/Stability-AI/sd3.5",
    network="networks.lora_sd3",
    guidance=4.5,
    negative_prompts=True,
    ddim=False,
    half="bfloat16",
)
