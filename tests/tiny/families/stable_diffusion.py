"""SD 1.x and SD 2.x. sd2v: v-prediction with zero-terminal SNR."""

from tests.tiny.facts import Tiny
from tests.tiny.parts import WORDS, clip_text, clip_tokenizer, ddpm, unet, vae


def pipeline(autoencoder, encoder, tokenizer, denoiser, scheduler):
    from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline(
        vae=autoencoder, text_encoder=encoder, tokenizer=tokenizer, unet=denoiser, scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def _sd():
    tokenizer = clip_tokenizer(WORDS)
    return pipeline(vae(), clip_text(tokenizer, layers=2), tokenizer, unet(16), ddpm())


def _sd2v():
    tokenizer = clip_tokenizer(WORDS, pad_token="!")
    encoder = clip_text(tokenizer, layers=2, act="gelu")
    return pipeline(
        vae(), encoder, tokenizer, unet(16, attention_head_dim=[2, 4], use_linear_projection=True), ddpm("v_prediction", zero_snr=True)
    )


def _encode(pipeline, captions):
    return {"states": pipeline.encode_prompt(list(captions), pipeline.device, 1, False)[0]}


_KEYS = ("model.diffusion_model.input_blocks.0.0.weight", "cond_stage_model.transformer.text_model.final_layer_norm.weight")
_FOREIGN = {"has no such thing": {"weighting_scheme": "mode", "guidance_scale": 2.0, "logit_mean": 1.0}}
MODELS = {
    "sd": Tiny(
        family="stable_diffusion",
        build=_sd,
        encode=_encode,
        keys=_KEYS,
        hearing={"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
        foreign=_FOREIGN,
    ),
    "sd2v": Tiny(family="stable_diffusion", build=_sd2v, encode=_encode, keys=_KEYS, foreign=_FOREIGN),
}
