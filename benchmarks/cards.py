"""Which ways to train fit on which card: the rows that benchmarks/device_memory.py counts, the table it keeps of them, and the row of a file of options.

The table is benchmarks/records/device_memory.json. A file of `examples/` named after a card, such as 12gb_sdxl_lora.toml, is one row of it, option for option:
tests/benchmarks/test_cards.py reads each file as the peer does. GB are 10^9 bytes.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT
from peer.config import PeerConfig
from peer.launch.command_line import parse
from peer.launch.lengths import of_founder
from peer.machine.counting import HELD_BYTES
from peer.machine.turns import in_turns
from swarm.errors import UserError
from swarm.options import read_toml
from swarm.run_config import RunConfig

SPARE = 1.0
"""GB of a card that are not ours: CUDA's context and the desktop."""
BF16_STEP = 0.7
"""GB that the optimizer's step takes beside the count with `--weights bf16`: 0.64 measured."""
TABLE = ROOT / "benchmarks" / "records" / "device_memory.json"
EXAMPLES = ROOT / "examples"
RANK = 16
"""Of the LoRAs that are counted."""
CHIPS = 4
"""Of a TPU host, v4 or v5p, among which the rows of a batch are spread."""


@dataclass(frozen=True)
class Row:
    """One way to train, with gradient checkpointing, and the card that it should fit on, in GB: two rows are one when their options are."""

    size: str
    method: str
    card: int = field(compare=False)
    batch: int = 1
    weights: str = "fp32"
    optimizer: str = "adamw8bit"
    base: str = "auto"
    fused: bool = False
    offload: bool = False
    """Whether its parts take turns: --offload, or both caches."""
    swap: int = 0

    def fits(self, need: float) -> bool:
        """Whether the card has room for a count of `need` GB, and for what no count knows."""
        return need + HELD_BYTES / 1e9 + (BF16_STEP if self.weights == "bf16" else 0.0) <= self.card - SPARE

    @property
    def name(self) -> str:
        told = [
            self.method,
            self.base if self.base != "auto" else "",
            f"swap {self.swap}" if self.swap else "",
            f"batch {self.batch}" if self.batch > 1 else "",
            f"{self.weights} weights" if self.weights != "fp32" else "",
            self.optimizer if self.method == "full" or self.optimizer != "adamw8bit" else "",
            "fused" if self.fused else "",
            "offload" if self.offload else "",
        ]
        return ", ".join(filter(None, [self.size, *told]))


ROWS = (
    Row("SD 1.5, 512 px", "lora", 8),
    Row("SD 1.5, 512 px", "lora", 8, batch=4),
    Row("SD 1.5, 512 px", "full", 8, weights="bf16", optimizer="adafactor"),
    Row("SD 1.5, 512 px", "full", 8, weights="bf16", optimizer="adafactor", fused=True),
    Row("SD 1.5, 512 px", "full", 8, weights="bf16", optimizer="adafactor", fused=True, batch=4),
    Row("SD 1.5, 512 px", "full", 12),
    Row("SD 1.5, 512 px", "full", 12, fused=True),
    Row("SD 1.5, 512 px", "full", 24, batch=8),
    Row("SDXL", "lora", 8, offload=True),
    Row("SDXL", "lora", 12),
    Row("SDXL", "lora", 12, batch=4, offload=True),
    Row("SDXL", "full", 16, weights="bf16", optimizer="adafactor"),
    Row("SDXL", "full", 16, weights="bf16", optimizer="adafactor", fused=True),
    Row("SDXL", "full", 24),
    Row("SDXL", "full", 24, fused=True, offload=True),
    Row("FLUX.1", "lora", 24, offload=True),
    Row("FLUX.1", "lora", 24, base="fp8", offload=True),
    Row("FLUX.1", "lora", 16, base="int8", offload=True),
    Row("FLUX.1", "lora", 16, base="int8", offload=True, swap=8),
    Row("FLUX.1", "lora", 12, base="nf4", offload=True),
    Row("FLUX.1", "lora", 8, base="nf4", offload=True, swap=40),
    Row("Chroma", "lora", 24, offload=True),
    Row("Chroma", "lora", 12, base="nf4", offload=True),
    Row("Z-Image", "lora", 24, offload=True),
    Row("Z-Image", "lora", 12, base="nf4", offload=True),
    Row("FLUX.2 klein 4B", "lora", 12, offload=True),
    Row("FLUX.2 klein 4B", "lora", 8, base="nf4", offload=True),
    Row("FLUX.2 klein 9B", "lora", 24, offload=True),
    Row("FLUX.2 klein 9B", "lora", 12, base="nf4", offload=True),
    Row("Qwen-Image", "lora", 24, base="fp8", offload=True),
    Row("Qwen-Image", "lora", 16, base="nf4", offload=True),
    Row("SDXL", "full", 32, optimizer="adafactor", offload=True),
    Row("FLUX.1", "lora", 32, optimizer="adamw", offload=True),
)


