"""What of a model lies in a peer's own memory while it is loaded, at full size with random weights in bf16: whether any part of it is there twice.

    .venv/bin/python benchmarks/loading.py              SDXL: 14 GB of disk, 3 GB of memory, some minutes
    .venv/bin/python benchmarks/loading.py --tiny       the same with tiny weights, to try it: these figures mean nothing

Each way to hold the model is a process of its own, which reads a folder in shards as they are published, and places it as a peer does whose parts wait
for a GPU. `files` is the size of the folder, `made` that of all tensors that are not as they are in it, `end` and `most` what the process has beside
pages of files (RssAnon) in the end and at most, less what it had before. Quantizing takes room for a layer in float32: on a GPU peer that is the GPU's.
The last line's `once` says whether `most` is within `made` and 0.75 GB for the libraries and a layer. GB are 10^9 bytes.
"""

import argparse
import gc
import json
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from benchmarks.common import argument_parser, print_result, print_table, start
from benchmarks.device_memory import SIZES, Size, at_full_size
from peer.launch.starting_model import load_model
from peer.machine.waiting import Files
from peer.models.diffusion.source import quiet
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from tests import tiny

BF16, CPU = torch.bfloat16, torch.device("cpu")
WAYS = {"bf16": "auto", "nf4": "nf4", "int8 on disk": "int8"}
"""To hold a model, and the --base_precision of each."""
SHARD = "1GB"
BESIDE_GB = 0.75
"""bitsandbytes and what glibc keeps of the layers that were quantized, 0.34 GB for a FLUX of 0.3 B parameters (benchmarks/records/log.md), and a layer
in float32: 0.05 GB for SDXL."""
_LOOK_SECONDS = 0.02


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--size", default="SDXL", choices=[*SIZES], help="[SDXL]")
    parser.add_argument("--tiny", action="store_true", help="tiny weights: tries it, measures nothing")
    parser.add_argument("--way", nargs=2, metavar=("WAY", "FOLDER"), help="of a folder that is there: what this process takes")
    return start(parser, run)


def run(options: argparse.Namespace) -> int:
    quiet()
    if options.way:
        print(json.dumps(loaded(*options.way)))
        return ExitCode.OK
    with tempfile.TemporaryDirectory(prefix="loading-") as name:
        folder = Path(name) / "model"
        write(SIZES[options.size], folder, tiny_one=options.tiny)
        rows = []
        for way in WAYS:
            rows.append(in_a_process(way, folder))
            print_table(rows[-1:])
    print_table(rows)
    once = {row["way"]: row["most"] <= row["made"] + BESIDE_GB for row in rows}
    print_result({"once": once, "rows": rows, "size": options.size, "tiny": options.tiny})
    return ExitCode.OK if all(once.values()) else ExitCode.FAILED


def in_a_process(way: str, folder: Path) -> dict[str, Any]:
    """Raises UserError when it ended otherwise than with an answer."""
    done = subprocess.run([sys.executable, __file__, "--way", way, str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"'{way}' ended with status {done.returncode}: {done.stderr.strip()[-300:]}", fix="Is there enough memory and disk?")
    return json.loads(done.stdout.splitlines()[-1])


def loaded(way: str, folder: str) -> dict[str, Any]:
    """What this process takes for a model in `folder`, in GB."""
    run = RunConfig(model=folder, method="lora")
    hold = Files(Path(folder).parent / "waiting").hold if way.endswith("on disk") else torch.Tensor.cpu
    before = own_bytes()
    with Most() as most:
        model = load_model(run, {}, None)
        if WAYS[way] != "auto":
            model.pack(WAYS[way], CPU, hold=hold)
        model.place(CPU, BF16, hold=hold)
    gc.collect()
    tensors = {tensor for part in model.parts.values() for tensor in (*part.parameters(), *part.buffers())}
    made = sum(tensor.nbytes for tensor in tensors if tensor.dtype is not BF16) if not way.endswith("on disk") else 0
    files = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
    gb = {"files": files, "made": made, "end": own_bytes() - before, "most": most.bytes - before}
    return {"way": way, **{name: value / 1e9 for name, value in gb.items()}}


class Most:
    """Within it, the most that `own_bytes` was."""

    def __enter__(self) -> "Most":
        self.bytes, self._ended = own_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        self.bytes = max(self.bytes, own_bytes())

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()
        self.look()


def own_bytes() -> int:
    """What this process holds that is in no file."""
    (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) * 1024


# -------------------------------------------------------------------- a folder of random weights


def write(size: Size, folder: Path, *, tiny_one: bool) -> None:
    """A pipeline in bf16, in shards. While it is made its weights are pages of files: SDXL's 7 GB would be more than its reading may take."""
    pipeline = tiny.build(size.family).to(BF16) if tiny_one else at_full_size(size, lambda part: in_files(part, folder.parent))
    if not tiny_one:
        pipeline.vae = size.vae().to(BF16)
    pipeline.save_pretrained(folder, max_shard_size=SHARD)


def in_files(part: nn.Module, folder: Path) -> nn.Module:
    """A module without numbers with random ones in bf16, of spread 0.02, each tensor's in a file without a name in `folder`. One million numbers, repeated."""
    some, made = 0.02 * torch.randn(2**20, generator=torch.Generator().manual_seed(0)), {}
    for store in [module._parameters for module in part.modules()]:
        for name, parameter in store.items():
            if parameter is not None and id(parameter) not in made:  # tied weights stay tied
                with tempfile.NamedTemporaryFile(dir=folder) as file:
                    values = torch.from_file(file.name, shared=True, size=parameter.numel(), dtype=BF16)
                for piece in values.split(some.numel()):
                    piece.copy_(some[: piece.numel()])
                made[id(parameter)] = parameter, nn.Parameter(values.view(parameter.shape), requires_grad=False)
            store[name] = made[id(parameter)][1] if parameter is not None else None
    return part


if __name__ == "__main__":
    sys.exit(main())
