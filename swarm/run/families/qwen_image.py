"""Qwen-Image: a transformer with a stream for pictures and one for text, told by a language model that reads pictures too (arXiv:2508.02324).

Also the later Qwen-Image-2512, which has the same parts; not Qwen-Image-2.1, nor those that edit pictures. Licence: Apache 2.0.
"""

from swarm.run.family import Family, Layers, Names, TextEncoder
from swarm.run.texts import T5Text

_PREFIX = "model.diffusion_model."

FAMILY = Family(
    title="Qwen-Image",
    since="0.1.1",
    pipeline="QwenImagePipeline",
    is_in_file=lambda names: {"txt_norm.weight", "transformer_blocks.0.txt_mod.1.weight"} <= {name.removeprefix(_PREFIX) for name in names},
    denoiser="transformer",
    blocks=("transformer_blocks",),
    patch=2,
    text_encoders={"text_encoder": TextEncoder(tokenizer="tokenizer", trainable=False, in_file=())},
    vae_factor=lambda config: 2 ** len(config["temperal_downsample"]),
    vae_in_file=(),
    learned_words=False,
    lora=("to_k", "to_q", "to_v", "to_out.0"),
    layers=Layers(
        attention=("to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"),
        feed_forward=("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
        linear=("img_mod.1", "txt_mod.1"),
    ),
    lora_processors=False,
    single_file=False,
    language_model="Qwen 2.5 VL",
    caption_tokens=512,
    loss="flow_matching",
    sections=(T5Text,),
    tag="qwen-image",
    called=lambda config, predicts_v: Names(architecture="Qwen-Image", version="qwen_image"),
    implementation="https://github.com/QwenLM/Qwen-Image",
    network="networks.lora_qwen_image",
    guidance=4.0,
    guided_by="true_cfg_scale",
    negative_prompts=True,
    ddim=False,
    half="bfloat16",
)
