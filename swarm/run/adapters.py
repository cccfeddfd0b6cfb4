"""What adapters have in common, LoRA and its like: which layers they take, and how large they are. No method of its own."""

import json
from collections.abc import Mapping
from typing import Any

from swarm.errors import UserError
from swarm.options import nearest, option, options
from swarm.run.family import Family, family_named

CHOICES = {
    "attention": lambda layers: layers.attention,
    "attention+ff": lambda layers: (*layers.attention, *layers.feed_forward),
    "all-linear": lambda layers: (*layers.attention, *layers.feed_forward, *layers.linear),
    "all-linear+conv": lambda layers: layers.all,
}


@options
class Options:
    """Of adapters."""

    rank: int = option(4, "Rank of the matrices of each layer.", ge=1, section="the methods loha, lokr and lora")
    lora_alpha: float = option(0.0, "What the layers add is scaled by lora_alpha / rank; 0: the rank, so by 1.")
    lora_targets: str = option(
        "auto",
        f"The layers: {', '.join(CHOICES)}, or the ends of their names, such as to_q,to_k. The run keeps the names, not the word. "
        "auto: those that diffusers' scripts take.",
        found_out=True,
        since="0.1.1",
        unsaid="",
    )


def targets(run: Any, family: Family) -> tuple[str, ...]:
    """The ends of the names of the layers that are trained. Raises UserError for a choice that the family does not have."""
    chosen = run.lora_targets
    if chosen not in ("", "auto", *CHOICES):
        return tuple(dict.fromkeys(chosen.replace(",", " ").split()))
    parts = family.trained(run.train_text_encoder)
    if chosen == "all-linear+conv" and not family.layers.convolutions:
        raise UserError(f"lora_targets is {chosen}, but {family.name} has no convolutions.", fix="Use all-linear.")
    pick = CHOICES.get(chosen, CHOICES["attention"])
    usual = family.lora if chosen not in CHOICES else ()
    return tuple(
        dict.fromkeys(name for part, layers in parts.items() for name in (usual if part == family.denoiser and usual else pick(layers)))
    )


def resolve(run: Any) -> Mapping[str, Any]:
    """The names that stand for a choice, where the family is known."""
    family = family_named(run.family)
    return {"lora_targets": " ".join(targets(run, family))} if family and run.lora_targets else {}


def check_with(run: Any, family: Family) -> None:
    """Raises UserError for layers that the family's parts do not have."""
    names, parts = targets(run, family), family.trained(run.train_text_encoder)
    known = {name for layers in parts.values() for name in layers.all}
    for name in names:
        if name not in known:
            raise UserError(
                f"lora_targets names '{name}', but no trained layer of {family.name} ends with that.{nearest(name, known)}",
                fix=f"Use {', '.join(CHOICES)}, or some of {' '.join(sorted(known))}.",
            )
    for part, layers in parts.items():
        if not {*names} & {*layers.all}:
            raise UserError(
                f"lora_targets names no layer of the {part}, which this run trains.", fix=f"Add some of {' '.join(layers.all)}."
            )


def lycoris(run: Any, algorithm: str) -> Mapping[str, Any]:
    """What LyCORIS says of an adapter in the header of its file."""
    return {"module": "lycoris.kohya", **sizes(run), "args": json.dumps({"algo": algorithm})}


def alpha(run: Any) -> float:
    return run.lora_alpha or run.rank


def sizes(run: Any) -> Mapping[str, Any]:
    return {"dim": run.rank, "alpha": float(alpha(run))}


def loading(pipeline: str, base: str, run: Any, suffix: str) -> str:
    """Of an adapter that diffusers itself does not read: peft does, part by part."""
    family = family_named(run.family)
    parts = family.trained(run.train_text_encoder) if family else ()
    lines = [f'PeftModel.from_pretrained(pipeline.{part}, "THIS_FOLDER", subfolder="{part}")' for part in parts]
    return "\n".join(
        [
            f'from diffusers import {pipeline}\nfrom peft import PeftModel\n\npipeline = {base}',
            *lines,
            "# ComfyUI loads lycoris.safetensors, like a LoRA",
        ]
    )
