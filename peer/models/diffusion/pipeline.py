"""Pipelines of diffusers, read from folders and single files and written to folders."""

from pathlib import Path
from typing import Any

from peer.models.diffusion.source import UNUSED, first_line, locate, quiet
from swarm.base_model import PIPELINES
from swarm.digest import read_header
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

    unused: dict[str, Any] = {name: None for name in UNUSED if name != "safety_checker"}
    if kind == "StableDiffusionPipeline":
        unused |= {"safety_checker": None, "requires_safety_checker": False}
    read = _read_folder if path.is_dir() else _read_file
    try:
        pipeline = read(getattr(diffusers, kind), path, config, unused)
    except UserError:
        raise
    except Exception as error:  # diffusers raises whatever its parts raise: ValueError, OSError, KeyError, SafetensorError, ...
        if path.is_file() and not config:
            fix = (
                f"Add --model_config with a diffusers folder of a {_NAMES[kind]} model; it also has the text encoders that FLUX files lack."
            )
        else:
            fix = f"Save or fetch it again, or check --family ({PIPELINES[kind]})."
        reason = "tensors are missing in it" if "meta tensor" in str(error) else first_line(error)
        raise UserError(f"{path} does not load as a {_NAMES[kind]} pipeline: {reason}", fix=fix) from error
    for part in pipeline.components.values():
        if hasattr(part, "parameters"):
            part.float()  # a folder may hold fp16 weights
    return pipeline


def _read_folder(kind: Any, path: Path, config: str, unused: dict[str, Any]) -> Any:
    """Of a folder that has its denoiser in fp16 only, that. Raises ValueError when the denoiser's files lack tensors: diffusers draws them anew."""
    files = [file for part in ("unet", "transformer") for file in (path / part).glob("*.safetensors")]
    variant = "fp16" if files and all(".fp16." in file.name for file in files) else None
    pipeline = kind.from_pretrained(path, local_files_only=True, use_safetensors=True, variant=variant, **unused)
    denoiser = getattr(pipeline, "unet", None) or pipeline.transformer
    missing = sorted(denoiser.state_dict().keys() - {name for file in files for name in read_header(file)})
    if missing:
        raise ValueError(f"its denoiser lacks {len(missing)} tensors, such as {missing[0]}")
    return pipeline


def _read_file(kind: Any, path: Path, config: str, unused: dict[str, Any]) -> Any:
    """Tokenizers, configs and parts that the file lacks come from `config`, and from the family's own on the Hub without one."""
    where = str(_config_folder(config)) if config else None
    given = dict(unused)
    if where and not any(name.startswith(("first_stage_model.", "vae.")) for name in read_header(path)):
        from diffusers import AutoencoderKL

        given["vae"] = AutoencoderKL.from_pretrained(
            where, subfolder="vae", local_files_only=True
        )  # text encoders are taken so without saying
    pipeline = kind.from_single_file(str(path), config=where, local_files_only=True, **given)
    for name, part in pipeline.components.items():
        missing = [key for key, tensor in part.state_dict().items() if tensor.is_meta] if hasattr(part, "state_dict") else []
        if missing:
            raise ValueError(f"its {name} lacks {len(missing)} tensors, such as {missing[0]}")
    return pipeline


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
