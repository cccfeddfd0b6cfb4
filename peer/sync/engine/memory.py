"""The host memory that averaging takes, counted before any of it is taken.

`benchmarks/memory.py` measures the same, and prints the table of docs/hardware.md.
"""

from collections.abc import Mapping

import psutil

from peer.sync.engine.buffers import MEMORY
from peer.sync.engine.codec import Wire
from peer.sync.engine.outer import Strategy
from peer.sync.engine.round.averaging import PARTS_OF_A_SENDER
from swarm.advice import size
from swarm.cgroups import MemoryGroups
from swarm.errors import ExitCode, UserError

FLOAT_BYTES = 4
SIDECAR_BYTES = 400e6
"""Python, torch and hivemind of the second process, before it holds any state; p2pd beside it. Measured: 0.30 GB."""
COUNTED_SENDERS = 15
"""The others in a group of 16, the largest that was measured (docs/internals.md); who will come is not known before."""


def state_bytes(strategy: Strategy, wire: Wire, *, trains: bool = True) -> dict[str, float]:
    """What lies where `--state_on` says, at the moment a round is committed, when it is most: bytes by what they are for.

    Trainer and sidecar share states and contributions, so each counts once. trains: not a peer that only assists.
    """
    state = FLOAT_BYTES * wire.size * (1 + strategy.slots)
    return {
        "the state": state,
        "the next state": state,
        "our contribution": wire.num_bytes * trains,
        "the round's mean": wire.num_bytes,
    }


def host_bytes(
    strategy: Strategy, wire: Wire, *, trains: bool = True, params_on_host: bool = True, state_on: str = MEMORY
) -> dict[str, float]:
    """What is in the host's memory at that moment: bytes by what they are for. What is trained and its optimizer are not counted: they are
    there without a swarm too."""
    return {
        **(state_bytes(strategy, wire, trains=trains) if state_on == MEMORY else {}),
        "parts of the others": COUNTED_SENDERS * sum(sorted((part.num_bytes for part in wire.parts), reverse=True)[:PARTS_OF_A_SENDER]),
        "gradients of the round": FLOAT_BYTES * wire.size * (trains and params_on_host and not strategy.steps_locally),
    }


def check_memory(needed: Mapping[str, float], available: float) -> None:
    """Raise UserError when averaging would run out of memory, before it takes any."""
    total = sum(needed.values()) + SIDECAR_BYTES
    if total > available:
        items = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in needed.items() if num_bytes)
        raise UserError(
            f"Averaging needs {size(total)} of this machine's memory, and {size(available)} are free ({items}, its own process {size(SIDECAR_BYTES)}).",
            fix=f"End other programs here, {'add --state_on disk, ' if 'the state' in needed else ''}"
            "or take part in a run with --sync parameters, --wire int8, or --method lora; docs/hardware.md has the figures.",
            code=ExitCode.MEMORY,
        )


def available_bytes(groups: MemoryGroups | None = None) -> float:
    """Memory that this process can still take without swapping: the machine's, or less where its control groups have a limit."""
    return min(float(psutil.virtual_memory().available), (groups or MemoryGroups()).free_bytes())
