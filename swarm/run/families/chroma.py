"""Chroma: FLUX.1 without CLIP and guidance, told by T5 alone, whose padding it does not read.

Licence: Apache 2.0.
"""

from dataclasses import replace

from swarm.run.families import flux
from swarm.run.family import Family, Names, TextEncoder
from swarm.run.texts import T5Text

FAMILY = Family(
    title="Chroma",
    since="0.1.1",
    pipeline="ChromaPipeline",
    is_in_file=lambda names: any(name.endswith("distilled_guidance_layer.in_proj.bias") for name in names),
    denoiser="transformer",
    blocks=("transformer_blocks", "single_transformer_blocks"),
    patch=2,  # a token is 2x2 latents
    text_encoders={
        "text_encoder": TextEncoder(tokenizer="tokenizer", trainable=False, in_file=("text_encoders.t5xxl.",), vectors=("t5xxl", "t5")),
    },
    learned_words=True,
    lora=flux.FAMILY.lora,
    layers=replace(flux.FAMILY.layers, linear=()),  # what modulates its blocks is computed before them
    lora_processors=False,
    original=flux.FAMILY.original,
    outputs=flux.FAMILY.outputs,
    single_file=False,
    caption_tokens=512,
    loss="flow_matching",
    sections=(T5Text,),
    tag="chroma",
    called=lambda config, predicts_v: Names(architecture="chroma", version="chroma"),
    implementation="https://huggingface.co/lodestones/Chroma",
    network="networks.lora_flux",
    guidance=5.0,
    negative_prompts=True,
    ddim=False,
    half="bfloat16",
)
