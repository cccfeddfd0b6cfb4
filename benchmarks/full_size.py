"""Stable Diffusion 1.5 at its full size in swarms of this machine, without a GPU: does it fit, agree and load?

    .venv/bin/python benchmarks/full_size.py                  all rows: 15 minutes at most on two free cores; run it alone
    .venv/bin/python benchmarks/full_size.py --rows full      one of them
    .venv/bin/python benchmarks/full_size.py --tiny           the same with tiny weights, to try it: these figures mean nothing

Each row is a dataset server and two peers at 256 px, with the program's own commands: `lora`, two that train a LoRA of rank 16; `full`, one that trains
the whole UNet with Adafactor and `--state_on disk`, and one that assists it. The model has random weights and the real one's sizes, so what it draws
means nothing. Then the peers' results are compared to the bit, and plain diffusers loads the first and draws.

The model, its pictures and all that the peers write are in a folder of TMPDIR, which must be on a disk. Memory is that of all peers' processes together:
pages that several share count once, those of files not at all, since the kernel has them back when it wants; `with_files_gib` has them.
Under a limit: `systemd-run --scope -p MemoryMax=14G .venv/bin/python benchmarks/full_size.py --rows full`, where the kernel takes pages of files back.
The last line is JSON: `digests_equal` and `loads` of all rows, `seconds_per_step` of the slowest, the highest `peak_gib`, and `rows`, what each said.
"""

import contextlib
import os
import re
import shutil
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import argument_parser, family, heed_sigterm, held, print_result, print_table, start
from benchmarks.gpu_sd15 import FULL, TINY, Setup, Sizes, prepare
from peer.sync.engine.memory import available_bytes
from peer.watchdog.vitals import OutOfMemory
from scripts.demo import results, swarm_run
from scripts.demo.display import Display
from swarm.errors import ExitCode, UserError

