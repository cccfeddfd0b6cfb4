"""What makes a training step on this CPU fast: the number format, threads against ranks, the allocator, the layout, IPEX.

    .venv/bin/python benchmarks/cpu.py [--repeats 5] [--ipex_python .venv-ipex/bin/python]

A step is forward, backward, clipping and fused AdamW of a UNet of Stable Diffusion's topology, on latents and texts made up once, by our own parts.
Each comparison is of two ways to do the same, both in processes that stay: one measures while the other waits, in turns, AB BA AB, so that what else
the machine does meets both. A ratio is the median over the turns of (the first's seconds / the second's), above 1: the second is faster; beside
it the lowest and the highest. Wall seconds throughout. --ipex_python: a Python with PyTorch 2.8 and IPEX (scripts/test_ipex makes one);
without it that row is left out. Prints a table and, as its last line, one JSON object.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import argument_parser, print_result, print_table, start
from peer.launch.launcher import physical_cores
from peer.machine.allocator import library
from swarm.errors import UserError
from swarm.ports import free_port

SIZES = {
    "1 M": ((16, 32, 64, 64), 16, 64), "29 M": ((64, 128, 256, 256), 16, 192), "446 M": ((320, 640, 1280), 32, 768), "tiny": ((8, 8), 8, 8),
}  # fmt: skip
"""A UNet's channels by level, its latents' side and its texts' width, by what it has of parameters. 446 M: Stable Diffusion 1.5 without its
lowest level, at 256 pixels; two of its processes want 16 GB."""
BATCH = 4
LIMIT_SECONDS = 600
"""Of an answer; the first one waits for imports."""
_BUDGET_SECONDS = 14 * 60


@dataclass(frozen=True)
class Setting:
    """One way to do a step."""

    threads: int
    precision: str = "no"
    size: str = "29 M"
    batch: int = BATCH
    preload: str = ""
    ipex: bool = False
    python: str = sys.executable
    ranks: int = 1
    """How many processes at once, each with its own threads and batch; their gradients are added up over gloo."""


@dataclass(frozen=True)
class Comparison:
    name: str
    before: Setting
    after: Setting
    why_not: str = field(default="", compare=False)
    """Reason why it is left out."""


def comparisons(cores: int, size: str, ipex_python: str, free_bytes: int) -> list[Comparison]:
    """All that there is to compare on a machine with `cores` physical cores and `free_bytes` of free memory."""
    plain = Setting(cores, "bf16", size)
    tcmalloc = library(("libtcmalloc.so*", "libtcmalloc_minimal.so*"))
    half = max(1, cores // 2)
    of_28 = {"python": ipex_python or sys.executable, "size": size}
    return [
        Comparison(f"fp32 -> bf16, {size}", Setting(cores, "no", size), plain),
        Comparison("fp32 -> bf16, 1 M", Setting(cores, "no", "1 M"), Setting(cores, "bf16", "1 M")),
        Comparison(
            "fp32 -> bf16, 446 M", Setting(cores, "no", "446 M", batch=1), Setting(cores, "bf16", "446 M", batch=1),
            "" if free_bytes > 18 << 30 else "there is less than 18 GiB of free memory",
        ),
        Comparison("1 thread -> all", Setting(1, "bf16", size), plain, "" if cores > 1 else "there is one core"),
        Comparison(
            f"1 rank x {cores} threads -> 2 ranks x {half}", plain, Setting(half, "bf16", size, BATCH // 2, ranks=2), "" if cores > 1 else "there is one core"
        ),
        Comparison("malloc -> tcmalloc", plain, Setting(cores, "bf16", size, preload=tcmalloc), "" if tcmalloc else "libtcmalloc is not installed"),
        Comparison(
            "PyTorch 2.8 -> IPEX 2.8, bf16",
            Setting(cores, "bf16", **of_28),
            Setting(cores, "bf16", ipex=True, **of_28),
            "" if ipex_python else "--ipex_python was not given",
        ),
        Comparison("PyTorch 2.8 -> IPEX 2.8, fp32", Setting(cores, "no", **of_28), Setting(cores, "no", ipex=True, **of_28), "" if ipex_python else "--ipex_python was not given"),
        Comparison("PyTorch 2.8 -> this one, bf16", Setting(cores, "bf16", **of_28), plain, "" if ipex_python else "--ipex_python was not given"),
    ]  # fmt: skip


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each comparison [5]")
    parser.add_argument("--steps", type=int, default=3, help="steps that a turn times [3]")
    parser.add_argument("--size", choices=SIZES, default="29 M", help="the UNet [29 M]")
    parser.add_argument("--threads", type=int, default=0, help="compute with N threads; 0: one for each physical core that we may use")
    parser.add_argument("--ipex_python", default="", help="Python with PyTorch 2.8 and IPEX")
    parser.add_argument("--only", default="", help="those comparisons alone whose name has this in it")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return start(parser, lambda options: work(Setting(**json.loads(options.work))) if options.work else measure(options))


def measure(options: argparse.Namespace) -> None:
    if options.repeats < 1 or options.steps < 1:
        raise UserError("repeats and steps are counted from 1.", fix="Use 1 or more.")
    if options.ipex_python and not os.access(options.ipex_python, os.X_OK):
        raise UserError(f"{options.ipex_python} cannot be run.", fix="Give the Python of the environment that scripts/test_ipex makes.")
    cores = options.threads or physical_cores(os.sched_getaffinity(0))
    until = time.monotonic() + _BUDGET_SECONDS
    rows, found, left_out = [], {}, {}
    for comparison in comparisons(cores, options.size, options.ipex_python, psutil.virtual_memory().available):
        if options.only not in comparison.name:
            continue
        why_not = comparison.why_not or ("the time is over" if time.monotonic() > until else "")
        if why_not:
            left_out[comparison.name] = why_not
            rows.append({"": comparison.name, "why not": why_not})
            continue
        pairs = compare(comparison, options.repeats, options.steps)
        ratios = [before / after for before, after in pairs]
        medians = [statistics.median(side) for side in zip(*pairs, strict=True)]
        found[comparison.name] = {"ratio": statistics.median(ratios), "ratios": ratios, "seconds": medians}
        rows.append({"": comparison.name, "before s": medians[0], "after s": medians[1], "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)})  # fmt: skip
        print(f"{comparison.name}: {statistics.median(ratios):.3f}", file=sys.stderr, flush=True)
    print_table(rows)
    print_result({"cores": cores, "size": options.size, "batch": BATCH, "ratios": found, "left_out": left_out})


def compare(comparison: Comparison, repeats: int, steps: int) -> list[tuple[float, float]]:
    """Seconds a step of both ways, by turns; who begins changes from turn to turn."""
    sides = [Workers(comparison.before), Workers(comparison.after)]
    try:
        pairs = []
        for turn in range(-1, repeats):  # the first warms up
            order = (0, 1) if turn % 2 else (1, 0)
            seconds = {side: sides[side].seconds_of(steps if turn >= 0 else 1) for side in order}
            pairs.append((seconds[0], seconds[1]))
        return pairs[1:]
    finally:
        for side in sides:
            side.close()


class Workers:
    """The processes of one way, which compute when they are told to."""

    def __init__(self, setting: Setting):
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_", "MKL_")) and name != "LD_PRELOAD"
        }
        environ |= {"OMP_NUM_THREADS": str(setting.threads), "HF_HUB_OFFLINE": "1"}
        environ |= {"LD_PRELOAD": setting.preload} if setting.preload else {}
        environ |= (
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(setting.ranks)} if setting.ranks > 1 else {}
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [setting.python, str(Path(__file__).resolve()), "--work", json.dumps(vars(setting))]
        self._processes = [subprocess.Popen(command, env=environ | {"RANK": str(rank)}, **pipes) for rank in range(setting.ranks)]
        self._errors: list[list[str]] = [[] for _ in self._processes]
        self._readers = [
            threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
            for process, lines in zip(self._processes, self._errors, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def seconds_of(self, steps: int) -> float:
        """Wall seconds of a step, the slowest process's. Raises UserError when one fails or does not answer in time."""
        limit = threading.Timer(LIMIT_SECONDS, self.close)
        limit.start()
        try:
            for process in self._processes:
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
            return max(float(self._answer(number)) for number in range(len(self._processes)))
        except (BrokenPipeError, ValueError):
            for reader in self._readers:
                reader.join(5)  # until it has read the last words
            words = "".join(self._errors[0][-5:]).strip() or f"no answer within {LIMIT_SECONDS} s"
            raise UserError(f"A process of the benchmark failed: {words}", fix="Mend that, or use a smaller --size.") from None
        finally:
            limit.cancel()

    def _answer(self, number: int) -> str:
        for line in self._processes[number].stdout:  # libraries print there as well
            if line.startswith("seconds "):
                return line.split()[1]
        return ""

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process, reader in zip(self._processes, self._readers, strict=True):
            process.wait()
            reader.join(5)
            for pipe in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(OSError):
                    pipe.close()


