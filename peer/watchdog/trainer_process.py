"""The processes of one life of a trainer: a rank or several, each with a sidecar, p2pd and decoders; ended as one, leaving none behind."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from swarm.errors import ExitCode
from swarm.life import FOLDER
from swarm.lifeline import die_with_parent

log = logging.getLogger(__name__)

PROGRAM = Path(__file__).resolve().parents[1] / "finetune.py"
_END_SECONDS = 20.0
"""For the other ranks, when one has ended; and for what serves a trainer to notice that it is gone, and to leave in order."""
_DUMP_SECONDS, _KILL_SECONDS = 3.0, 60.0


class Processes:
    """output: where all of them write, None: where we do; tick: called while waiting, and waits a little itself.

    To be made in the main thread: children end with the thread that started them.
    """

    def __init__(
        self,
        argv: Sequence[str],
        folder: Path,
        *,
        ranks: int = 1,
        output: int | None = None,
        tick: Callable[[], None],
        program: Path = PROGRAM,
    ):
        for old in folder.glob("stacks-*"):
            old.unlink(missing_ok=True)
        (folder / "life").unlink(missing_ok=True)
        self._folder, self._tick, parent = folder, tick, os.getpid()
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(program), *argv],
                stdout=output,
                stderr=output,
                env={**os.environ, FOLDER: str(folder), **place},
                start_new_session=True,  # so that Ctrl-C reaches it once, through us
                preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent),  # it stops cleanly when we are gone
            )
            for place in _places(ranks)
        ]

    def poll(self) -> int | None:
        """The exit status of the rank that was the first to fail, once one has ended that others cannot do without; 0 when all went well."""
        codes = [rank.poll() for rank in self._ranks]
        _bury(exclude={rank.pid for rank in self._ranks})
        bad = [code for code in codes if code]
        # A rank that lost another one says so, with 1, and may be found first.
        if bad:
            return next((code for code in bad if code != ExitCode.FAILED), bad[0])
        return 0 if all(code == 0 for code in codes) else None

    def signal(self, number: int) -> None:
        for rank in self._ranks:
            rank.send_signal(number)

    def family(self) -> list[psutil.Process]:
        """All living processes that descend from us."""
        living = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
        return living

    def stacks(self) -> str:
        """Where the processes of this life are in their code: of those that can still say it."""
        asked = [process.pid for process in self.family() if (self._folder / f"stacks-{process.pid}").exists()]
        for pid in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        self._until(lambda: all((self._folder / f"stacks-{pid}").stat().st_size for pid in asked), _DUMP_SECONDS)
        self._tick()  # for the rest of a dump that has begun
        texts = {pid: (self._folder / f"stacks-{pid}").read_text(errors="replace").strip() for pid in asked}
        return "\n".join(
            f"process {pid}: {text or 'it does not even answer a signal; is it stopped, or in the kernel?'}" for pid, text in texts.items()
        )

    def end(self, *, at_once: bool = False) -> None:
        """Ask the other ranks to end and let what is left leave in order, unless all shall end at once; then kill what is there still."""
        for rank in self._ranks:
            if rank.poll() is None and len(self._ranks) > 1:
                rank.terminate()
        if not at_once:
            self._until(lambda: not self.family(), _END_SECONDS)
        deadline = time.monotonic() + _KILL_SECONDS
        while (family := self.family()) and time.monotonic() < deadline:
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self.poll()
            self._tick()
        if family:
            log.error("could not be killed: %s", ", ".join(map(str, family)))

    def _until(self, true: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not true() and time.monotonic() < deadline:
            self.poll()
            self._tick()


def _places(ranks: int) -> list[Mapping[str, str]]:
    """What torchrun would tell each rank."""
    if ranks == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()} for rank in range(ranks)]


def _bury(exclude: set[int]) -> None:
    """Take leave of adopted children that have ended; those in `exclude` are subprocess's to wait for."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.pid not in exclude and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
