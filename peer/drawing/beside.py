"""The process beside an assisting peer that computes with the run's model: to draw, or to measure (`errand.py` starts it).

It takes nothing that reducing needs: it has the lowest priority and a bound on its memory, and the kernel ends it first when memory is short.
"""

import contextlib
import dataclasses
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from peer.contracts import Model, Params
from peer.drawing.errand import HOPELESS, Errand
from peer.launch.launcher import Rank, said_threads
from peer.launch.starting_model import load_model
from peer.machine.device import Precision, choose_device, choose_precision
from peer.machine.turns import Turns, takes_turns
from peer.models.diffusion.pipeline import files_read
from peer.models.diffusion.source import locate
from peer.rooms import load_part
from swarm.advice import size
from swarm.errors import ExitCode, UserError, of_machine
from swarm.founding import check_resolution
from swarm.logs import setup_logging
from swarm.memory_advice import memory_advice

_LOWEST_PRIORITY = 19
_FIRST_TO_END = "1000"


def settle(errand: Errand) -> None:
    """Become a process that gives way to all others. Before anything large is loaded."""
    peer = errand.peer
    setup_logging(debug=peer.debug, name=Path(peer.output_dir).name, log_format=peer.log_format)
    os.nice(_LOWEST_PRIORITY)
    with contextlib.suppress(OSError):  # some containers do not let us
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_END)
    if on_cpu(errand):  # a GPU's driver reserves addresses as it likes
        resource.setrlimit(resource.RLIMIT_DATA, (int(errand.memory_bytes),) * 2)


def on_cpu(errand: Errand) -> bool:
    """A GPU is used where it is asked for only: it may be a trainer's."""
    return errand.peer.device in ("auto", "cpu")


@dataclass(frozen=True)
class Work:
    """What it is at, and which options make room for that: for what is said when memory does not suffice."""

    doing: str
    """Such as "drawing"."""
    ways: Mapping[str, str]
    """As in `swarm.memory_advice`."""

    def out_of_memory(self, errand: Errand, *, on_gpu: bool = False) -> UserError:
        bound = f"{size(errand.memory_bytes)}, half of the memory that is free here"
        than = f"more memory than {errand.peer.device} has free" if on_gpu else f"more than {bound}"
        useless = {"offload"} if errand.peer.offload or not on_gpu else ()
        return UserError(f"{self.doing} takes {than}.", fix=memory_advice(self.ways, useless), code=ExitCode.MEMORY)

    def attempt(self, errand: Errand, do: Callable[[], None], said: Callable[[UserError, bool], None]) -> int:
        """Do it; what goes wrong is `said`, with whether trying again is of no use, and becomes the exit status."""
        try:
            do()
            return ExitCode.OK
        except ImportError as error:
            problem = UserError(f"{error}.", fix="Set this program up again: ./scripts/setup")
        except UserError as error:
            problem = error
        except Exception as error:
            problem = of_machine(error)
            if problem is None:
                raise
            if problem.code == ExitCode.MEMORY:  # torch's own error is a GPU's alone
                problem = self.out_of_memory(errand, on_gpu=type(error).__name__ == "OutOfMemoryError")
        said(problem, problem.code in HOPELESS)
        return problem.code


@dataclass(frozen=True)
class Loaded:
    """The run's model with what is trained of it, to be filled with a state; what a part of a GPU's memory is for goes there in turns."""

    model: Model
    params: Params
    precision: Precision
    turned: bool

    def filled(self) -> None:
        """A state is in `params`: bring to the device what no turn brings."""
        if self.turned:
            for parameter in self.params.values():  # a new word is in no part
                parameter.data = parameter.data.to(self.precision.device)
            Turns(self.model, self.precision.device)


def load(errand: Errand, state: Path, work: Work) -> Loaded:
    """The base model as `errand` says; state: a file of what will be filled in. Raises UserError, ImportError, MemoryError."""
    import diffusers  # noqa: F401 - models import it late, where its absence would look like a broken model

    peer, run = errand.peer, errand.run
    source = locate(errand.given.get("model") or run.model)
    weights = files_read(source)
    if state.stat().st_size + sum(path.stat().st_size for path in weights) > errand.memory_bytes:
        raise work.out_of_memory(errand)
    torch.set_num_threads(peer.num_threads or said_threads() or max(1, len(os.sched_getaffinity(0)) // 2))
    device = torch.device("cpu") if on_cpu(errand) else choose_device(peer.device, Rank())
    method, model = load_part("methods", run.method).build(run), load_model(run, errand.given, None)
    check_resolution(run, model.resolution_multiple)
    computing = sum(p.numel() for p in model.parts[model.facts.denoiser].parameters())
    precision = choose_precision(peer.mixed_precision, device, computing, model.facts.half)
    turned = takes_turns(dataclasses.replace(peer, cache_text=False), device)  # no caches here, with which parts take turns unasked
    model.place(device, precision.dtype, method.whole(model), hold=torch.Tensor.cpu if turned else None)
    return Loaded(model, method.attach(model), precision, turned)
