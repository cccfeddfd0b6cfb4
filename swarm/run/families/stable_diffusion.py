"""Stable Diffusion 1.x and 2.x: a UNet told by one text encoder, OpenAI's CLIP in 1.x and OpenCLIP's in 2.x."""

from swarm.run.family import CLIP, CLIP_LAYERS, OPEN_CLIP, UNET_LAYERS, Family, TextEncoder
from swarm.run.texts import ClipText

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
    kohya=True,
    single_file=True,
    caption_tokens=77,
    loss="denoising",
    sections=(ClipText,),
    tag="stable-diffusion",
    guidance=7.5,
    negative_prompts=True,
    ddim=True,
    half="float16",
)
