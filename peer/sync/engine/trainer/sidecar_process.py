"""The swarm process beside a trainer: started, listened to, started again when it died or hangs, ended.

What it does is in `sidecar.py`, what both say to each other in `port.py`. It is this process's child and the leader of a group of its
own, so that Ctrl+C is for the trainer alone, which then leaves in order, and so that p2pd never outlives it.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from peer.sync.engine.trainer.messages import Close, Message, Pulse, Rebase, Seen, Start
from peer.sync.engine.trainer.port import Port, PortClosed
from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)

CLOSE_SECONDS, CLOSE_AT_MOST_SECONDS = 12.0, 300.0
"""A sidecar that was told to leave is killed after the first without a sign of life, and after the second in any case."""
_RESTARTS = 5
_RESTARTS_WITHIN_SECONDS = 600.0
_SILENT_SECONDS, _SILENT_START_SECONDS = 60.0, 300.0
"""Without a sign of life a sidecar hangs. Starting takes it up to two minutes (to load, and to find peers), copying a state some seconds."""
_LISTENED_AT_MOST_SECONDS = 2.0
_SAID_ONCE_STARTED = Pulse, Rebase, Seen
_NOT_FOR_IT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""A rank's variables: the sidecar belongs to the group of ranks, not to one of them."""


class Child(Protocol):
    """A process that was started: `subprocess.Popen`, as far as it is needed, or one of the simulator's."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(frozen=True)
class Processes:
    """How sidecars are started and ended, and by which clock they are waited for; the simulator has its own."""

    spawn: Callable[[], tuple[Child, Port]]
    kill: Callable[[Child], None]
    """The sidecar, and its p2pd with it."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class SidecarProcess:
    """opening: what a new sidecar begins with; handle: takes what one says, also its last words."""

    def __init__(
        self,
        opening: Callable[[], Start],
        handle: Callable[[Message], None],
        processes: Processes | None = None,
    ):
        self._opening, self._handle, self._processes = opening, handle, processes or Processes(_spawn, _kill)
        self._restarts: list[float] = []
        self._closing = False
        self._process: Child | None = None
        self._port: Port | None = None
        self._start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def ended(self) -> bool:
        """For good: closed, or died too often."""
        return self._process is None

    @property
    def closing(self) -> bool:
        """Whether it was told to end, and is heard out."""
        return self._closing

    # ---------------------------------------------------------------- talking to it

    def send(self, message: Message) -> None:
        """Raises PortClosed."""
        self._port.send(message)

    def has_room(self) -> bool:
        """Whether it takes what we say; one that does not is busy or hangs. Raises PortClosed."""
        return self._port.has_room()

    def messages(self, seconds: float) -> Iterator[Message]:
        """What it has said; waits up to `seconds` for the first. Raises PortClosed, also when it has given no sign of life for too long."""
        self._heard = False
        yield from self._said(seconds)
        self._listen_for_life()

    def _said(self, seconds: float) -> Iterator[Message]:
        """All but its pulse, which says nothing but that it lives."""
        while (message := self._port.receive(seconds)) is not None:
            seconds, self._heard = 0, True
            self._has_started |= isinstance(message, _SAID_ONCE_STARTED)
            if not isinstance(message, Pulse):
                yield message

    def _listen_for_life(self) -> None:
        """One that lives says something every two seconds at least."""
        now = self._processes.clock()
        # A step of minutes, or a while in which this machine was stopped, is no time in which we listened.
        self._silence = 0.0 if self._heard else self._silence + min(now - self._listened, _LISTENED_AT_MOST_SECONDS)
        self._listened = now
        if self._silence > (_SILENT_SECONDS if self._has_started else _SILENT_START_SECONDS):
            log.warning("the swarm process does not answer any more")
            raise PortClosed("it does not answer any more")

    # ---------------------------------------------------------------- its life

    def _start(self) -> None:
        self._has_started = self._heard = False
        self._silence, self._listened = 0.0, self._processes.clock()
        self._process, self._port = self._processes.spawn()
        with contextlib.suppress(PortClosed):  # whoever listens next finds it dead, and starts another
            self._port.send(self._opening())

    def restart(self) -> None:
        """A new one in place of one that died or hangs, which is heard to the end first. Raises UserError when too many have died."""
        assert not self.ended
        code = self._process.poll()
        self._hear_out()
        self._end()
        now = self._processes.clock()
        self._restarts = [t for t in self._restarts if t > now - _RESTARTS_WITHIN_SECONDS]
        if len(self._restarts) >= _RESTARTS:
            raise UserError(
                f"The swarm process died {_RESTARTS} times within {_RESTARTS_WITHIN_SECONDS / 60:.0f} minutes (last exit status {code}).",
                fix="Its log lines above say why; start again with --debug to see more.",
                code=ExitCode.NETWORK,
            )
        log.warning("the swarm process died (exit status %s); starting it again", code)
        self._processes.sleep(min(2 ** len(self._restarts), 30) if self._restarts else 0)
        self._restarts.append(now)
        self._start()

    def close(self, reason: str = "") -> None:
        """End it, hearing what it still has to say; kill it when it does not end by itself. reason: what failed, for the others to read.

        One that has never joined has nothing to write or to tell, and is killed at once: to wait took 12 s and more.
        """
        if self.ended:
            return
        if not (self._has_started or self._restarts):
            return self._end()
        self._closing = True
        with contextlib.suppress(PortClosed):  # one that has ended still has its last words in the port
            self._port.send(Close(reason))
        patience = CLOSE_SECONDS
        try:
            self._listen_to_its_end()
            patience = 0.0
        except PortClosed:
            pass  # it ends, or has ended
        except UserError as error:
            log.error("%s", error)
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            log.warning("the swarm process did not end by itself; the last state may not be on the disk")
        self._end()

    def _listen_to_its_end(self) -> None:
        """For as long as it gives signs of life: a state of 10 GB takes minutes to a slow disk. Raises PortClosed when it ends; UserError."""
        began = heard = self._processes.clock()
        told = False
        while (now := self._processes.clock()) - heard < CLOSE_SECONDS and now - began < CLOSE_AT_MOST_SECONDS:
            self._heard = False
            for message in self._said(0.2):
                self._handle(message)
            heard = now if self._heard else heard
            if now - began > CLOSE_SECONDS and not told:
                told = True
                log.info("waiting for the swarm process, which writes the last state to the disk; Ctrl-C ends it at once")

    def _hear_out(self) -> None:
        """What it still had to say before it ended, its reason first of all."""
        with contextlib.suppress(PortClosed):
            for message in self._said(0):
                self._handle(message)

    def _end(self) -> None:
        self._processes.kill(self._process)
        self._process.wait()
        self._port.close()
        self._process = None


def _spawn() -> tuple[subprocess.Popen, Port]:
    """A new sidecar, and our end of its port."""
    port, theirs = Port.pair()
    root = str(Path(__file__).resolve().parents[4])
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_IT}
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "peer.sync.engine.trainer.sidecar", str(theirs.socket.fileno())],
        pass_fds=[theirs.socket.fileno()],
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()
    return process, port


def _kill(process: Child) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