STALL_SECONDS = 3600.0
"""A first round takes two minutes on two cores that are free, and twenty were seen where five other programs computed."""
LOOK_SECONDS, TINY_LOOK_SECONDS = 0.5, 5.0
"""Between two looks at the memory; with tiny weights, whose figures mean nothing, a look takes longer than a step."""
_NEWS_BYTES = 1 << 27
"""By how much the kernel's counters must rise before all pages are looked at, which takes 0.25 s of a core for a whole UNet's. So much may be missed."""
FLAGS = ("--cache_latents", "--cache_text", "--gradient_checkpointing", "--print_loss")
ALL_CORES = ("--num_threads", str(len(os.sched_getaffinity(0))))
"""Where one of two peers computes. Not with a tiny model, which is tried beside other programs: two threads that wait for each other took 25 s a step."""
TINY_ROUND = 12
"""Samples of a tiny model's round. Of four it would take less than a second, and the peer that trains be at the end before the other one has come."""
RUN = {"ucg": 0.0, "wire": "fp16"}
_STEP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)Z .*: (?:step=\d+ samples=|(averaged) round=)", re.MULTILINE)
"""A step, or a round that was averaged."""
_COUNTERS = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
"""Of /proc/PID/status."""
Found = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A swarm of two peers. flags: of both; first: of the first alone. gib, gb: of memory and of disk that it takes at full size, with some to spare."""

    title: str
    rounds: int
    target: int
    """Samples of a round."""
    settings: Mapping[str, Any]
    gib: float
    gb: float
    flags: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    same: Callable[[Sequence[Path]], bool] = lambda models: True
    """Whether the results of the peers that train are one."""


def same_loras(models: Sequence[Path]) -> bool:
    """Whether all have the same LoRA, to the bit."""
    import torch
    from safetensors.torch import load_file

    first, *others = (load_file(model / "pytorch_lora_weights.safetensors") for model in models)
    return all(each.keys() == first.keys() and all(torch.equal(each[key], first[key]) for key in first) for each in others)


# Counted for `full` (peer/machine/counting.py), in GB: 0.86 billion weights in float32 are 3.4, their gradients and what flows through the layers 3.6,
# Adafactor's state 1.1; to write the result a peer reads the model once more, 4.3. Four processes of Python take 2. So the weights need not be bf16.
# On the disk are the model, 4.3, and of states of 3.4 each: three that are kept and two in use with a mean and a contribution, by either peer; a
# checkpoint, and the result.
ROWS = {
    "lora": Row("LoRA, two peers", 2, 8, {"method": "lora", "rank": 16, "learning_rate": 1e-4}, gib=12, gb=10, flags=("--min_peers", "2"), same=same_loras),
    "full": Row(
        "full, one peer and one that assists",
        2,
        2,
        {"method": "full", "optimizer": "adafactor", "learning_rate": 1e-5},
        gib=13,
        gb=60,
        flags=("--state_on", "disk"),
        first=("--assist",),
    ),
}


class Watch(threading.Thread):
    """The most memory in GiB, looked at every `seconds` until `stop`: that each peer's processes had (`of`), and all peers' together without and with the pages of files."""

    def __init__(self, swarm: swarm_run.SwarmRun, seconds: float):
        super().__init__(daemon=True)
        self.of: dict[str, float] = {}
        self.peak = self.with_files = 0.0
        self._swarm, self._seconds, self._stopped = swarm, seconds, threading.Event()
        self._high: Counter[str] = Counter()

    def run(self) -> None:
        while not self._stopped.wait(self._seconds):
            self.look()

    def look(self) -> None:
        """At the kernel's counters, and at all pages where these are higher than ever."""
        pids = {name: program.pid for name, program in [*self._swarm.peers.items()]}
        at_most = Counter({name: counted(pid) for name, pid in pids.items()})
        at_most["all"] = sum(at_most.values())
        if all(count < self._high[name] + _NEWS_BYTES for name, count in at_most.items()):
            return
        self._high |= at_most
        now = {name: [count / 2**30 for count in held(pid)] for name, pid in pids.items()}
        self.of = {name: max(own, self.of.get(name, 0.0)) for name, (own, _) in now.items()}
        self.peak = max(self.peak, sum(own for own, _ in now.values()))
        self.with_files = max(self.with_files, sum(both for _, both in now.values()))

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def counted(pid: int) -> int:
    """Bytes that a process and all that descend from it have at most, without the pages of files: what several share counts for each of them."""
    kib = 0
    for process in family(pid):
        with contextlib.suppress(OSError):
            kib += sum(map(int, _COUNTERS.findall(Path(f"/proc/{process.pid}/status").read_text())))
    return 1024 * kib


def measure(row: Row, made: Path, folder: Path, *, tiny: bool) -> Found:
    """The peers train to the end of a run. made: what `prepare` has made. Raises UserError when one ends too early."""
    resolution, target = (64, TINY_ROUND) if tiny else (256, row.target)
    folder.mkdir()
    (folder / "base").symlink_to(made / "base")
    (folder / "dataset").symlink_to(made / "pictures")
    plan = swarm_run.Plan(
        folder,
        total_samples=row.rounds * target,
        target_batch_size=target,
        batch=1,
        settings={**RUN, **row.settings, "resolution": resolution},
        peer_flags=(*FLAGS, *row.flags, *(ALL_CORES if row.first and not tiny else ())),
        first_peer_flags=row.first,
        in_turn=bool(row.first),  # who assists is there before the other one has trained a round
        stall_seconds=STALL_SECONDS,
    )
    with Display() as display, swarm_run.SwarmRun(plan, display) as swarm:
        watch = Watch(swarm, TINY_LOOK_SECONDS if tiny else LOOK_SECONDS)
        watch.start()
        try:
            with _told_of_the_kernel(OutOfMemory()):
                story = swarm.run()
        finally:
            watch.stop()
        lines = swarm.held()
    models = [model for name in lines if (model := folder / name / "model").is_dir()]
    seconds = [each for program in swarm.peers.values() for each in _between_steps(program.text())]
    return {
        "digests_equal": not results.unequal_rounds(lines) and results.shared_rounds(lines) > 0 and row.same(models),
        "rounds_shared": results.shared_rounds(lines),
        "loads": draws(made / "base", models[0], resolution),
        "seconds_per_step": statistics.median(seconds),
        "seconds": story.seconds_training,
        "peak_gib": watch.peak,
        "with_files_gib": watch.with_files,
        "gib_of": watch.of,
    }


