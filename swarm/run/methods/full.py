"""Every weight of the denoiser."""

from typing import Any

from swarm.run.method import Method, TextEncoders


def _loading(pipeline: str, base: str, run: Any, suffix: str) -> str:
    return f'from diffusers import {pipeline}\n\npipeline = {pipeline}.from_pretrained("THIS_FOLDER")'


METHOD = Method(
    since="0.1.0",
    learning_rate=5e-6,  # the original's; diffusers' 1e-4 wrecks it
    sections=(TextEncoders,),
    usual=True,
    whole=True,
    kind="a full fine-tune",
    tags=("diffusers-training",),
    loading=_loading,
)
