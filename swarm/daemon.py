"""One p2pd, libp2p's own process, as a child that never outlives this one and whose sockets go with it."""

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P

from swarm import sockets
from swarm.lifeline import die_with_parent

START_SECONDS = 30.0
_spawn = asyncio.subprocess.create_subprocess_exec
_starting = 0


class Daemon:
    """`await Daemon.start(...)`; speak to it through `p2p`."""

    def __init__(self, p2p: P2P, folder: Path):
        self.p2p, self._folder = p2p, folder

    @classmethod
    async def start(cls, **options: Any) -> "Daemon":
        """options: those of `hivemind.P2P.create`. Raises what that raises."""
        folder = sockets.make_folder()
        try:
            with _children_die_with_us():
                # check_if_identity_free would start a second p2pd; the lock on the identity's file answers sooner
                p2p = await _private(folder).create(startup_timeout=START_SECONDS, check_if_identity_free=False, **options)
        except BaseException:
            sockets.remove_folder(folder)
            raise
        return cls(p2p, folder)

    async def ended_within(self, seconds: float) -> bool:
        """Wait so long for p2pd to end; whether it has."""
        child = self.p2p._child
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(child.wait(), seconds)
        return child.returncode is not None

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.p2p.shutdown(), 5)
        sockets.remove_folder(self._folder)


@contextlib.contextmanager
def _children_die_with_us() -> Iterator[None]:
    # hivemind starts p2pd without a way to pass preexec_fn. kill -9 of this process left p2pd answering the swarm 47 s later (seen).
    global _starting
    _starting += 1  # several may start at once, and the last of them puts the original back
    asyncio.subprocess.create_subprocess_exec = functools.partial(_spawn, preexec_fn=die_with_parent)
    try:
        yield
    finally:
        _starting -= 1
        if not _starting:
            asyncio.subprocess.create_subprocess_exec = _spawn


def _private(folder: Path) -> type[P2P]:
    # hivemind puts p2pd's sockets into /tmp itself, where a kill leaves them for good: 62 after an afternoon of tests.
    return type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})
