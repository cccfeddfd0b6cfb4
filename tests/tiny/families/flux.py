from tests.tiny.facts import Tiny
from tests.tiny.parts import WORDS, clip_text, clip_tokenizer, t5_encoder, t5_tokenizer, vae


def _flux():
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    tokenizer, tokenizer_2 = clip_tokenizer(WORDS), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16,
        pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return FluxPipeline(
        vae=vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0), text_encoder=clip_text(tokenizer, layers=2),
        tokenizer=tokenizer, text_encoder_2=t5_encoder(tokenizer_2), tokenizer_2=tokenizer_2, transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip


def _encode(pipeline, captions):
    states, pooled, _ = pipeline.encode_prompt(list(captions), None, pipeline.device, max_sequence_length=32)
    return {"states": states, "pooled": pooled}


_CLIP = {"clip_skip": 1, "max_token_chunks": 2}
_DENOISING = {
    "prediction_type": "epsilon",
    "rescale_betas_zero_snr": True,
    "snr_gamma": 5.0,
    "noise_offset": 0.1,
    "input_perturbation": 0.1,
    "timestep_bias_strategy": "later",
}
MODELS = {
    "flux": Tiny(
        family="flux",
        build=_flux,
        encode=_encode,
        keys=("double_blocks.0.img_mod.lin.weight", "img_in.weight"),
        run={"max_sequence_length": 32},
        drawing={"max_sequence_length": 32},
        hearing={"weighting_scheme": "logit_normal", "logit_mean": 3.0},
        rate="1e-2",  # it hears captions late; its steps take a third of the others' time
        steps=150,
        foreign={"reads captions with T5": _CLIP, "is trained by flow matching": _DENOISING},
    )
}
