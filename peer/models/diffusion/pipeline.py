"""Pipelines of diffusers, read from folders and single files and written to folders."""

import json
import re
import warnings
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from peer.models.diffusion.noising import changed
from peer.models.diffusion.source import UNUSED, first_line, locate, quiet
from swarm.digest import read_header
from swarm.errors import UserError
from swarm.run.family import Family, known_parts
from swarm.run.loss import losses

_SCALED = re.compile(r"(^|\.)(scaled_fp8|scale_weight|weight_scale|absmax|quant_state\..*)$")
"""Names of what quantized weights are multiplied by: diffusers passes it over, and would train other weights."""
_OURS_ONLY = "Give a model whose parts are all of diffusers and transformers."
_PREFIX = "model.diffusion_model."
"""Of the denoiser's names in ComfyUI's files."""


def load_pipeline(family: Family, source: Path, config: str = "", *, as_filed: bool = False) -> Any:
    """The pipeline of `family` in a diffusers folder, a .safetensors file (read with the configs of `config`) or a Hub id, in float32.

    as_filed: a folder's parts in the precision of their files, so that a FLUX takes 34 GB here and not 70.
    Raises UserError when `source` holds no such pipeline.
    """
    path = locate(str(source))
    if path.is_dir() and not (path / "model_index.json").is_file():
        raise UserError(f"{path} is not a diffusers pipeline: it has no model_index.json.", fix="Give the folder that save_pretrained wrote.")
    quiet()
    import diffusers

    kind = getattr(diffusers, family.pipeline)
    try:
        pipeline = _read_folder(kind, family, path) if path.is_dir() else _read_file(kind, family, path, config)
    except UserError:
        raise
    except Exception as error:  # diffusers raises whatever its parts raise: ValueError, OSError, KeyError, SafetensorError, ...
        if path.is_file() and not config:
            fix = f"Add --model_config with a diffusers folder of a {family.title} model, or its Hub id."
        else:
            fix = f"Save or fetch it again, or check that it is of the family {family.name}."
        reason = "tensors are missing in it" if "meta tensor" in str(error) else first_line(error)
        raise UserError(f"{path} does not load as a {family.title} pipeline: {reason}", fix=fix) from error
    for part in pipeline.components.values() if not as_filed else ():
        if hasattr(part, "parameters"):
            part.float()
    for name, part in pipeline.components.items():
        if getattr(getattr(part, "config", None), "model_type", "").startswith("clip_text"):
            pool_at_the_end(part, pipeline.components[name.replace("text_encoder", "tokenizer")])
    return pipeline


def pool_at_the_end(encoder: Any, tokenizer: Any) -> None:
    """SDXL and FLUX.1 are published with CLIPs that pool at the highest id. That is the caption's end, but where a new word is in it, whose id is higher:
    then no later word counts. transformers does so where the config has 2 for the end, as before its pull request 24773."""
    for part in (encoder.config, *encoder.modules()):
        if getattr(part, "eos_token_id", None) == 2:
            part.eos_token_id = tokenizer.eos_token_id


def _unused(family: Family) -> dict[str, Any]:
    return {**{name: None for name in UNUSED}, **family.unused}


