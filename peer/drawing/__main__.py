"""Draws one state: told which by an `Order` on stdin, it sends the pictures as a trainer does, and ends.

Its exit status says whether it may go better with a later state: CONFIG and MEMORY never do. Why, is a line of the log.
"""

import contextlib
import dataclasses
import logging
import os
import resource
import sys
from pathlib import Path

from peer.drawing.artist import Order
from swarm.advice import size
from swarm.errors import ExitCode, UserError, of_machine
from swarm.founding import check_resolution
from swarm.lifeline import die_with_parent
from swarm.logs import setup_logging
from swarm.memory_advice import A_DRAWING, memory_advice

log = logging.getLogger("peer.drawing")

_LOWEST_PRIORITY = 19
_FIRST_TO_END = "1000"


def main() -> int:
    die_with_parent()
    order = Order.from_json(sys.stdin.buffer.read())
    peer = order.peer
    setup_logging(debug=peer.debug, name=Path(peer.output_dir).name, log_format=peer.log_format)
    os.nice(_LOWEST_PRIORITY)
    with contextlib.suppress(OSError):  # some containers do not let us
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_END)
    if on_cpu(order):  # a GPU's driver reserves addresses as it likes
        resource.setrlimit(resource.RLIMIT_DATA, (int(order.memory_bytes),) * 2)
    return attempt(order)


def attempt(order: Order) -> int:
    """Draw; what goes wrong becomes one line and an exit code."""
    try:
        draw(order)
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
            problem = out_of_gpu_memory(order) if type(error).__name__ == "OutOfMemoryError" else out_of_memory(order)
    if problem.code in (ExitCode.CONFIG, ExitCode.MEMORY):
        log.warning("this peer draws no pictures: %s", problem)
    else:
        log.warning("no pictures of round %d: %s", order.round, problem)
    return problem.code


def out_of_memory(order: Order) -> UserError:
    return UserError(
        f"drawing takes more than {size(order.memory_bytes)}, half of the memory that is free here.",
        fix=memory_advice(A_DRAWING, {"offload"}),
        code=ExitCode.MEMORY,
    )


def out_of_gpu_memory(order: Order) -> UserError:
    return UserError(
        f"drawing takes more memory than {order.peer.device} has free.",
        fix=memory_advice(A_DRAWING, {"offload"} if order.peer.offload else ()),
        code=ExitCode.MEMORY,
    )


def on_cpu(order: Order) -> bool:
    """A GPU is used where it is asked for only: it may be a trainer's."""
    return order.peer.device in ("auto", "cpu")


def draw(order: Order) -> None:
    """Raises UserError, ImportError, and what a machine raises that is short of something."""
    import diffusers  # noqa: F401 - models import it late, where its absence would look like a broken model
    import torch

    from peer.drawing.validation import Validation
    from peer.export import fill
    from peer.launch.launcher import Rank, said_threads
    from peer.launch.starting_model import load_model
    from peer.machine.device import RankGroup, choose_device, choose_precision
    from peer.machine.turns import Turns, takes_turns
    from peer.models.diffusion.source import locate
    from peer.rooms import load_part

    peer, run, alone = order.peer, order.run, Rank()
    source = locate(order.given.get("model") or run.model)
    weights = [source] if source.is_file() else source.glob("*/*.safetensors")
    if order.state.stat().st_size + sum(path.stat().st_size for path in weights) > order.memory_bytes:
        raise out_of_memory(order)
    torch.set_num_threads(peer.num_threads or said_threads() or max(1, len(os.sched_getaffinity(0)) // 2))
    device = torch.device("cpu") if on_cpu(order) else choose_device(peer.device, alone)
    method, model = load_part("methods", run.method).build(run), load_model(run, order.given, None)
    check_resolution(run, model.resolution_multiple)
    computing = sum(p.numel() for p in model.parts[model.facts.denoiser].parameters())
    precision = choose_precision(peer.mixed_precision, device, computing)
    turned = takes_turns(dataclasses.replace(peer, cache_text=False), device)  # no caches here, with which parts take turns unasked
    model.place(device, precision.dtype, method.whole(model), hold=torch.Tensor.cpu if turned else None)
    params = method.attach(model)
    header = fill(params, order.state, run).header
    if turned:
        for parameter in params.values():  # a new word is in no part, so that no turn brings it
            parameter.data = parameter.data.to(device)
        Turns(model, device)
    with sending(order) as showing:
        Validation(
            model=model,
            group=RankGroup(alone, device),
            precision=precision,
            prompts=peer.validation_prompts,
            images=peer.num_validation_images,
            denoising_steps=peer.validation_inference_steps,
            side=run.resolution,
            seed=run.seed,
            folder=Path(peer.output_dir) / "validation",
            weights=contextlib.nullcontext,
            show=lambda step, grid: None,
            share=lambda drawn: showing.show(header.round, header.samples, drawn) if showing else None,
        ).draw(header.round)


@contextlib.contextmanager
def sending(order: Order):
    """To the dataset server's page, where the run has one."""
    if not order.server_url:
        yield None
        return
    from peer.drawing.gallery import Showing

    showing = Showing.to_server(order.server_url, order.peer, order.run.run_id, order.peer_id)
    try:
        yield showing
    finally:
        showing.close()


if __name__ == "__main__":
    sys.exit(main())
