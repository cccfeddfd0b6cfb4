"""FLUX.2 klein, 4B and 9B, base and distilled: FLUX.2's transformer told by three layers of a Qwen 3, and nothing of guidance.

Licence: 4B Apache 2.0; 9B FLUX Non-Commercial License.
"""

from swarm.run.families.flux2 import LAYERS, LORA, is_transformer
from swarm.run.family import Family, TextEncoder
from swarm.run.texts import T5Text

FAMILY = Family(
    title="FLUX.2 klein",
    since="0.1.1",
    pipeline="Flux2KleinPipeline",
    is_in_file=lambda names: is_transformer(names, guided=False),
    denoiser="transformer",
    patch=2,
    text_encoders={"text_encoder": TextEncoder(tokenizer="tokenizer", trainable=False, in_file=())},
    vae_in_file=(),
    learned_words=False,
    lora=LORA,
    layers=LAYERS,
    lora_processors=False,
    kohya=False,
    single_file=False,
    language_model="Qwen 3",
    caption_tokens=512,
    loss="flow_matching",
    sections=(T5Text,),
    tag="flux2-klein",
    guidance=4.0,  # the base models'; the pipeline of a distilled one passes it over
    negative_prompts=True,
    ddim=False,
    half="bfloat16",
)
