"""FLUX.1: a transformer told by T5, and by CLIP's embedding of the whole caption."""

from swarm.options import option, options
from swarm.run.family import CLIP_LAYERS, Family, Layers, Names, TextEncoder
from swarm.run.texts import T5Text

_ATTENTION = (
    *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0"),
    *("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out"),
)
_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")

_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
ATTENTION = {
    "img_attn.qkv": _QKV,
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn.proj": ("attn.to_add_out",),
}
"""Of a block with a stream for each of picture and text, by its original names."""


@options
class Options:
    """Of the transformer."""

    guidance_scale: float = option(
        3.5,
        "What the transformer's guidance embedding is told; 1 for checkpoints that were not distilled.",
        section="guidance that a transformer is told",
    )


FAMILY = Family(
    title="FLUX",
    since="0.1.0",
    pipeline="FluxPipeline",
    is_in_file=lambda names: any(name.endswith("double_blocks.0.img_mod.lin.weight") for name in names),
    denoiser="transformer",
    blocks=("transformer_blocks", "single_transformer_blocks"),
    patch=2,  # a token is 2x2 latents
    text_encoders={
        "text_encoder": TextEncoder(
            tokenizer="tokenizer",
            trainable=True,
            in_file=("text_encoders.clip_l.",),
            layers=CLIP_LAYERS,
            vectors=("clip_l",),
        ),
        "text_encoder_2": TextEncoder(
            tokenizer="tokenizer_2",
            trainable=False,
            in_file=("text_encoders.t5xxl.",),
            vectors=("t5xxl", "t5"),
        ),
    },
    learned_words=True,
    lora=(*_ATTENTION, *_FEED_FORWARD),
    layers=Layers(
        attention=_ATTENTION,
        feed_forward=(*_FEED_FORWARD, "proj_mlp", "proj_out"),
        linear=("norm1.linear", "norm1_context.linear", "norm.linear"),
    ),
    lora_processors=False,
    original={
        "transformer_blocks": (
            "double_blocks",
            {
                **ATTENTION,
                "img_mlp.0": ("ff.net.0.proj",),
                "img_mlp.2": ("ff.net.2",),
                "txt_mlp.0": ("ff_context.net.0.proj",),
                "txt_mlp.2": ("ff_context.net.2",),
                "img_mod.lin": ("norm1.linear",),
                "txt_mod.lin": ("norm1_context.linear",),
            },
        ),
        "single_transformer_blocks": (
            "single_blocks",
            {"linear1": (*_QKV, "proj_mlp"), "linear2": ("proj_out",), "modulation.lin": ("norm.linear",)},
        ),
    },
    outputs={"proj_mlp": 4},
    single_file=False,
    caption_tokens=512,
    loss="flow_matching",
    sections=(T5Text, Options),
    tag="flux",
    called=lambda config, predicts_v: Names(architecture=f"flux-1-{'dev' if config['guidance_embeds'] else 'schnell'}", version="flux1"),
    implementation="https://github.com/black-forest-labs/flux",
    network="networks.lora_flux",
    guidance=3.5,
    negative_prompts=False,
    ddim=False,
    half="bfloat16",  # in fp16 it draws black pictures
)
