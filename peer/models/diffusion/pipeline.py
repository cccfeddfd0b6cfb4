"""Pipelines of diffusers, read from folders and single files and written to folders."""

from pathlib import Path
from typing import Any

from peer.models.diffusion.source import first_line, locate, quiet
from swarm.base_model import PIPELINES
from swarm.errors import UserError

_NAMES = {"StableDiffusionPipeline": "Stable Diffusion", "StableDiffusionXLPipeline": "SDXL", "FluxPipeline": "FLUX"}


def load_pipeline(kind: str, source: Path, config: str = "") -> Any:
    """The pipeline of class `kind` in a diffusers folder, a .safetensors file (read with the configs of `config`) or a Hub id, in float32.

    Raises UserError when `source` holds no such pipeline.
    """
    path = locate(str(source))
    if path.is_dir() and not (path / "model_index.json").is_file():
        raise UserError(f"{path} is no diffusers pipeline: it has no model_index.json.", fix="Give the folder that save_pretrained wrote.")
    quiet()
    import diffusers

    unused = {"safety_checker": None, "requires_safety_checker": False} if kind == "StableDiffusionPipeline" else {}
    read = _read_folder if path.is_dir() else _read_file
    try:
        pipeline = read(getattr(diffusers, kind), path, config, unused)
    except UserError:
        raise
    except Exception as error:  # diffusers raises whatever its parts raise: ValueError, OSError, KeyError, SafetensorError, ...
        raise UserError(
            f"{path} does not load as a {_NAMES[kind]} pipeline: {first_line(error)}",
            fix=f"Save or fetch it again, or check --family ({PIPELINES[kind]}).",
        ) from error
    for part in pipeline.components.values():
        if hasattr(part, "parameters"):
            part.float()  # a folder may hold fp16 weights
    return pipeline


def _read_folder(kind: Any, path: Path, config: str, unused: dict[str, Any]) -> Any:
    return kind.from_pretrained(path, local_files_only=True, variant=_variant(path), **unused)


def _variant(folder: Path) -> str | None:
    """'fp16' where a folder holds its denoiser in that variant only."""
    files = [path for part in ("unet", "transformer") for path in (folder / part).glob("*.safetensors")]
    return "fp16" if files and all(".fp16." in path.name for path in files) else None


def _read_file(kind: Any, path: Path, config: str, unused: dict[str, Any]) -> Any:
    """Tokenizers and configs come from `config`, and from the family's own on the Hub without one."""
    where = str(_config_folder(config)) if config else None
    return kind.from_single_file(str(path), config=where, local_files_only=True, **unused)


def _config_folder(config: str) -> Path:
    folder = locate(config)
    if not (folder / "model_index.json").is_file():
        raise UserError(
            f"model_config is {config}, which is no diffusers folder: it has no model_index.json.", fix="Give the folder of a like model."
        )
    return folder


def save_pipeline(pipeline: Any, folder: Path) -> None:
    """Write a folder that plain `from_pretrained` loads, in this and older releases of diffusers and transformers."""
    pipeline.save_pretrained(folder, safe_serialization=True)
    for part in ("text_encoder", "text_encoder_2"):
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