@contextlib.contextmanager
def _told_of_the_kernel(kills: OutOfMemory) -> Iterator[None]:
    """Within the block, an error says whether the kernel has killed a program for memory: one that it killed says nothing."""
    try:
        yield
    except UserError as error:
        if not kills.look():
            raise
        message = f"The kernel killed a program for want of memory. {error.message}"
        raise UserError(message, fix="End other programs, or leave this row out with --rows.", code=ExitCode.MEMORY) from error


def _between_steps(log: str) -> list[float]:
    """Seconds, whole ones, of each step before which no round was waited for."""
    times = [(datetime.fromisoformat(time), averaged) for time, averaged in _STEP.findall(log)]
    return [(after - before).total_seconds() for (before, one), (after, other) in pairwise(times) if not one and not other]


def draws(base: Path, result: Path, side: int) -> bool:
    """Whether plain diffusers draws something else with a peer's result, a LoRA or a whole model, than without it."""
    import numpy as np
    import torch
    from diffusers import StableDiffusionPipeline

    def loaded(model: Path) -> StableDiffusionPipeline:
        pipeline = StableDiffusionPipeline.from_pretrained(model, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def latents(pipeline: StableDiffusionPipeline) -> np.ndarray:
        rng = torch.Generator().manual_seed(0)
        return pipeline("a red square", num_inference_steps=2, height=side, width=side, generator=rng, output_type="latent").images.numpy()

    pipeline = loaded(base)
    without = latents(pipeline)
    if (result / "model_index.json").exists():
        del pipeline  # never two of them in memory
        pipeline = loaded(result)
    else:
        pipeline.load_lora_weights(result)
    drawn = latents(pipeline)
    return bool(np.isfinite(drawn).all() and not np.array_equal(drawn, without))


def check_room(rows: Sequence[Row], folder: Path) -> None:
    """Raises UserError where memory or the folder's disk has too little room for one of the rows."""
    for row in rows:
        if (free := available_bytes() / 2**30) < row.gib:
            fix = "End other programs, or choose another row with --rows."
            raise UserError(f"{row.title}: {free:.1f} GiB of memory are free, and {row.gib:.0f} are needed.", fix=fix, code=ExitCode.MEMORY)
        if (free := shutil.disk_usage(folder).free / 1e9) < row.gb:
            fix = "Free some space, or set TMPDIR to a folder on a larger disk."
            raise UserError(f"{row.title}: {folder} has {free:.0f} GB free, and {row.gb:.0f} are needed.", fix=fix, code=ExitCode.DISK)


def of_all(found: Mapping[str, Found]) -> Found:
    """The last line: the worst of all rows, and what each said."""
    rows = found.values()
    return {
        "digests_equal": all(one["digests_equal"] for one in rows),
        "loads": all(one["loads"] for one in rows),
        "seconds_per_step": max(one["seconds_per_step"] for one in rows),
        "peak_gib": max(one["peak_gib"] for one in rows),
        "rows": found,
    }


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=tuple(ROWS), help="only these [all]")
    parser.add_argument("--tiny", action="store_true", help="tiny weights and pictures: tries it, measures nothing")
    return start(parser, lambda options: run(options.rows, TINY if options.tiny else FULL))


def run(names: Sequence[str], sizes: Sizes) -> int:
    """All these rows, one after the other. Raises UserError when one cannot run."""
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="full-size-") as temporary:
        made = Path(temporary)
        if sizes is FULL:
            check_room([ROWS[name] for name in names], made)
        prepare(Setup(made, sizes, "cpu"))
        for name in names:
            found[name] = measure(ROWS[name], made, made / name, tiny=sizes is not FULL)
            shutil.rmtree(made / name)  # the next row needs the room
            print_table([{"": f"SD 1.5, {ROWS[name].title}", **found[name]}])
    print_table([{"": f"SD 1.5, {ROWS[name].title}", **one} for name, one in found.items()])
    told = of_all(found)
    print_result({**told, "tiny": sizes is TINY})
    return ExitCode.OK if told["digests_equal"] and told["loads"] else ExitCode.FAILED


if __name__ == "__main__":
    heed_sigterm()
    sys.exit(main())
