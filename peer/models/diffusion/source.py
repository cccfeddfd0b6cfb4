"""Where a base model is: a diffusers folder, a single .safetensors file, or what the Hub has under an id."""

import logging
from pathlib import Path

from swarm.base_model import not_found
from swarm.errors import UserError

UNUSED = ("feature_extractor", "image_encoder")
"""Components of pipelines that training has no use for, beside those that a family names."""


def locate(source: str) -> Path:
    """The folder or file of a model: `source` itself, or the Hub's copy of it, of which only what is missing and needed is fetched.

    Raises UserError when there is neither such a folder or file nor such a model.
    """
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".safetensors"):
        return path
    if path.exists():
        raise UserError(f"{path} is neither a folder nor a .safetensors file.", fix="Convert it to .safetensors, which cannot hold code.")
    if source.count("/") > 1 or source.startswith((".", "/", "~")) or source.endswith((".safetensors", "/")):
        raise UserError(f"There is no model {source}.", fix="Give a diffusers folder, a .safetensors file, or a Hub id such as owner/name.")
    quiet()
    from diffusers import DiffusionPipeline

    try:
        return Path(DiffusionPipeline.download(source, use_safetensors=True, **dict.fromkeys([*UNUSED, "safety_checker"])))  # 1.2 GB of SD 1.5
    except Exception as error:  # OSError, ValueError, huggingface_hub's and httpx's own
        if "safetensors" in str(error):
            raise UserError(
                f"{source} has no .safetensors weights on the Hub, or only of a variant such as fp16.",
                fix="Convert it, or fetch it with `hf download`; then give its folder.",
            ) from error
        raise not_found(source) from error


def first_line(error: Exception) -> str:
    """What an error of a library says, on one line."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def quiet() -> None:
    """No bars for files that are read in milliseconds, no notes on libraries that we do not use; errors are raised anyway."""
    for name in ("bitsandbytes", "transformers", "diffusers"):  # before their import, which is when they speak
        logging.getLogger(name).setLevel(logging.ERROR)
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