def _read_folder(kind: Any, family: Family, path: Path, **given: Any) -> Any:
    """Of a folder that has its denoiser in fp16 only, that. Raises ValueError when the denoiser's files lack tensors: diffusers draws them anew.

    given: parts that are taken in place of the folder's own.
    """
    _refuse_foreign(path, {*_unused(family), *given})
    _refuse_quantized(path, [name for name in family.parts if name not in given])
    files = [*(path / family.denoiser).glob("*.safetensors")]
    variant = _variant(files)
    dtypes = {part.name: _dtype_in(part, variant) for part in path.iterdir() if part.is_dir()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer diffusers call it dtype, older ones know that name only
        tokenizers = _tokenizers(path, family)
        unused = {**_unused(family), **_left_out(path, family), **dict.fromkeys(tokenizers), **given}
        pipeline = kind.from_pretrained(path, local_files_only=True, use_safetensors=True, variant=variant, torch_dtype=dtypes, **unused)
        pipeline.register_modules(**tokenizers)
    missing = sorted(getattr(pipeline, family.denoiser).state_dict().keys() - {name for file in files for name in read_header(file)})
    if missing and family.denoiser not in given:
        raise ValueError(f"its denoiser lacks {len(missing)} tensors, such as {missing[0]}")
    return pipeline


def _refuse_foreign(folder: Path, not_loaded: Collection[str]) -> None:
    """Raises UserError when model_index.json names code of others: diffusers up to 0.40 imports any module that it names."""
    index = _index(folder)
    if not isinstance(index.get("_class_name", ""), str):
        raise UserError(f"{folder} brings a pipeline of its own, which is code.", fix=_OURS_ONLY)
    for part, named in index.items():
        if isinstance(named, list) and len(named) == 2 and isinstance(named[1], str) and named[0] is not None and part not in not_loaded:
            _check_library(folder, part, named[0])


def _index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model_index.json").read_text(encoding="utf-8"))


def _check_library(folder: Path, part: str, library: Any) -> None:
    if library not in ("diffusers", "transformers"):  # importing another module would run what the model's author names
        raise UserError(f"{folder} wants a {part} of {str(library)[:100]!r}.", fix=_OURS_ONLY)


def _refuse_quantized(folder: Path, parts: Collection[str]) -> None:
    """Raises UserError when the weights of a part are to be multiplied by others."""
    for config in (folder / part / "config.json" for part in parts):
        if config.is_file() and "quantization_config" in json.loads(config.read_text(encoding="utf-8")):
            raise UserError(f"{config.parent} is quantized (quantization_config).", fix="Take the model's folder in bf16 or fp16.")


def _left_out(folder: Path, family: Family) -> dict[str, None]:
    """The optional text encoders that model_index.json has null for, and their tokenizers: diffusers wants to be told so once more."""
    index = _index(folder)
    out = {name: encoder.tokenizer for name, encoder in family.text_encoders.items() if encoder.optional and not (index.get(name) or [None])[-1]}
    return dict.fromkeys([*out.keys(), *out.values()])


def _tokenizers(folder: Path, family: Family) -> dict[str, Any]:
    """The tokenizers of processors, which also read pictures: for that they need torchvision, and nobody asks it of them here."""
    from transformers import AutoTokenizer

    names = {encoder.tokenizer for encoder in family.text_encoders.values()}
    index = _index(folder)
    processors = [name for name in names if str((index.get(name) or [None])[-1]).endswith("Processor")]
    return {name: AutoTokenizer.from_pretrained(folder / name, local_files_only=True, trust_remote_code=False) for name in processors}


def _variant(files: Collection[Path]) -> str | None:
    return "fp16" if files and all(_is_of(file, "fp16") for file in files) else None


def _is_of(file: Path, variant: str) -> bool:
    """Such as `model.fp16.safetensors`, `model.fp16-00001-of-00002.safetensors`."""
    return re.search(rf"\.{variant}[.-]", file.name) is not None


def files_read(source: Path) -> list[Path]:
    """The weights that are loaded of a model: of a folder with several variants one, and nothing of parts that nobody uses."""
    if source.is_file():
        return [source]
    parts = [source / name for name in known_parts() if (source / name).is_dir()]
    variant = _variant([*parts[0].glob("*.safetensors")]) if parts else None
    return [file for part in parts for file in _files_of(part, variant)]


def _files_of(part: Path, variant: str | None) -> list[Path]:
    return [file for file in part.glob("*.safetensors") if (_is_of(file, variant) if variant else file.name.count(".") == 1)]


def _dtype_in(part: Path, variant: str | None) -> torch.dtype:
    """What the part's tensors are in, float32 where they differ."""
    kinds = {tensor["dtype"] for file in _files_of(part, variant) for name, tensor in read_header(file).items() if name != "__metadata__"}
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32


def _read_file(kind: Any, family: Family, path: Path, config: str) -> Any:
    """Tokenizers, configs and parts that the file lacks come from `config`; without one the first two are its family's own on the Hub.

    The Hub's scheduler of SDXL predicts the noise: a file that says that it predicts v is believed.
    """
    header = read_header(path)
    if scaled := next((name for name in header if _SCALED.search(name)), None):
        raise UserError(
            f"{path} is quantized: its weights need scale factors ({scaled}).", fix="Take the model's file in bf16 or fp16."
        )
    if edm := next((name for name in header if name.startswith("edm_")), None):
        raise UserError(f"{path} has EDM's noise ({edm}), which cannot be trained.", fix="Use a model with DDPM's noise.")
    lacking = [name for name, starts in family.in_file.items() if not _begins(header, starts)]
    if lacking and not config:
        raise UserError(
            f"{path} holds no {' and no '.join(lacking)}.",
            fix=f"Add --model_config with a diffusers folder of a {family.title} model that has them, or its Hub id.",
        )
    where = _config_folder(config) if config else None
    without = _left_out(where, family) if where else {}
    beside = without | _parts_of(where, [name for name in lacking if name not in without]) if where else {}
    if hasattr(kind, "from_single_file"):
        if where:
            _refuse_foreign(where, {*_unused(family), *beside})
        pipeline = kind.from_single_file(str(path), config=where and str(where), local_files_only=True, **_unused(family), **beside)
    else:
        pipeline = _read_folder(kind, family, where, **beside, **{family.denoiser: _read_denoiser(family, path, where)})
    pipeline.scheduler = changed(pipeline.scheduler, losses()[family.loss].said_by_file(path, bool(config)))
    for name, part in pipeline.components.items():
        if hasattr(part, "tie_weights"):
            part.tie_weights()  # T5's embedding has two names, of which files have one
        missing = [key for key, tensor in part.state_dict().items() if tensor.is_meta] if hasattr(part, "state_dict") else []
        if missing:
            raise ValueError(f"its {name} lacks {len(missing)} tensors, such as {missing[0]}")
    return pipeline


def _read_denoiser(family: Family, path: Path, where: Path) -> Any:
    """The denoiser in a file, under the original names or diffusers' own, with ComfyUI's prefix or without; its config is that of folder `where`."""
    from safetensors.torch import load_file

    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(path).items()}
    return _class_in(where, family.denoiser).from_single_file(tensors, config=str(where), subfolder=family.denoiser)


