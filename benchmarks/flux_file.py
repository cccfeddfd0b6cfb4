"""FLUX at its real width with one block of each kind, from one file: each tensor is the file's, and a LoRA is trained from it for two steps.

    python -m benchmarks.flux_file FOLDER

Takes 2 GB of disk in FOLDER, which must be empty. Nothing of diffusers' reader is replaced: it knows this width alone.
"""

import sys
import time
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel

from peer import finetune
from peer.launch.starting_model import complete, load_model
from swarm.run_config import RunConfig
from tests import flux_file, tiny


def main(folder: Path) -> None:
    start = time.monotonic()
    torch.manual_seed(0)
    pipeline = tiny.build("flux")
    config = {**pipeline.transformer.config, "attention_head_dim": 128, "num_attention_heads": 24, "axes_dims_rope": (16, 56, 56)}
    pipeline.transformer = FluxTransformer2DModel(**config).bfloat16()
    pipeline.save_pretrained(folder / "configs")
    path = flux_file.write(folder / "flux.safetensors", flux_file.transformer_tensors(pipeline.transformer), torch.bfloat16)
    run = complete(RunConfig(model=str(path), model_config=str(folder / "configs"), max_sequence_length=32))
    wanted = pipeline.transformer.state_dict()
    read = load_model(run, {}, torch.device("cpu")).parts["transformer"].state_dict()
    assert read.keys() == wanted.keys() and all(torch.equal(read[name].float(), tensor.float()) for name, tensor in wanted.items())
    print(f"{sum(map(torch.numel, wanted.values())):,} numbers are the file's, {time.monotonic() - start:.0f} s")
    del read, wanted
    tiny.write_pictures(folder / "pictures", 4)
    options = {
        "model": path, "model_config": folder / "configs", "train_data_dir": folder / "pictures", "output_dir": folder / "out", "method": "lora",
        "resolution": 16, "train_batch_size": 1, "max_train_steps": 2, "max_sequence_length": 32, "mixed_precision": "no", "optimizer": "adamw",
    }  # fmt: skip
    assert finetune.main([word for name, value in options.items() for word in (f"--{name}", str(value))]) == 0
    print(f"a LoRA in {folder / 'out' / 'model'}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
