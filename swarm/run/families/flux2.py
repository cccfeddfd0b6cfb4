"""FLUX.2 dev: a transformer told by three layers of a Mistral 3, and by how strongly it is to be guided.

Licence: FLUX Non-Commercial License.
"""

from collections.abc import Collection

from swarm.run.families.flux import ATTENTION, Options
from swarm.run.family import Family, Layers, Names, TextEncoder
from swarm.run.texts import T5Text


def is_transformer(names: Collection[str], *, guided: bool) -> bool:
    """Whether a file with tensors of these names has FLUX.2's transformer, in the original names or in diffusers'."""
    shared = ("single_stream_modulation.lin.weight", "single_stream_modulation.linear.weight")  # by all single blocks
    guidance = ("guidance_in.in_layer.weight", "guidance_embedder.linear_1.weight")
    return any(name.endswith(shared) for name in names) and guided == any(name.endswith(guidance) for name in names)


LORA = ("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj", "attn.to_out")
"""The layers that diffusers' scripts train. `attn.to_out` is a single block's: in double blocks it is no layer, but a list of one."""
LAYERS = Layers(
    attention=(*LORA, "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out"),
    feed_forward=("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"),
)

ORIGINAL = {
    "transformer_blocks": (
        "double_blocks",
        {
            **ATTENTION,
            "img_mlp.0": ("ff.linear_in",),
            "img_mlp.2": ("ff.linear_out",),
            "txt_mlp.0": ("ff_context.linear_in",),
            "txt_mlp.2": ("ff_context.linear_out",),
        },
    ),
    "single_transformer_blocks": ("single_blocks", {"linear1": ("attn.to_qkv_mlp_proj",), "linear2": ("attn.to_out",)}),
}


FAMILY = Family(
    title="FLUX.2",
    since="0.1.1",
    pipeline="Flux2Pipeline",
    is_in_file=lambda names: is_transformer(names, guided=True),
    denoiser="transformer",
    blocks=("transformer_blocks", "single_transformer_blocks"),
    patch=2,  # a token is 2x2 of the VAE's places
    text_encoders={"text_encoder": TextEncoder(tokenizer="tokenizer", trainable=False, in_file=())},
    vae_in_file=(),
    learned_words=False,
    lora=LORA,
    layers=LAYERS,
    lora_processors=False,
    original=ORIGINAL,
    single_file=False,
    language_model="Mistral 3",
    caption_tokens=512,
    loss="flow_matching",
    sections=(T5Text, Options),
    tag="flux2",
    called=lambda config, predicts_v: Names(architecture="Flux.2-dev", version="flux_2_dev"),
    implementation="https://github.com/black-forest-labs/flux2",
    network="networks.lora_flux_2",
    guidance=4.0,
    negative_prompts=False,
    ddim=False,
    half="bfloat16",
)