def work(setting: Setting) -> None:
    """One process: for each number of steps on stdin, the seconds that one of them took."""
    step = build(setting)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            step()
        print("seconds", (time.perf_counter() - start) / int(line), flush=True)


def build(setting: Setting):
    """A function that does one step by our own parts, after what the setting asks for is in place."""
    channels, side, width = SIZES[setting.size]

    import torch
    from diffusers import UNet2DConditionModel

    from peer.loop.optim import build_optimizer
    from peer.machine.device import Rank, RankGroup, choose_precision
    from swarm.run_config import RunConfig

    torch.set_num_threads(setting.threads)
    cpu = torch.device("cpu")
    group = RankGroup(Rank.from_environment(), cpu)
    if setting.ipex:
        from peer.machine.ipex import Ipex, check_ipex

        check_ipex(cpu)
        Ipex().on()
    torch.manual_seed(0)
    levels = len(channels)
    unet = UNet2DConditionModel(
        sample_size=side, layers_per_block=2, block_out_channels=channels, cross_attention_dim=width, attention_head_dim=8, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D",) * (levels - 1) + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * (levels - 1),
    ).train()  # fmt: skip
    params = dict(unet.named_parameters())
    precision = choose_precision(setting.precision, cpu, 0)
    optimizer = build_optimizer(RunConfig(learning_rate=1e-5, optimizer="adamw"), params, cpu)
    latents, target = torch.randn(2, setting.batch, 4, side, side)
    timesteps, texts = torch.linspace(1, 999, setting.batch).long(), torch.randn(setting.batch, 77, width)

    def step() -> None:
        with precision.autocast():
            predicted = unet(latents, timesteps, encoder_hidden_states=texts, return_dict=False)[0]
        (predicted.float() - target).square().mean().backward()
        group.sum_([parameter.grad for parameter in params.values()])
        torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    sys.exit(main())
