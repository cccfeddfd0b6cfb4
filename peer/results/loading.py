"""Pipelines from results: a base model with what was trained on it, as plain diffusers puts them together."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from peer.methods.shared.tensor_file import read
from peer.models.diffusion.source import first_line, locate
from peer.results.result import Result, read_result
from swarm.errors import UserError
from swarm.founding import with_defaults, with_family
from swarm.run.family import family_of_pipeline
from swarm.run.method import Method, method_named, methods, usual
from swarm.run_config import RunConfig

LORA = "pytorch_lora_weights.safetensors"
PRODUCTS = "*/adapter_config.json"
"""Of adapters that diffusers does not read: peft's form, a folder for each part."""
EMBEDDINGS = ("learned_embeds.safetensors", "learned_embeds.bin")


def result_in(path: Path) -> Path:
    """The result's folder: `path` itself, or `model` in it when it is an --output_dir."""
    inner = path / "model"  # first: the links beside it have no result.json
    return inner if is_result(inner) else path


def is_result(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("model_index.json", LORA, *EMBEDDINGS)) or any(folder.glob(PRODUCTS))


def base_of(folder: Path, fix: str = "") -> Result | None:
    """What a LoRA's or an embedding's folder was made from; None when `folder` is a pipeline.

    Raises UserError when it does not say it, or its base model is not there; fix: what to do then, `dd-generate`'s way by default.
    """
    if not folder.is_dir() or (folder / "model_index.json").is_file() or not is_result(folder):
        return None
    about = read_result(folder)
    if about is None or not about.run.model:
        raise UserError(
            f"{folder} does not name its base model.", fix=fix or _elsewhere(folder)
        )
    try:
        locate(about.run.model)
    except UserError as error:
        raise UserError(
            f"The base model of {folder} is not there: {error.message}",
            fix=fix or _elsewhere(folder),
            code=error.code,
        ) from None
    return about


def run_on(model: str, model_config: str) -> RunConfig:
    """What is known of a run by its base model alone: the defaults of that one's family. Raises UserError."""
    return with_defaults(with_family(RunConfig(model=model, model_config=model_config), locate(model)))


def method_in(folder: Path) -> Method:
    """The method that left what is in a folder, by its files; of those whose result peft alone reads, the first."""
    if (folder / "model_index.json").is_file():
        return method_named(usual())
    product = any(folder.glob(PRODUCTS))
    lora = not product and (folder / LORA).is_file()
    kind = (False, lora, not lora and not product)
    return next(method for method in methods().values() if (method.whole, method.adapter, method.learns_words) == kind)


def _elsewhere(folder: Path) -> str:
    """What to do where the base model is not known."""
    if any(folder.glob(PRODUCTS)):
        return "Make one model of both by dd-export with --state, --model BASE and --out."
    return f"Give the base model with --model, and this folder with {'--lora' if (folder / LORA).is_file() else '--embedding'}."


def add_result(pipeline: Any, folder: Path) -> None:
    """Put what training left in a folder onto its base model's pipeline; what diffusers itself does not read is merged into the weights."""
    if any(folder.glob(PRODUCTS)):
        _merge_products(pipeline, folder)
    elif (folder / LORA).is_file():
        add_lora(pipeline, folder)
    else:
        add_embedding(pipeline, folder)


def add_lora(pipeline: Any, source: Path, name: str = "default") -> None:
    """LoRA weights from a file or a folder, in whatever form diffusers reads (its own, kohya's, ...). Raises UserError."""
    path = _there(source)
    path = path / LORA if path.is_dir() and (path / LORA).is_file() else path
    try:
        if path.is_dir():
            raise ValueError(f"it has no {LORA}")
        before = _layers(pipeline)
        pipeline.load_lora_weights(path.parent, weight_name=path.name, adapter_name=name, local_files_only=True)
        if _layers(pipeline) == before:
            raise ValueError("it has no layer that this model has")
    except Exception as error:  # whatever diffusers, peft and safetensors raise
        raise UserError(
            f"{source} does not load as a LoRA of this model: {first_line(error)}", fix="Check that it was made for it."
        ) from error


def _merge_products(pipeline: Any, folder: Path) -> None:
    from peft import PeftModel

    for place in sorted(folder.glob(PRODUCTS)):
        name = place.parent.name
        try:
            setattr(pipeline, name, PeftModel.from_pretrained(getattr(pipeline, name), place.parent).merge_and_unload())
        except Exception as error:  # whatever peft and safetensors raise
            raise UserError(
                f"{place.parent} does not load as an adapter of this model: {first_line(error)}", fix="Check that it was made for it."
            ) from error


