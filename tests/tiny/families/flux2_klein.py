"""A base klein: 27 layers of Qwen 3 are read, which has one more."""

from tests.tiny.facts import Tiny
from tests.tiny.families.flux2 import FOREIGN, decoded, scale, scheduler, transformer
from tests.tiny.parts import patched_vae, qwen3, qwen_tokenizer


def _klein():
    from diffusers import Flux2KleinPipeline

    tokenizer = qwen_tokenizer()
    return Flux2KleinPipeline(
        vae=patched_vae(), text_encoder=qwen3(tokenizer, layers=28), tokenizer=tokenizer, transformer=transformer(guidance_embeds=False),
        scheduler=scheduler(),
    )  # fmt: skip


def _encode(pipeline, captions):
    return {"states": pipeline.encode_prompt(list(captions), max_sequence_length=64)[0]}


MODELS = {
    "klein": Tiny(
        family="flux2_klein",
        build=_klein,
        encode=_encode,
        scale=scale,
        decoded=decoded,
        keys=("single_stream_modulation.lin.weight", "img_in.weight"),
        run={"max_sequence_length": 64},
        drawing={"max_sequence_length": 64},
        hearing={"weighting_scheme": "logit_normal", "logit_mean": -3.0},
        foreign={
            "is trained by flow matching": FOREIGN["is trained by flow matching"],
            "has no such thing": {"guidance_scale": 2.0, "precondition_outputs": False},
            "reads captions with Qwen 3": {"clip_skip": 1, "max_token_chunks": 2},
        },
    )
}
