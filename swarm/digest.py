"""Digests: BLAKE3, in hex, of bytes, of canonical JSON, and of a model folder's weights."""

import json
import struct
from pathlib import Path
from typing import Any

from blake3 import blake3

from swarm.errors import UserError

WEIGHT_PARTS = ("unet", "transformer", "text_encoder", "text_encoder_2", "vae")
_MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit


def digest_bytes(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest()


def canonical_json(value: Any) -> bytes:
    """The one byte string of a JSON value: sorted keys, no spaces, no NaN; what we hash and sign."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_json(value: Any) -> str:
    return digest_bytes(canonical_json(value))


def digest_model(folder: Path) -> str:
    """Digest of a diffusers folder's weights: names, dtypes, shapes and bytes of its tensors, whatever the files' metadata.

    Reads `<part>/*.safetensors` of the parts that exist, precision variants (`model.fp16.safetensors`) left out.
    Raises UserError when the folder is no pipeline or a file is damaged.
    """
    if not (folder / "model_index.json").is_file():
        raise UserError(
            f"{folder} is no diffusers pipeline: it has no model_index.json.", fix="Give the folder that save_pretrained wrote."
        )
    hasher = blake3()
    files = [path for part in WEIGHT_PARTS for path in sorted((folder / part).glob("*.safetensors")) if path.name.count(".") == 1]
    if not files:
        raise UserError(f"{folder} holds no .safetensors weights.", fix="Save it again with safe_serialization=True.")
    for path in files:
        hasher.update(f"{path.parent.name}\0".encode())
        _hash_safetensors(path, hasher)
    return hasher.hexdigest()


def _hash_safetensors(path: Path, hasher: Any) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER_BYTES, size):
                raise ValueError(f"header of {length} bytes")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max(entry["data_offsets"][1] for entry in header.values())
            if 8 + length + end != size:
                raise ValueError(f"{size} bytes instead of {8 + length + end}")
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged: {error}.", fix="Fetch the model again.") from None
        hasher.update(canonical_json(header))
        for piece in iter(lambda: file.read(16 << 20), b""):
            hasher.update(piece)
