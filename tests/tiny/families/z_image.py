"""Z-Image: one block to refine the noise, one to refine the caption, and two for both; its VAE has 16 channels, and a shift."""

from peer.models.diffusion.prompts import padded
from tests.tiny.facts import Tiny
from tests.tiny.parts import qwen3, qwen_tokenizer, vae


def _z_image():
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    tokenizer = qwen_tokenizer()
    transformer = ZImageTransformer2DModel(
        dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16, axes_dims=[4, 6, 6], axes_lens=[128, 64, 64],
    )  # fmt: skip
    return ZImagePipeline(
        vae=vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0, latent_channels=16), text_encoder=qwen3(tokenizer, width=16).model,
        tokenizer=tokenizer, transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip


def _encode(pipeline, captions):
    return padded(pipeline.encode_prompt(list(captions), do_classifier_free_guidance=False, max_sequence_length=32)[0])


MODELS = {
    "z_image": Tiny(
        family="z_image",
        build=_z_image,
        encode=_encode,
        keys=("model.diffusion_model.noise_refiner.0.adaLN_modulation.0.weight", "model.diffusion_model.x_embedder.weight"),
        run={"max_sequence_length": 32},
        drawing={"max_sequence_length": 32},
        hearing={"weighting_scheme": "logit_normal", "logit_mean": -3.0},
        steps=50,
        foreign={
            "reads captions with Qwen 3": {"clip_skip": 1, "max_token_chunks": 2},
            "is trained by flow matching": {"prediction_type": "epsilon", "snr_gamma": 5.0, "noise_offset": 0.1},
            "has no such thing": {"guidance_scale": 2.0, "precondition_outputs": False},
        },
    )
}
