from tests.tiny.facts import Tiny
from tests.tiny.parts import WORDS, clip_text, clip_tokenizer, ddpm, unet, vae


def _sdxl():
    from diffusers import StableDiffusionXLPipeline

    tokenizer, tokenizer_2 = clip_tokenizer(WORDS), clip_tokenizer(WORDS, pad_token="!")
    # The second encoder is wider, as in the real one: from_single_file tells the two apart by that.
    encoder_2 = clip_text(tokenizer_2, projection=True, layers=2, act="gelu", width=24)
    denoiser = unet(
        16 + 24, addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=6 * 8 + 24,
        transformer_layers_per_block=(1, 2), use_linear_projection=True,
    )  # fmt: skip
    return StableDiffusionXLPipeline(
        vae=vae(), text_encoder=clip_text(tokenizer, layers=2), text_encoder_2=encoder_2,
        tokenizer=tokenizer, tokenizer_2=tokenizer_2, unet=denoiser, scheduler=ddpm(), force_zeros_for_empty_prompt=True, add_watermarker=False,
    )  # fmt: skip


def _encode(pipeline, captions):
    states, _, pooled, _ = pipeline.encode_prompt(list(captions), device=pipeline.device, do_classifier_free_guidance=False)
    return {"states": states, "pooled": pooled}


MODELS = {
    "sdxl": Tiny(
        family="sdxl",
        build=_sdxl,
        encode=_encode,
        keys=(
            "model.diffusion_model.input_blocks.0.0.weight",
            "conditioner.embedders.0.transformer.text_model.final_layer_norm.weight",
            "conditioner.embedders.1.model.ln_final.weight",
        ),
        hearing={"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
        foreign={"has no such thing": {"weighting_scheme": "mode", "guidance_scale": 2.0, "logit_mean": 1.0}},
    )
}