def _class_in(folder: Path, part: str) -> Any:
    """The class that model_index.json has for a part."""
    library, name = _index(folder)[part]
    _check_library(folder, part, library)
    return getattr(import_module(library), name)


def _begins(names: Collection[str], starts: tuple[str, ...]) -> bool:
    return any(name.startswith(starts) for name in names)


def _parts_of(folder: Path, names: Collection[str]) -> dict[str, Any]:
    """These parts of the pipeline in `folder`. Raises UserError when the weights of one are not there."""
    found = {}
    for name in names:
        files = [*(folder / name).glob("*.safetensors")]
        if not files:
            raise UserError(
                f"The model's file holds no {name}, and {folder} has no weights of one.",
                fix="Give a --model_config that is a whole diffusers folder of a model of the same family, or its Hub id.",
            )
        found[name] = _class_in(folder, name).from_pretrained(folder, subfolder=name, local_files_only=True, use_safetensors=True, variant=_variant(files))
    return found


def _config_folder(config: str) -> Path:
    folder = locate(config)
    if not (folder / "model_index.json").is_file():
        raise UserError(
            f"model_config is {config}, which is not a diffusers folder: it has no model_index.json.", fix="Give the folder of a model of the same family."
        )
    return folder


def save_pipeline(pipeline: Any, folder: Path, encoders: Collection[str]) -> None:
    """Write a folder that plain `from_pretrained` loads, in this and older releases of diffusers and transformers."""
    pipeline.save_pretrained(folder, safe_serialization=True)
    for part in encoders:
        if type(getattr(pipeline, part, None)).__name__ == "CLIPTextModel":
            _restore_text_model_prefix(folder / part / "model.safetensors")


def _restore_text_model_prefix(path: Path) -> None:
    """Write CLIP's keys as `text_model.*` again: transformers 5 drops the prefix, 4 and other tools find no weights without it."""
    from safetensors.torch import load_file, save_file

    if not path.is_file():
        return
    tensors = load_file(path)
    if not any(name.startswith("text_model.") for name in tensors):
        save_file({f"text_model.{name}": tensor for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
