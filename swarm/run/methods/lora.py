"""Two narrow matrices beside each of the chosen layers."""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from swarm.digest import digest_bytes, read_header, read_metadata
from swarm.errors import UserError
from swarm.options import option, options
from swarm.run import adapters
from swarm.run.family import Family, family_named
from swarm.run.method import Method, TextEncoders

FILE = "pytorch_lora_weights.safetensors"
"""diffusers' name for it in a folder."""
_DOWN = re.compile(r"lora_A\.|lora_down\.|lora\.down\.|lora_linear_layer\.down\.")


@options
class Options:
    """Of a LoRA."""

    lora_init: str = option(
        "auto",
        "How the first matrix of each layer begins. gaussian: N(0, 1 / rank²), as in diffusers' scripts; uniform: within 1 / sqrt(inputs), "
        "which learns more slowly at small ranks; auto: gaussian.",
        choices=("auto", "gaussian", "uniform"),
        found_out=True,
        since="0.1.1",
        unsaid="uniform",
        section="the method lora",
    )
    use_dora: bool = option(
        False,
        "Train the length of each output's weights by itself, as in DoRA (arXiv:2402.09353): more like a full fine-tune at small ranks, and slower.",
        since="0.1.1",
        unsaid=False,
    )
    lora_weights: str = option(
        "",
        "Begin with this LoRA: a .safetensors file in diffusers' or kohya's form, or the folder of one. It has the run's layers; its rank is the run's.",
        since="0.1.1",
        unsaid="",
    )
    lora_weights_digest: str = option("", "Digest of that file; worked out by the founder.", since="0.1.1", unsaid="")
    lora_dropout: float = option(0.0, "Share of a layer's inputs that its matrices do not see in a step.", lt=1, since="0.1.1", unsaid=0.0)


def file_of(place: str) -> Path:
    """The file of a LoRA, named itself or by its folder. Raises UserError when there is none."""
    path = Path(place).expanduser()
    path = path / FILE if path.is_dir() else path
    if path.suffix != ".safetensors" or not path.is_file():
        raise UserError(
            f"lora_weights is {place}, and there is no such LoRA.", fix="Give a .safetensors file, or the folder that diffusers wrote."
        )
    return path


def there(run: Any) -> Path:
    """The file that a run begins with. Raises UserError when it is not here, or is not the run's."""
    try:
        path = file_of(run.lora_weights)
        is_its = digest_bytes(path.read_bytes()) == run.lora_weights_digest
    except (UserError, OSError, ValueError, RuntimeError):  # a place may be anything
        path, is_its = None, False
    if not is_its:
        raise UserError(
            f"The run begins with the LoRA {run.lora_weights}, and {'there is none' if path is None else 'that file is another'} here.",
            fix="Ask the host for it, and give it with --lora_weights FILE.",
        )
    return path


def _check_files(run: Any) -> None:
    if run.lora_weights_digest:
        there(run)


def _joined(family: Family | None) -> Callable[[str], int]:
    """How many of diffusers' layers are in one of a file in kohya's form, each of which may have a part of its rank."""
    layers = [layers for _, layers in family.original.values()] if family else []
    ends = {f"_{name.replace('.', '_')}.": len(parts) for each in layers for name, parts in each.items()}
    return lambda name: max((count for end, count in ends.items() if end in name), default=1)


def _rank(found: Mapping[str, int], said: str | None, joined: Callable[[str], int]) -> int:
    """That of all layers by their ranks in the file: what its header says, where each layer has that, or as many times that as it may be several; else the one of all; 0: none."""
    least = min(found.values(), default=0)
    rank = next((rank for rank in range(1, least + 1) if str(rank) == said), 0)
    if rank and all(each % rank == 0 and each // rank <= joined(name) for name, each in found.items()):
        return rank
    return least if len({*found.values()}) == 1 else 0


def _found(run: Any, given: Collection[str]) -> Mapping[str, Any]:
    """Rank and digest of the LoRA that the run begins with. Raises UserError for a file that is none, or of another rank than was given."""
    if not run.lora_weights and run.lora_weights_digest:
        raise UserError("lora_weights_digest has no effect without lora_weights.", fix="Add --lora_weights, or remove it.")
    if not run.lora_weights:
        return {}
    path = file_of(run.lora_weights)
    found = {name: rank for name, tensor in read_header(path).items() if _DOWN.search(name) and (rank := (*tensor["shape"], 0)[0])}
    rank = _rank(found, read_metadata(path).get("ss_network_dim"), _joined(family_named(run.family)))
    if not rank:
        raise UserError(f"lora_weights is {path}, which has layers of {len({*found.values()})} ranks.", fix="Give a LoRA whose layers are of one rank.")
    if "rank" in given and run.rank != rank:
        raise UserError(f"rank is {run.rank}, but {path} has {rank}.", fix="Remove --rank: it is read from the file.")
    digest = digest_bytes(path.read_bytes())
    if run.lora_weights_digest not in ("", digest):
        raise UserError(
            f"lora_weights_digest is {run.lora_weights_digest[:16]}, but {path} has {digest[:16]}.",
            fix="Give the LoRA that the run began with.",
        )
    return {"rank": rank, "lora_weights_digest": digest}


def _resolve(run: Any) -> Mapping[str, Any]:
    return {**adapters.resolve(run), **({"lora_init": "gaussian"} if run.lora_init == "auto" else {})}


def _loading(pipeline: str, base: str, run: Any, suffix: str) -> str:
    others = "  # ComfyUI passes over a DoRA's lengths: give it the whole model (dd-export --format single_file)" if run.use_dora else ""
    return (
        f'from diffusers import {pipeline}\n\npipeline = {base}\n'
        f'pipeline.load_lora_weights("THIS_FOLDER"){others}'
    )


def _network(run: Any, family: Family) -> Mapping[str, Any]:
    return {"module": family.network, **adapters.sizes(run), "dropout": run.lora_dropout or None}


METHOD = Method(
    since="0.1.0",
    learning_rate=1e-4,
    sections=(TextEncoders, adapters.Options, Options),
    resolve=_resolve,
    found=_found,
    check_with=adapters.check_with,
    check_files=_check_files,
    adapter=True,
    network=_network,
    kind="LoRA weights",
    tags=("diffusers-training", "lora"),
    loading=_loading,
)