def _layers(pipeline: Any) -> int:
    parts = [part for part in pipeline.components.values() if hasattr(part, "named_modules")]
    return sum(len(getattr(module, "lora_A", ())) for part in parts for module in part.modules())


def add_embedding(pipeline: Any, source: Path) -> str:
    """A word from a file or a folder that textual inversion wrote, here or elsewhere; the word. Raises UserError."""
    path = _there(source)
    try:
        if path.is_dir():
            found = [path / name for name in EMBEDDINGS if (path / name).is_file()]
            if not found:
                raise ValueError(f"it has no {EMBEDDINGS[0]}")
            path = found[0]
        word, vectors = read_embedding(path, _suffixes(pipeline))
        for suffix, file in files_beside(path).items():
            vectors |= {suffix: next(iter(read_embedding(file)[1].values()))}
        for suffix, tensor in vectors.items():
            encoder, tokenizer = (getattr(pipeline, name + suffix, None) for name in ("text_encoder", "tokenizer"))
            if encoder is None or tensor.shape[-1] != encoder.get_input_embeddings().weight.shape[-1]:
                raise ValueError("its vectors have another width than this model's words")
            pipeline.load_textual_inversion({word: tensor}, token=word, text_encoder=encoder, tokenizer=tokenizer)
        return word
    except Exception as error:
        raise UserError(
            f"{source} does not load as an embedding of this model: {first_line(error)}", fix="Check that it was made for it."
        ) from error


def files_beside(path: Path) -> dict[str, Path]:
    """The files of the other text encoders of a word, by the suffix of the encoder's name."""
    start = "learned_embeds"
    found = path.parent.glob(f"{start}_*{path.suffix}") if path.stem == start else ()
    return {file.stem.removeprefix(start): file for file in sorted(found)}


def _suffixes(pipeline: Any) -> dict[str, str]:
    """Keys of one file with the vectors of several text encoders: the suffix of the encoder's name in the pipeline."""
    family = family_of_pipeline(type(pipeline).__name__)
    encoders = family.text_encoders if family else {}
    return {key: name.removeprefix("text_encoder") for name, encoder in encoders.items() for key in encoder.vectors}


def read_embedding(path: Path, suffixes: Mapping[str, str] = MappingProxyType({})) -> tuple[str, dict[str, Any]]:
    """The word, and (N, width) of each text encoder by its name's suffix. Files of several encoders are named after the word.

    suffixes: by a key of such a file.
    """
    import torch

    if path.suffix == ".safetensors":
        tensors, said = read(path)
        word = said.get("placeholder_token", path.stem)
    else:
        tensors, word = torch.load(path, map_location="cpu", weights_only=True), path.stem
        if isinstance(tensors.get("string_to_param"), dict):  # A1111's .pt
            return str(tensors.get("name") or word), {"": tensors["string_to_param"]["*"].detach()}
    if tensors.keys() <= suffixes.keys():
        return word, {suffixes[key]: tensor for key, tensor in tensors.items()}
    if len(tensors) != 1:
        raise ValueError(f"it has {len(tensors)} tensors, not one word's")
    ((word, tensor),) = tensors.items()
    return (path.stem if word == "emb_params" else word), {"": tensor if tensor.dim() == 2 else tensor[None]}


def _there(source: Path) -> Path:
    path = source.expanduser()
    if not path.exists():
        raise UserError(f"There is no {path}.", fix="Check the path.")
    return result_in(path)


def as_pipeline(folder: Path, model: Any) -> Any:
    """`model`, the base model, with the result in `folder` merged into its weights; a peer/models model that can be saved whole."""
    add_result(model.pipeline, folder)
    if method_in(folder).adapter:
        model.pipeline.fuse_lora(components=_merged(model.pipeline))
        model.pipeline.unload_lora_weights()
    return model


def _merged(pipeline: Any) -> list[str]:
    return [name for name in pipeline._lora_loadable_modules if hasattr(getattr(pipeline, name, None), "peft_config")]


def at(run: Result, model: str, model_config: str) -> Result:
    """The same with the base model elsewhere."""
    places = {name: place for name, place in (("model", model), ("model_config", model_config)) if place}
    return dataclasses.replace(run, run=dataclasses.replace(run.run, **places))