@dataclass(frozen=True)
class Counted:
    """GB of a GPU's memory: what lies there, and the most that flows through the denoiser's and the VAE's turn (`step`, `encoding`)."""

    frozen: float
    trained: float
    optimizer: float
    step: float
    texts: float
    vae: float
    encoding: float

    def need(self, offload: bool) -> float:
        """GB at the worst moment: of the largest turn, or of all parts at once where they take none."""
        ours = self.trained + self.optimizer
        if offload:
            return ours + max(self.frozen + self.step, self.texts, self.vae + self.encoding)
        return ours + self.frozen + self.texts + self.vae + max(self.step, self.encoding)


def read_table(path: Path = TABLE) -> dict[Row, Counted]:
    """What was counted; nothing when there is no such file yet."""
    if not path.exists():
        return {}
    return {Row(**row["options"]): Counted(**row["gb"]) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def write_table(counted: Mapping[Row, Counted], path: Path = TABLE) -> None:
    """Put `counted` in the place of the same rows of the table. Rows that are no more are dropped."""
    table = {**read_table(path), **counted}
    rows = [{"options": dataclasses.asdict(row), "gb": dataclasses.asdict(table[row])} for row in ROWS if row in table]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(f'{{"rows": [\n{lines}\n]}}\n', encoding="utf-8")


# ---- a file of options ----

_SIZES = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": ("SD 1.5, 512 px", 512),
    "stabilityai/stable-diffusion-xl-base-1.0": ("SDXL", 1024),
    "black-forest-labs/FLUX.1-dev": ("FLUX.1", 1024),
    "lodestones/Chroma1-HD": ("Chroma", 1024),
    "Tongyi-MAI/Z-Image": ("Z-Image", 1024),
    "black-forest-labs/FLUX.2-klein-base-4B": ("FLUX.2 klein 4B", 1024),
}
"""By --model: a size of benchmarks/device_memory.py, and its --resolution."""
_IN_A_ROW = {
    "model", "resolution", "method", "train_batch_size", "weights", "optimizer", "base_precision", "fused_step", "offload",
    "blocks_to_swap", "device", "cache_latents", "cache_text",
}  # fmt: skip
_FIXED = {"gradient_checkpointing": True, "rank": RANK, "gradient_accumulation_steps": 1, "mixed_precision": "bf16"}
"""What all rows are counted with."""
_NO_MATTER = {
    "train_data_dir", "output_dir", "learning_rate", "lr_scheduler", "lr_warmup_steps", "max_train_steps", "checkpointing_steps", "clip_grad",
    "random_flip", "instance_prompt", "snr_gamma", "dataset_name", "center_crop",
}  # fmt: skip
"""These take nothing of the GPU's memory."""


def row_of(path: Path) -> Row:
    """The row that a file of options is, on the card that its name begins with. Raises UserError for an option whose memory nobody has counted."""
    said = read_toml(path, PeerConfig, RunConfig)
    peer, given = parse(["--config", str(path)])
    run = RunConfig(**of_founder(given, peer))
    if unknown := sorted(said.keys() - _IN_A_ROW - _FIXED.keys() - _NO_MATTER):
        raise UserError(f"{path.name}: what {unknown[0]} takes of a GPU's memory is not counted.", fix="Remove it, or count it in benchmarks/cards.py.")
    values: dict[str, Any] = {**dataclasses.asdict(run), **dataclasses.asdict(peer)}
    fixed = _FIXED if run.method == "lora" else {name: value for name, value in _FIXED.items() if name != "rank"}
    for name, value in fixed.items():
        if values[name] != value:
            raise UserError(f"{path.name}: {name} is {values[name]}, and all rows are counted with {value}.", fix=f"Set {name} to {value}.")
    tpu = peer.device == "xla"
    size, side = _SIZES.get(run.model, ("", 0))
    if run.resolution != side:
        raise UserError(f"{path.name}: {run.model} at {run.resolution} px is not counted.", fix=f"There are: {', '.join(_SIZES)}.")
    return Row(
        size, run.method, int(path.name.split("gb_")[0]), -(-peer.train_batch_size // CHIPS) if tpu else peer.train_batch_size, peer.weights,
        run.optimizer if run.optimizer != "auto" else "adamw" if tpu else "adamw8bit", peer.base_precision, peer.fused_step,
        in_turns(peer, torch.device("xla" if tpu else "cuda")), peer.blocks_to_swap,
    )  # fmt: skip


def check(path: Path, table: Mapping[Row, Counted]) -> float:
    """GB of the card of a file of options beside its count and `SPARE`. Raises UserError when its row is not in the table, or does not fit."""
    row = row_of(path)
    if row not in table:
        raise UserError(f"{path.name}: no row of the table has its options ({row.name}).", fix="Add it to ROWS, and count it: device_memory.py --keep.")
    need = table[row].need(row.offload)
    if not row.fits(need):
        raise UserError(f"{path.name}: {row.name} takes {need:.1f} of {row.card} GB, and {SPARE:.0f} is not ours.", fix="Name a larger card.")
    return row.card - SPARE - need
