"""A stand-in for a base model where nobody loads one: the least that has a pipeline's class and a digest."""

import json
import struct
from pathlib import Path


def write_model(folder: Path) -> Path:
    (folder / "unet").mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}), encoding="utf-8")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return folder
