"""One p2pd, libp2p's own process, as a child that never outlives this one and whose sockets go with it."""

import asyncio
import contextlib
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from hivemind.p2p import P2P

from swarm import sockets
from swarm.lifeline import die_with_parent

START_SECONDS = 30.0
END_SECONDS = 5.0
"""In which p2pd ends when it is told to, or is killed."""
_GO = {"GOMAXPROCS": "1", "GOGC": "400"}
"""Of Go's runtime, where our environment says nothing. On several cores its threads wake each other for every 32 KiB; one core passes on
5 Gbit/s. Garbage may grow to four times what is in use: 150 MB in all after some 300 rounds, and no more after 1,000. Together: a quarter
less time for an average."""
_spawn = asyncio.subprocess.create_subprocess_exec
_starting = 0


class _Questions(dict[UUID, asyncio.Task]):
    """Those that are being answered. hivemind forgets none that was cancelled or whose answer is too large, 4 MB each; here each goes with
    its task, also with one that was cancelled before it began."""

    def __setitem__(self, call: UUID, task: asyncio.Task) -> None:
        super().__setitem__(call, task)
        task.add_done_callback(lambda _: self.pop(call, None))


class _Calls(dict[UUID, asyncio.Future]):
    """Those of ours that wait for an answer. hivemind gives an answer also to one that was cancelled a moment ago, and that error ended its reader:
    no answer came to this process any more, and no question, and nothing said so."""

    def __contains__(self, call: object) -> bool:
        waiting = self.get(call)
        return waiting is not None and not waiting.done()


class Daemon:
    """`await Daemon.start(...)`; speak to it through `p2p`."""

    def __init__(self, p2p: P2P, folder: Path):
        self.p2p, self._folder = p2p, folder
        self._connections = _connections(p2p)
        control = p2p._client.control
        control._handler_tasks, control._pending_calls = _Questions(), _Calls()

    @classmethod
    async def start(cls, **options: Any) -> "Daemon":
        """options: those of `hivemind.P2P.create`. Raises what that raises."""
        folder = sockets.make_folder()
        creating = asyncio.create_task(_create(folder, **options))
        try:
            # hivemind leaves a p2pd behind whose start is cancelled: 80 MB for each that asks us to dial it and goes away at the right moment.
            return cls(await asyncio.shield(creating), folder)
        except BaseException:
            await asyncio.wait({creating})
            if creating.cancelled() or creating.exception() is not None:
                sockets.remove_folder(folder)
            else:
                await cls(creating.result(), folder).close()
            raise

    @property
    def is_deaf(self) -> bool:
        """Whether hivemind reads p2pd's answers no more; it says so to nobody."""
        reading = self.p2p._client.control._read_task
        return reading is not None and reading.done()

    async def ended_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for p2pd to end; whether it has."""
        child = self.p2p._child
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(child.wait(), seconds)
        return child.returncode is not None

    async def close(self) -> None:
        """End p2pd and leave nothing open in the loop, which may live on, or be closed with a warning of each such thing."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.p2p.shutdown(), END_SECONDS)
        if self.p2p._child.returncode is None:  # it hangs
            with contextlib.suppress(ProcessLookupError):
                self.p2p._child.kill()
            await self.ended_within(END_SECONDS)
        for transport in list(self._connections):
            transport.abort()
        sockets.remove_folder(self._folder)


async def _create(folder: Path, **options: Any) -> P2P:
    with _our_child():
        # check_if_identity_free would start a second p2pd; the lock on the identity's file answers sooner
        return await _private(folder).create(startup_timeout=START_SECONDS, check_if_identity_free=False, **options)


def _connections(p2p: P2P) -> weakref.WeakSet[asyncio.BaseTransport]:
    """Those that will be opened to p2pd. hivemind does not close one whose question was given up (cancelled, or too late)."""
    connector, opened = p2p._client.control.daemon_connector, weakref.WeakSet()
    connect = connector.open_connection

    async def open_connection() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await connect()
        opened.add(writer.transport)
        return reader, writer

    connector.open_connection = open_connection
    return opened


@contextlib.contextmanager
def _our_child() -> Iterator[None]:
    # hivemind starts p2pd without a way to pass preexec_fn. kill -9 of this process left p2pd answering the swarm 47 s later (seen).
    global _starting
    _starting += 1  # several may start at once, and the last of them puts the original back
    asyncio.subprocess.create_subprocess_exec = _spawn_ours
    try:
        yield
    finally:
        _starting -= 1
        if not _starting:
            asyncio.subprocess.create_subprocess_exec = _spawn


async def _spawn_ours(*command: str, env: Mapping[str, str], **options: Any) -> asyncio.subprocess.Process:
    return await _spawn(*command, env={**_GO, **env}, preexec_fn=die_with_parent, **options)


def _private(folder: Path) -> type[P2P]:
    # hivemind puts p2pd's sockets into /tmp itself, where a kill leaves them for good: 62 after an afternoon of tests.
    return type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})
