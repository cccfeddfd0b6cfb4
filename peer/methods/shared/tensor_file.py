"""A .safetensors file with what it says of itself."""

from pathlib import Path

from torch import Tensor


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A file's tensors, and its header."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
