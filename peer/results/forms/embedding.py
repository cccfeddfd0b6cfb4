"""`--format embedding`: a learned word in one file, as A1111 and ComfyUI take it; they call it by the file's name.

SD 1.x and 2.x: the word's own name is the only key, as diffusers has it. SDXL: `clip_l` and `clip_g`; FLUX: `clip_l` and `t5xxl`.
"""

from pathlib import Path

import torch

from peer.methods.shared.tensor_file import read
from peer.results.header import save
from peer.results.loading import EMBEDDINGS, files_beside, read_embedding
from swarm.errors import UserError
from swarm.run.family import family_named


def write_embedding(result: Path, path: Path, family: str, dtype: torch.dtype = torch.float32) -> None:
    found = next((result / name for name in EMBEDDINGS if (result / name).is_file()), None)
    if found is None:
        raise UserError(f"{result} is not an embedding: it has no {EMBEDDINGS[0]}.", fix="Use --format diffusers or single_file.")
    others = files_beside(found)
    facts = family_named(family)
    if others and facts is None:
        raise UserError(f"{result} does not name its model family.", fix="Give its files to the other tool unchanged.")
    word, vectors = _read(found)
    vectors |= {suffix: _read(file)[1][""] for suffix, file in others.items()}
    tensors = {facts.text_encoders[f"text_encoder{suffix}"].vectors[0] if others else word: tensor for suffix, tensor in vectors.items()}
    said = read(found)[1] if found.suffix == ".safetensors" else {}
    save({name: tensor.to(dtype) for name, tensor in tensors.items()}, path, {**said, "format": "pt", "placeholder_token": word})


def _read(file: Path) -> tuple[str, dict[str, torch.Tensor]]:
    try:
        return read_embedding(file)
    except Exception:  # whatever safetensors, torch and pickle raise for a file that is none
        raise UserError(f"{file} does not load as an embedding.", fix="Fetch it again, or export it from its run.") from None
