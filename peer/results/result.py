"""A result folder: what the method wrote, `result.json`, which says what it was made from, and a model card.

A LoRA or an embedding is nothing without its base model, so `result.json` names that: `dd-generate` and `dd-export` need only the folder.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer.contracts import Method, Model, Params
from peer.results.card import write_card
from peer.results.checkpoint import replacing
from peer.results.header import header, say
from swarm import files
from swarm.base_model import could_be_on_hub
from swarm.errors import ExitCode, UserError
from swarm.run.method import method_named, methods
from swarm.run_config import RunConfig
from swarm.run_identity import PLACES

log = logging.getLogger(__name__)

NAME = "result.json"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a result was made from: the run, and how far it had come."""

    run: RunConfig
    """`model` and `model_config` are absolute paths where they are folders or files of the machine that wrote it."""
    samples: int = 0
    round: int = 0
    dataset: str = ""
    """What the pictures are called, for people."""

    @classmethod
    def of(cls, run: RunConfig, **values: Any) -> "Result":
        given = {name: Path(os.path.expanduser(place)) for name in PLACES if (place := getattr(run, name))}
        places = {name: str(path.resolve()) for name, path in given.items() if path.exists()}
        return cls(run=dataclasses.replace(run, **places), **values)

    @property
    def base_on_hub(self) -> str:
        """The base model's id, '' when it is a folder or file."""
        return self.run.model if could_be_on_hub(self.run.model) else ""

    @property
    def base_name(self) -> str:
        """What the base model is called, for people: no path."""
        return self.base_on_hub or Path(self.run.model).name or "a local model"


@dataclass(frozen=True, kw_only=True)
class Form:
    """In which form a peer wants its result."""

    full_pipeline: bool = False
    """Of an embedding: write the whole pipeline as well, which knows the word."""
    safetensors: bool = True
    """Of an embedding: not torch's own format."""


def write_result(method: Method, model: Model, params: Params, target: Path, about: Result, form: Form = Form()) -> None:
    """Write the result; the one before stays until the new one is whole. Raises UserError when the disk is full."""
    with replacing(target) as folder:
        method.export(model, params, folder)
        say(folder, header(model, about))
        if method_named(about.run.method).has_forms:
            if form.full_pipeline:
                method.complete(model, params)
                model.save(folder)
            if not form.safetensors:
                _as_pickle(folder)
        (folder / NAME).write_text(json.dumps(_values(about), indent=2), encoding="utf-8")
        write_card(folder, about, ".safetensors" if form.safetensors else ".bin")
        tidy(folder)


def tidy(folder: Path) -> None:
    """Make what libraries wrote fit for others: without paths of this machine, and readable to whom the umask lets read."""
    _without_places(folder)
    for path in folder.rglob("*.safetensors"):
        files.as_new(path)


def _without_places(folder: Path) -> None:
    """diffusers notes where it read a model from, and peft what it adapted: paths of this machine, which whoever gets the folder would read."""
    for path in (*folder.glob("model_index.json"), *folder.glob("*/*.json")):
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict) and values.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_result(folder: Path) -> Result | None:
    """What a result folder says of itself; None when it is no result of ours. Raises UserError when it is damaged."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return Result(run=RunConfig.from_mapping(saved.pop("run"), where=str(path)), **saved)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path} is damaged.", fix="Export the result again, or name its base model yourself.", code=ExitCode.DISK
        ) from None


def warn_of_unused(form: Form, run: RunConfig) -> None:
    """One warning for wishes that this run's method has no use for."""
    wishes = {"--save_as_full_pipeline": form.full_pipeline, "--no_safe_serialization": not form.safetensors}
    unused = [name for name, wished in wishes.items() if wished]
    if unused and not method_named(run.method).has_forms:
        theirs = " and ".join(name for name, method in methods().items() if method.has_forms)
        log.warning("%s is for %s and does nothing with --method %s", " and ".join(unused), theirs, run.method)


def _as_pickle(folder: Path) -> None:
    """Embeddings in torch's own format, for tools that know no other."""
    import torch
    from safetensors.torch import load_file

    for path in folder.glob("learned_embeds*.safetensors"):
        torch.save(load_file(path), path.with_suffix(".bin"))
        path.unlink()


def public(about: Result) -> Mapping[str, Any]:
    """What strangers may read of it: no paths of this machine."""
    hidden = {name: "" for name in PLACES if getattr(about.run, name).startswith(("/", "~"))}
    return _values(dataclasses.replace(about, run=dataclasses.replace(about.run, **hidden)))


def _values(about: Result) -> dict[str, Any]:
    """For JSON: the run as it is sent, so that it keeps its id."""
    return {**dataclasses.asdict(about), "run": about.run.to_mapping()}
