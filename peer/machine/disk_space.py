"""Whether what a run will write fits on the disk, asked before the first hour of training rather than after it."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from peer.config import PeerConfig
from peer.results.checkpoint import Checkpoints
from swarm.advice import size
from swarm.errors import ExitCode, UserError
from swarm.run.optimizer import AUTO, optimizer_named

log = logging.getLogger(__name__)

SPARE_BYTES = 64 << 20
"""Left free on top of everything: other programs write, too."""


def check_disk(folder: Path, peer: PeerConfig, parameters: int, optimizer: str = AUTO) -> None:
    """Warn where the disk will be full before the end. Raises UserError where not even the least fits. parameters: how many are trained."""
    fits, told = check_space(folder, needed_by(peer, folder, 4 * parameters, optimizer))
    if not fits:
        log.warning("%s", told)


def needed_by(peer: PeerConfig, folder: Path, trained: int, optimizer: str = AUTO) -> dict[str, float]:
    """`needed_bytes` of this peer in its output folder."""
    checkpoints = peer.checkpoints_total_limit
    return needed_bytes(
        trained, checkpoints=checkpoints, there=len(Checkpoints(folder, checkpoints).paths()), average=peer.use_ema,
        swarming=peer.swarming, optimizer=optimizer, on_disk=peer.swarming and peer.state_on == "disk",
    )  # fmt: skip


def needed_bytes(
    trained: int, *, checkpoints: int, there: int, average: bool, swarming: bool, optimizer: str = AUTO, on_disk: bool = False
) -> dict[str, float]:
    """Bytes by what they are for. trained: of the trained tensors in float32; checkpoints: how many are kept, of which `there` are there.

    A checkpoint has the weights, the optimizer's state (AdamW's: two moments of each) and the average where one is kept. A swarm's
    states are weights and momentum, two of them and one that is being written; beside them lie the last two rounds' means. Older states
    are kept only where there is room besides. on_disk: whether two more states, a contribution and a mean lie here too (`--state_on disk`).
    """
    checkpoint = trained * (1 + max(optimizer_named(optimizer).state_bytes) / 4 + average)
    return {
        "a checkpoint beside the last one": checkpoint,
        "further checkpoints": checkpoint * max(checkpoints - there, 0),
        "the swarm's states": (3 * 2 + 2) * trained * swarming,
        **({"what --state_on disk takes": (2 * 2 + 2) * trained} if on_disk else {}),
        "the result": trained,
    }


def check_space(folder: Path, needed: Mapping[str, float]) -> tuple[bool, str]:
    """Whether everything fits, and in words what is free and needed.

    Raises UserError when not even the least fits, a checkpoint and the result.
    """
    free = shutil.disk_usage(folder).free
    least = needed["a checkpoint beside the last one"] + needed["the result"] + SPARE_BYTES
    total = sum(needed.values()) + SPARE_BYTES
    items = ", ".join(f"{name} {size(count)}" for name, count in (*needed.items(), ("left for other programs", SPARE_BYTES)) if count)
    told = f"{folder} has {size(free)} free, and this run needs up to {size(total)} ({items})"
    if free < least:
        raise UserError(f"{told}, {size(least)} at least.", fix="Free some space, or choose another --output_dir.", code=ExitCode.DISK)
    return free >= total, told
