"""The model card of a result: a README.md in the Hub's form, for people who find the folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from swarm.base_model import shown_model
from swarm.run.family import Family, family_named
from swarm.run.method import method_named

if TYPE_CHECKING:
    from peer.results.result import Result


def write_card(folder: Path, about: "Result", suffix: str = ".safetensors") -> None:
    """Write `folder`/README.md: what is known and no more. Which licence a result has is for who publishes it to say.

    suffix: of the files in which what was trained is.
    """
    from huggingface_hub import ModelCardData

    run, family = about.run, family_named(about.run.family)
    header = ModelCardData(
        library_name="diffusers",
        base_model=about.base_on_hub or None,
        instance_prompt=run.placeholder_token or run.caption_prefix or None,
        tags=[family.tag if family else "diffusers", "text-to-image", "diffusers", *method_named(run.method).tags],
    )
    (folder / "README.md").write_text(f"---\n{header.to_yaml()}\n---\n{_description(about, suffix)}", encoding="utf-8")


def _description(about: "Result", suffix: str) -> str:
    run = about.run
    base = about.base_name
    kind = method_named(run.method).kind
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
{_loading(about, suffix)}
```

No licence was stated for these weights. That of the base model may say what is allowed.
"""


def _loading(about: "Result", suffix: str) -> str:
    run, family = about.run, family_named(about.run.family)
    pipeline = family.pipeline if family else "DiffusionPipeline"
    return method_named(run.method).loading(pipeline, _base(about, family, pipeline), run, suffix)


def _base(about: "Result", family: Family | None, pipeline: str) -> str:
    """Python that makes the base model's pipeline."""
    file, config = about.base_name, shown_model(about.run.model_config)
    if not file.endswith(".safetensors"):
        return f'{pipeline}.from_pretrained("{file}")'
    if family and not family.vae_in_file:  # a file of this family holds the denoiser alone
        part = f"pipeline.{family.denoiser}"
        its = f'type({part}).from_single_file("{file}", config="{config}", subfolder="{family.denoiser}")'
        return f'{pipeline}.from_pretrained("{config}")\n{part} = {its}'
    return f'{pipeline}.from_single_file("{file}"' + (f', config="{config}")' if config else ")")
