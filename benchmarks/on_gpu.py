"""One way to train on a GPU, measured: the program's own trainer, from a command line, in a process of its own.

A way that runs out of memory says so, and the next goes on. Only checkpoints are left out. Timed after warming up, between two synchronizations with
the GPU. Peak memory is what PyTorch's allocator gave out (`peak`) and held (`reserved`) from the start to the end, loading included; CUDA's own context,
some 0.4 GiB, is beside it. GiB are 2^30 bytes.
"""

import multiprocessing
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from peer.launch.command_line import parse
from peer.launch.launch import Launch
from peer.launch.launcher import Rank
from peer.launch.resolving import resolve_run
from peer.loop.train import Trainer
from peer.machine.device import RankGroup, choose_device, set_threads
from peer.models.diffusion.source import quiet
from peer.wiring import assemble
from scripts.demo import quickstart
from swarm.errors import ExitCode, UserError

GIB = 2**30
_SHARED = [
    "bitsandbytes",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "peer.wiring",
    "peft",
    "torch._dynamo",
    "transformers.models.clip.modeling_clip",
]
"""What takes seconds to import."""


@dataclass(frozen=True)
class Way:
    """A peer's command line, how much of the GPU it may use, and how it is timed.

    cap_gib: what its allocator may hold; 0: no limit. warm_steps: before the clock starts. steps, seconds: to measure, at the least.
    eager: compile nothing, though the flags say so.
    """

    name: str
    flags: tuple[str, ...]
    device: str
    cap_gib: float = 0.0
    warm_steps: int = 6
    steps: int = 3
    seconds: float = 8.0
    eager: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def check_gpu(device: str, instead: str) -> None:
    """Raises UserError when there is no such GPU. instead: what one can do without."""
    if not device.startswith("cuda"):
        raise UserError(f"--device is {device}, which this benchmark is not about.", fix="Use cuda or cuda:N, or --tiny --device cpu.")
    if not torch.cuda.is_available():
        raise UserError(
            "There is no GPU that this PyTorch can use (torch.cuda.is_available() is False), and this benchmark measures one.",
            fix=f"Run it on a machine with one; {instead}",
            code=ExitCode.FAILED,
        )
    choose_device(device, Rank())


def about_gpu(device: str) -> dict[str, Any]:
    if not device.startswith("cuda"):
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(torch.device(device))
    return {
        "gpu": properties.name,
        "gpu_gib": round(properties.total_memory / GIB, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "tf32": {"cudnn": torch.backends.cudnn.allow_tf32, "matmul": torch.backends.cuda.matmul.allow_tf32},
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


def in_a_process(way: Way, seconds: float) -> dict[str, Any]:
    """What `measure` answers there, or why it did not. A GPU's memory is all given back when the process has ended."""
    # A process that forks from one that has touched CUDA cannot use it; without one, imports are worth sharing.
    context = multiprocessing.get_context("spawn" if way.on_gpu else "forkserver")
    if not way.on_gpu:
        context.set_forkserver_preload(_SHARED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, way), name=way.name)
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return {"note": f"did not end within {seconds:.0f} s", "failed": True}
        return ours.recv()
    except EOFError:
        process.join(10)
        return {"note": f"ended with exit status {process.exitcode}", "failed": True}
    finally:
        ours.close()
        process.kill()
        process.join()
        process.close()


def _answer(answers: Connection, way: Way) -> None:
    try:
        answers.send(measure(way))
    except Exception as error:
        peaks = memory_of(way) | ({"cap_gib": way.cap_gib} if way.cap_gib else {})
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            answers.send({**peaks, "note": "out of memory"})
            return
        traceback.print_exc()
        answers.send({**peaks, "note": (str(error).strip() or type(error).__name__).splitlines()[0][:120], "failed": True})


def measure(way: Way) -> dict[str, Any]:
    """Train, and say how fast and in how much memory."""
    quickstart.quiet_libraries()
    quiet()
    device = choose_device(way.device, Rank())
    set_threads(0, Rank())
    if way.cap_gib and way.on_gpu:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, way.cap_gib * GIB / whole), device)
    clock = Clock(device, way)
    peer, given = parse(list(way.flags), environ={})
    with ExitStack() as closing:
        if way.eager:
            closing.enter_context(torch.compiler.set_stance("force_eager"))
        launch = Launch(
            joined=resolve_run(peer, given), peer=peer, given=given, group=RankGroup(Rank(), device), device=device, stopping=clock.done,
            closing=closing,
        )  # fmt: skip
        trainer, _ = assemble(launch)
        trainer.save = lambda *_: None  # 5 GB at the end of each way
        clock.follow(trainer)
        trainer.run()
        found = {"images_per_second": clock.speed, "loss": clock.loss, "precision": trainer.precision.reason, **memory_of(way)}
        denoiser = trainer.model.parts[trainer.model.facts.denoiser]
        if "--compile" in way.flags and "forward" not in vars(denoiser):
            found["note"] = "not compiled: its gradients were wrong, or it failed"
    return found | ({"cap_gib": way.cap_gib} if way.cap_gib else {})


def memory_of(way: Way) -> dict[str, float]:
    """Since the process began; nothing on a CPU, where it would be the interpreter's."""
    if not way.on_gpu or not torch.cuda.is_initialized():
        return {}
    peaks = {"peak_gib": torch.cuda.max_memory_allocated, "reserved_gib": torch.cuda.max_memory_reserved}
    return {name: round(peak(way.device) / GIB, 2) for name, peak in peaks.items()}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Clock:
    """Lets a trainer warm up, measures for a while, and tells it to stop."""

    def __init__(self, device: torch.device, way: Way):
        self._device, self._way = device, way
        self._steps = self._images = 0
        self._began = self._ended = 0.0
        self.loss: float | None = None

    def follow(self, trainer: Trainer) -> None:
        told = trainer.progress.stepped

        def stepped(**values: Any) -> None:
            told(**values)
            self._count(values["samples"])
            self.loss = values["loss"]

        trainer.progress.stepped = stepped

    def _count(self, images: int) -> None:
        self._steps += 1
        if self._steps == self._way.warm_steps:
            self._began = self._now()
        elif self._steps > self._way.warm_steps and not self._ended:
            self._images += images
            if self._steps >= self._way.warm_steps + self._way.steps and time.monotonic() - self._began >= self._way.seconds:
                self._ended = self._now()

    def _now(self) -> float:
        """When all that was asked of the GPU is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()

    def done(self) -> bool:
        return bool(self._ended)

    @property
    def speed(self) -> float:
        """Images per second."""
        return self._images / (self._ended - self._began)
