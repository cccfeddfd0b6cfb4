"""Two narrow matrices beside each of the attention's linear layers."""

from collections.abc import Mapping
from typing import Any

from swarm.options import option, options
from swarm.run.method import Method, TextEncoders


@options
class Options:
    """Of a LoRA."""

    rank: int = option(4, "Rank of the two matrices of each layer.", ge=1, section="the method lora")
    lora_alpha: float = option(0.0, "What the layers add is scaled by lora_alpha / rank; 0: the rank, so by 1.")
    lora_init: str = option(
        "auto",
        "How the first matrix of each layer begins. gaussian: N(0, 1 / rank²), as in diffusers' scripts; uniform: within 1 / sqrt(inputs), "
        "which learns more slowly at small ranks; auto: gaussian.",
        choices=("auto", "gaussian", "uniform"),
        found_out=True,
        since="0.1.1",
        unsaid="uniform",
    )


def _resolve(run: Any) -> Mapping[str, Any]:
    return {"lora_init": "gaussian"} if run.lora_init == "auto" else {}


def _loading(pipeline: str, base: str, run: Any) -> str:
    return (
        f'from diffusers import {pipeline}\n\npipeline = {pipeline}.from_pretrained("{base}")\n'
        'pipeline.load_lora_weights("THIS_FOLDER")'
    )


METHOD = Method(
    since="0.1.0",
    learning_rate=1e-4,
    sections=(TextEncoders, Options),
    resolve=_resolve,
    adapter=True,
    kind="LoRA weights",
    tags=("diffusers-training", "lora"),
    loading=_loading,
)
