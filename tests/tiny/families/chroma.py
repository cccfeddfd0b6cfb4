"""Chroma, whose guidance is a network of its own."""

from tests.tiny.facts import Tiny
from tests.tiny.parts import t5_encoder, t5_tokenizer, vae


def _chroma():
    from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

    tokenizer = t5_tokenizer()
    transformer = ChromaTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6), approximator_num_channels=16, approximator_hidden_dim=32, approximator_layers=1,
    )  # fmt: skip
    return ChromaPipeline(
        vae=vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0), text_encoder=t5_encoder(tokenizer), tokenizer=tokenizer,
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip


def _encode(pipeline, captions):
    states, _, mask, *_ = pipeline.encode_prompt(list(captions), do_classifier_free_guidance=False, max_sequence_length=32)
    return {"states": states, "mask": mask}


MODELS = {
    "chroma": Tiny(
        family="chroma",
        build=_chroma,
        encode=_encode,
        keys=("distilled_guidance_layer.in_proj.bias", "img_in.weight"),
        run={"max_sequence_length": 32},
        drawing={"max_sequence_length": 32},
        hearing={"weighting_scheme": "logit_normal", "logit_mean": -3.0},
        foreign={
            "reads captions with T5": {"clip_skip": 1, "max_token_chunks": 2},
            "is trained by flow matching": {"prediction_type": "epsilon", "snr_gamma": 5.0, "noise_offset": 0.1},
            "has no such thing": {"guidance_scale": 2.0, "precondition_outputs": False},
        },
    )
}
