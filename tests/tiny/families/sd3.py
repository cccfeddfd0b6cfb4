"""SD 3.5 as its medium is: dual attention in the first block, queries and keys normed; its VAE has 16 channels, and a shift."""

from tests.tiny.facts import Tiny
from tests.tiny.parts import WORDS, clip_text, clip_tokenizer, t5_encoder, t5_tokenizer, vae


def _sd3():
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    tokenizer, tokenizer_2, tokenizer_3 = clip_tokenizer(WORDS), clip_tokenizer(WORDS, pad_token="!"), t5_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=48,
        caption_projection_dim=32, pooled_projection_dim=16 + 24, out_channels=16, pos_embed_max_size=24, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    return StableDiffusion3Pipeline(
        vae=vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0, latent_channels=16),
        text_encoder=clip_text(tokenizer, projection=True, layers=2), tokenizer=tokenizer,
        text_encoder_2=clip_text(tokenizer_2, projection=True, layers=2, act="gelu", width=24), tokenizer_2=tokenizer_2,
        text_encoder_3=t5_encoder(tokenizer_3, width=48), tokenizer_3=tokenizer_3,
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip


def _encode(pipeline, captions):
    captions = list(captions)
    states, _, pooled, _ = pipeline.encode_prompt(captions, captions, captions, do_classifier_free_guidance=False, max_sequence_length=32)
    return {"states": states, "pooled": pooled}


MODELS = {
    "sd3": Tiny(
        family="sd3",
        build=_sd3,
        encode=_encode,
        keys=("model.diffusion_model.joint_blocks.0.context_block.adaLN_modulation.1.bias", "model.diffusion_model.pos_embed"),
        run={"max_sequence_length": 32},
        drawing={"max_sequence_length": 32},
        hearing={"weighting_scheme": "logit_normal", "logit_mean": -3.0},
        foreign={
            "reads captions with T5": {"clip_skip": 1, "max_token_chunks": 2},
            "is trained by flow matching": {"prediction_type": "epsilon", "snr_gamma": 5.0, "noise_offset": 0.1},
            "has no such thing": {"guidance_scale": 2.0},
        },
        wrong={"precondition_outputs": [("maybe",)]},
    )
}
