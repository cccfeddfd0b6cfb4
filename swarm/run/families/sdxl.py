"""Stable Diffusion XL: a UNet told by OpenAI's CLIP and by OpenCLIP's larger one."""

from swarm.run.family import CLIP, CLIP_LAYERS, OPEN_CLIP, UNET_LAYERS, Family, Names, TextEncoder
from swarm.run.texts import ClipText

FAMILY = Family(
    title="SDXL",
    since="0.1.0",
    pipeline="StableDiffusionXLPipeline",
    is_in_file=lambda names: any(name.startswith("conditioner.embedders.1.") for name in names),
    denoiser="unet",
    text_encoders={
        "text_encoder": TextEncoder(
            tokenizer="tokenizer",
            trainable=True,
            layers_above=1,
            in_file=("conditioner.embedders.0.",),
            layers=CLIP_LAYERS,
            vectors=("clip_l",),
            layouts={CLIP: "conditioner.embedders.0.transformer.text_model."},
        ),
        "text_encoder_2": TextEncoder(
            tokenizer="tokenizer_2",
            trainable=True,
            layers_above=1,
            in_file=("conditioner.embedders.1.",),
            layers=CLIP_LAYERS,
            vectors=("clip_g",),
            layouts={OPEN_CLIP: "conditioner.embedders.1.model."},
        ),
    },
    learned_words=True,
    layers=UNET_LAYERS,
    lora_processors=True,
    single_file=True,
    marks_prediction=True,
    caption_tokens=77,
    loss="denoising",
    sections=(ClipText,),
    tag="stable-diffusion-xl",
    called=lambda config, predicts_v: Names(architecture="stable-diffusion-xl-v1-base", version="sdxl_base_v1-0"),
    implementation="https://github.com/Stability-AI/generative-models",
    guidance=7.5,
    negative_prompts=True,
    ddim=True,
    half="float16",
)
