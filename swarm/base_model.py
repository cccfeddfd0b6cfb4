"""Which family a base model is of, read from its model_index.json or from a single file's keys; no weights are loaded."""

import json
import re
from pathlib import Path, PurePath

from swarm.digest import read_header
from swarm.errors import ExitCode, UserError
from swarm.run.family import families, family_of_pipeline, titles

AUTO = "auto"
"""`--family auto`: whoever founds the run finds out, so that nobody who joins has to guess."""
def not_found(model: str) -> UserError:
    """For a model that is neither on this machine nor given by the Hub. What the Hub's library says of it is long, and seldom the reason."""
    return UserError(
        f"There is no model '{model}' on this machine, and it could not be loaded from the Hub.",
        fix="Check the name and the network, and whether its licence must be accepted on the Hub (then HF_TOKEN); or give its folder with --model FOLDER.",
        code=ExitCode.NETWORK,
    )


def family_of(source: Path) -> str:
    """The family of a diffusers folder or a .safetensors file. Raises UserError when it is of none that is known."""
    return _family_of_file(source) if source.is_file() else _family_of_folder(source)


def _family_of_folder(folder: Path) -> str:
    try:
        name = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not a diffusers pipeline: it has no model_index.json.", fix="Give the folder that save_pretrained wrote."
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{folder / 'model_index.json'} does not name its pipeline.",
            fix="Fetch the model again, or name it there as diffusers does, by _class_name.",
        ) from None
    family = family_of_pipeline(name)
    if family is None:
        kinds = ", ".join(family.pipeline for family in families().values())
        raise UserError(f"{folder} is a {name}, which cannot be trained.", fix=f"Use a {kinds}.")
    return family.name


def _family_of_file(path: Path) -> str:
    """By names that only one of the original layouts has."""
    names = read_header(path).keys()
    for name, family in families().items():
        if family.is_in_file(names):
            return name
    raise UserError(
        f"{path} holds no {titles()} checkpoint.",
        fix="Give the whole checkpoint in one file, as A1111 and ComfyUI read it, or a diffusers folder.",
    )


def could_be_on_hub(model: str) -> bool:
    """Whether a model is named as the Hub names its own, OWNER/NAME; so may a folder be, but not `my-model/`."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model)) and not model.endswith(".safetensors")


def shown_model(model: str) -> str:
    """What people call a model: its Hub id, or the name of its file or folder; whoever watches a run need not know where that lies."""
    return model if could_be_on_hub(model) else PurePath(model).name
