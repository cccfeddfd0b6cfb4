"""FLUX.2 klein, 4B and 9B, base and distilled: FLUX.2's transformer told by three layers of a Qwen 3, and nothing of guidance.

Licence: 4B Apache 2.0; 9B FLUX Non-Commercial License.
"""

from collections.abc import Mapping
from typing import Any

from swarm.run.families.flux2 import LAYERS, LORA, ORIGINAL, is_transformer
from swarm.run.family import Family, Names, TextEncoder
from swarm.run.texts import T5Text


def _called(config: Mapping[str, Any], predicts_v: bool) -> Names:
    size = "4b" if config["num_attention_heads"] <= 24 else "9b"
    return Names(architecture=f"Flux.2-klein-{size}", version=f"flux_2_klein_{size}")


FAMILY = Family(
    title="FLUX.2 klein",
    since="0.1.1",
    pipeline="Flux2KleinPipeline",
    is_in_file=lambda names: is_transformer(names, guided=False),
    denoiser="transformer",
    blocks=("transformer_blocks", "single_transformer_blocks"),
    patch=2,
    text_encoders={"text_encoder": TextEncoder(tokenizer="tokenizer", trainable=False, in_file=())},
    vae_in_file=(),
    learned_words=False,
    lora=LORA,
    layers=LAYERS,
    lora_processors=False,
    original=ORIGINAL,
    single_file=False,
    language_model="Qwen 3",
    caption_tokens=512,
    loss="flow_matching",
    sections=(T5Text,),
    tag="flux2-klein",
    called=_called,
    implementation="https://github.com/black-forest-labs/flux2",
    network="networks.lora_flux_2",
    guidance=4.0,  # the base models'; the pipeline of a distilled one passes it over
    negative_prompts=True,
    ddim=False,
    half="bfloat16",
)
