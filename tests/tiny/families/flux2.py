"""FLUX.2 dev: 30 layers of Mistral 3 are read, which has one more."""

from tests.tiny.facts import Tiny
from tests.tiny.parts import mistral3, mistral_tokenizer, narrow_latents, patched_vae


def transformer(**options):
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=24,
        timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4), **options,
    )  # fmt: skip


def scheduler():
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def scale(vae) -> None:
    from diffusers import Flux2Pipeline

    patches = Flux2Pipeline._patchify_latents(narrow_latents(vae)).transpose(0, 1).flatten(1)
    vae.bn.running_mean.copy_(patches.mean(1))
    vae.bn.running_var.copy_(patches.var(1))


def decoded(pipeline, latents):
    norm, config = pipeline.vae.bn, pipeline.vae.config
    deviation = (norm.running_var + config.batch_norm_eps).sqrt()
    return pipeline._unpatchify_latents(latents * deviation.view(1, -1, 1, 1) + norm.running_mean.view(1, -1, 1, 1))


def _flux2():
    from diffusers import Flux2Pipeline
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    tokenizer = mistral_tokenizer(SYSTEM_MESSAGE)
    return Flux2Pipeline(
        vae=patched_vae(),
        text_encoder=mistral3(tokenizer, layers=31),
        tokenizer=tokenizer,
        transformer=transformer(),
        scheduler=scheduler(),
    )


def _encode(pipeline, captions):
    return {"states": pipeline.encode_prompt(list(captions), max_sequence_length=48)[0]}


FOREIGN = {
    "is trained by flow matching": {"prediction_type": "epsilon", "snr_gamma": 5.0, "noise_offset": 0.1},
    "has no such thing": {"precondition_outputs": False},
}
MODELS = {
    "flux2": Tiny(
        family="flux2",
        build=_flux2,
        encode=_encode,
        scale=scale,
        decoded=decoded,
        keys=("single_stream_modulation.lin.weight", "guidance_in.in_layer.weight"),
        run={"max_sequence_length": 48},
        drawing={"max_sequence_length": 48},
        hearing={"weighting_scheme": "logit_normal", "logit_mean": -3.0},
        foreign={**FOREIGN, "reads captions with Mistral 3": {"clip_skip": 1, "max_token_chunks": 2}},
    )
}
