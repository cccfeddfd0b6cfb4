"""Stable Diffusion 1.x and 2.x: a UNet told by one text encoder, OpenAI's CLIP in 1.x and OpenCLIP's in 2.x."""

from collections.abc import Mapping
from typing import Any

from swarm.run.family import CLIP, CLIP_LAYERS, OPEN_CLIP, UNET_LAYERS, Family, Names, TextEncoder
from swarm.run.texts import ClipText


def _called(config: Mapping[str, Any], predicts_v: bool) -> Names:
    second = config["cross_attention_dim"] == 1024  # OpenCLIP's width
    size = "v2-768-v" if predicts_v else "v2-512"
    return Names(architecture=f"stable-diffusion-{size if second else 'v1'}", version=f"sd_v{1 + second}{'_v' * predicts_v}")


FAMILY = Family(
    title="Stable Diffusion",
    since="0.1.0",
    pipeline="StableDiffusionPipeline",
    unused={"safety_checker": None, "requires_safety_checker": False},
    is_in_file=lambda names: "model.diffusion_model.input_blocks.0.0.weight" in names and any(n.startswith("cond_stage_model.") for n in names),
    denoiser="unet",
    text_encoders={
        "text_encoder": TextEncoder(
            tokenizer="tokenizer",
            trainable=True,
            layers_above=0,
            in_file=("cond_stage_model.",),
            layers=CLIP_LAYERS,
            layouts={CLIP: "cond_stage_model.transformer.text_model.", OPEN_CLIP: "cond_stage_model.model."},
        ),
    },
    learned_words=True,
    layers=UNET_LAYERS,
    lora_processors=True,
    single_file=True,
    caption_tokens=77,
    loss="denoising",
    sections=(ClipText,),
    tag="stable-diffusion",
    called=_called,
    implementation="https://github.com/Stability-AI/generative-models",
    guidance=7.5,
    negative_prompts=True,
    ddim=True,
    half="float16",
)
