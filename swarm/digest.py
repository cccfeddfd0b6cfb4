"""Digests: BLAKE3, in hex, of bytes, of files, of canonical JSON, and of a base model's weights."""

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from swarm.errors import UserError
from swarm.run.family import family_of_pipeline, known_parts

ELDER_CHARACTERS = 12
"""Of a state's digest, where it is told of as an ancestor of long ago. Who finds another state with these 48 bits has one that nobody takes,
since it counts as an ancestor."""
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit
_PIECE_BYTES = 4 << 20


def digest_bytes(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest()


def digest_file(path: Path) -> str:
    hasher = blake3()
    with path.open("rb") as file:
        _hash_rest(file, hasher)
    return hasher.hexdigest()


def seed_of(*what: object) -> int:
    """A random generator's seed, 60 bits, that `what` alone decides: the same on every machine and in every release."""
    return int(digest_bytes(":".join(map(str, what)).encode())[:15], 16)


def canonical_json(value: Any) -> bytes:
    """The one byte string of a JSON value: sorted keys, no spaces, no NaN; what we hash and sign."""
    return _CANONICAL.encode(value).encode()


def digest_json(value: Any) -> str:
    return digest_bytes(canonical_json(value))


def digest_model(source: Path) -> str:
    """Digest of a base model's weights: names, dtypes, shapes and bytes of its tensors, whatever the files' metadata.

    source: a diffusers folder, of which `<part>/*.safetensors` of the parts that its family names are read, precision variants
    (`model.fp16.safetensors`) only where there is nothing else; or a single .safetensors file.
    Raises UserError when the folder is no pipeline or a file is damaged.
    """
    hasher = blake3()
    for path in weight_files(source):
        if path != source:
            hasher.update(f"{path.parent.name}\0".encode())
        _hash_safetensors(path, hasher)
    return hasher.hexdigest()


def weight_files(source: Path) -> list[Path]:
    """The files whose tensors are a base model's weights, in the order of its digest. Raises UserError when there are none."""
    if source.is_file():
        return [source]
    if not (source / "model_index.json").is_file():
        raise UserError(
            f"{source} is not a diffusers pipeline: it has no model_index.json.", fix="Give the folder that save_pretrained wrote."
        )
    files = [path for part in _parts(source) for path in _weights(source / part)]
    if not files:
        raise UserError(f"{source} holds no .safetensors weights.", fix="Save it again with safe_serialization=True.")
    return files


def _parts(folder: Path) -> tuple[str, ...]:
    """The parts whose weights count: those of its family, of a folder that names none all that any family has."""
    try:
        family = family_of_pipeline(json.loads((folder / "model_index.json").read_text(encoding="utf-8")).get("_class_name"))
    except (OSError, ValueError, AttributeError):
        family = None
    return family.parts if family else known_parts()


def read_header(path: Path) -> dict[str, Any]:
    """A .safetensors file's tensors by name: {"dtype", "shape", "data_offsets"}. Raises UserError when the file is damaged."""
    with path.open("rb") as file:
        return _read_header(path, file)


def read_metadata(path: Path) -> dict[str, str]:
    """What a .safetensors file says of itself, whose header `read_header` has read."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        said = json.loads(file.read(length)).get("__metadata__")
    return said if isinstance(said, dict) else {}


def _weights(part: Path) -> list[Path]:
    """A part's files in the order of their names; those of a precision variant (a second dot in the name) only where it has no others."""
    files = sorted(part.glob("*.safetensors"))
    return [path for path in files if path.name.count(".") == 1] or files


def _hash_safetensors(path: Path, hasher: Any) -> None:
    with path.open("rb") as file:
        hasher.update(canonical_json(_read_header(path, file)))
        _hash_rest(file, hasher)


def _hash_rest(file: BinaryIO, hasher: Any) -> None:
    while piece := file.read(_PIECE_BYTES):
        hasher.update(piece)


def _read_header(path: Path, file: BinaryIO) -> dict[str, Any]:
    """Leaves `file` where the tensors' bytes begin."""
    size = path.stat().st_size
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
    return header
