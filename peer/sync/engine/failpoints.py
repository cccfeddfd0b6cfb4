"""Failpoints: named places in a round at which tests and `scripts/soak` kill, stop, delay or fail this process. Nothing is armed in production.

Arm processes by a file, named in DD_FAILPOINTS when they start and written at any time: lines "FAILPOINT ACTION [SECONDS]". Whoever reaches the
point first takes its line out and does it. Actions: `kill` this process; `kill_peer`, the training process with it; `stop` (SIGSTOP) for
SECONDS; `delay` by SECONDS; `fail` as if the other end were lost. Tests in one event loop set `hook` instead.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from peer.sync.engine.net.streams import PeerLost

FAILPOINTS = (
    "frozen", "called", "joined", "group_closed", "first_part_sent", "half_of_parts_sent", "before_last_part", "mean_complete",
    "outer_step", "before_publish", "rebased", "saved", "before_final", "donor_half_way", "fetch_half_way",
)  # fmt: skip
"""`frozen` and `rebased` are the training process's, all others the sidecar's."""

hook: Callable[[str, str], Awaitable[None]] | None = None
"""Called with the point and the peer's id, in tests of several peers in one process, and in simulations."""
hook_in_trainer: Callable[[str], None] | None = None
"""Called with the point, in simulations; it may block."""
_file = os.environ.get("DD_FAILPOINTS", "")


async def reached(point: str, peer: str = "") -> None:
    """Raises PeerLost when the point is armed to fail."""
    if hook is not None:
        await hook(point, peer)
    elif _file:
        action, seconds = _take(point)
        if action == "delay":
            await asyncio.sleep(seconds)
        else:
            _do(point, action, seconds)


def reached_in_trainer(point: str) -> None:
    if hook_in_trainer is not None:
        hook_in_trainer(point)
    elif _file:
        action, seconds = _take(point)
        if action == "delay":
            time.sleep(seconds)
        else:
            _do(point, action, seconds)


async def part_sent(index: int, count: int, peer: str) -> None:
    """The part `index` of `count` to one reducer is on its way."""
    if hook is None and not _file:
        return
    if index == 0:
        await reached("first_part_sent", peer)
    if index == count // 2:
        await reached("half_of_parts_sent", peer)
    if index == max(count - 2, 0):
        await reached("before_last_part", peer)


def _take(point: str) -> tuple[str, float]:
    """The action armed at `point`, which is disarmed by it."""
    try:
        lines = Path(_file).read_text().splitlines()
    except OSError:
        return "", 0.0
    armed = next((line for line in lines if line.split()[:1] == [point]), None)
    if armed is None:
        return "", 0.0
    lines.remove(armed)
    temporary = Path(f"{_file}.{os.getpid()}")
    temporary.write_text("\n".join(lines))
    os.replace(temporary, _file)
    _, action, *seconds = armed.split()
    return action, float(seconds[0]) if seconds else 0.0


def _do(point: str, action: str, seconds: float) -> None:
    if action == "kill_peer" and point not in ("frozen", "rebased"):
        os.kill(os.getppid(), signal.SIGKILL)
    if action in ("kill", "kill_peer"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "fail":
        raise PeerLost(f"failed at {point}, as it was told to")
