"""The model card of a result: a README.md in the Hub's form, for people who find the folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from swarm.run.family import family_named

if TYPE_CHECKING:
    from peer.results.result import Result

_KINDS = {
    "full": ("a full fine-tune", ["diffusers-training"]),
    "lora": ("LoRA weights", ["diffusers-training", "lora"]),
    "textual_inversion": ("a textual inversion embedding", ["diffusers-training", "textual_inversion"]),
}


def write_card(folder: Path, about: "Result") -> None:
    """Write `folder`/README.md: what is known and no more. Which licence a result has is for who publishes it to say."""
    from huggingface_hub import ModelCardData

    run, family = about.run, family_named(about.run.family)
    header = ModelCardData(
        library_name="diffusers",
        base_model=about.base_on_hub or None,
        instance_prompt=run.placeholder_token or None,
        tags=[family.tag if family else "diffusers", "text-to-image", "diffusers", *_KINDS.get(run.method, ("", []))[1]],
    )
    (folder / "README.md").write_text(f"---\n{header.to_yaml()}\n---\n{_description(about)}", encoding="utf-8")


def _description(about: "Result") -> str:
    run = about.run
    base = about.base_on_hub or Path(run.model).name or "a local model"
    kind = _KINDS.get(run.method, ("a result", []))[0]
    facts = {
        "base model": base,
        "data": about.dataset or "not named",
        "run": run.run_name,
        "samples trained": f"{about.samples:,}",
        "rounds": f"{about.round:,}",
        "resolution": f"{run.resolution} px",
        "learning rate": f"{run.learning_rate:g}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""
# {run.run_name}

These are {kind} of `{base}`, trained with distributed-diffusion.

| | |
|---|---|
{table}

## How to load it

```python
{_loading(about, base)}
```

No licence was stated for these weights. That of the base model may say what is allowed.
"""


def _loading(about: "Result", base: str) -> str:
    run, family = about.run, family_named(about.run.family)
    pipeline = family.pipeline if family else "DiffusionPipeline"
    if run.method == "full":
        return f'from diffusers import {pipeline}\n\npipeline = {pipeline}.from_pretrained("THIS_FOLDER")'
    lines = [f"from diffusers import {pipeline}", "", f'pipeline = {pipeline}.from_pretrained("{base}")']
    if run.method == "lora":
        return "\n".join([*lines, 'pipeline.load_lora_weights("THIS_FOLDER")'])
    lines.append('pipeline.load_textual_inversion("THIS_FOLDER", weight_name="learned_embeds.safetensors")')
    for name, encoder in [*family.text_encoders.items()][1:] if family else ():
        file, its = f"learned_embeds{name.removeprefix('text_encoder')}", f"text_encoder=pipeline.{name}, tokenizer=pipeline.{encoder.tokenizer}"
        lines.append(f'pipeline.load_textual_inversion("THIS_FOLDER", weight_name="{file}.safetensors", {its})')
    return "\n".join([*lines, f'picture = pipeline("a photo of {run.placeholder_token}").images[0]'])
