"""Z-Image and Z-Image-Turbo: a transformer that reads picture and caption as one sequence, told by a language model (arXiv:2511.22699).

Turbo is distilled to eight steps without guidance. It has the parts and the loss of the other; training it wears the distillation off.
Licence: Apache 2.0.
"""

from swarm.run.family import Family, Layers, Names, TextEncoder
from swarm.run.texts import T5Text

FAMILY = Family(
    title="Z-Image",
    since="0.1.1",
    pipeline="ZImagePipeline",
    is_in_file=lambda names: any(name.removeprefix("model.diffusion_model.") == "noise_refiner.0.adaLN_modulation.0.weight" for name in names),
    denoiser="transformer",
    blocks=("noise_refiner", "context_refiner", "layers"),
    patch=2,
    text_encoders={"text_encoder": TextEncoder(tokenizer="tokenizer", trainable=False, in_file=())},
    vae_in_file=(),  # diffusers reads the transformer of a file alone: that takes all tensors, the VAE's among them, for its own
    learned_words=False,
    # The attention of all blocks, those that refine the caption and the noise included: its layers end alike.
    layers=Layers(
        attention=("to_k", "to_q", "to_v", "to_out.0"),
        feed_forward=("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
        linear=("adaLN_modulation.0",),
    ),
    lora_processors=False,
    single_file=False,
    language_model="Qwen 3",
    caption_tokens=512,
    loss="flow_matching",
    sections=(T5Text,),
    tag="z-image",
    called=lambda config, predicts_v: Names(architecture="Z-Image", version="z_image"),
    implementation="https://github.com/Tongyi-MAI/Z-Image",
    network="networks.lora_zimage",
    guidance=4.0,  # of Z-Image, which its card puts at 3 to 5; Turbo is drawn with 0
    negative_prompts=True,
    ddim=False,
    half="bfloat16",
)
