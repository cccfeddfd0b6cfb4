"""Programs of the demo as a family that can be watched, killed and ended without leaving orphans (Linux).

Made for a process that has called `swarm.lifeline.adopt_orphans`.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from swarm.lifeline import die_with_parent


def _end_with_parent() -> None:
    # Should we be killed outright, the kernel asks our children to leave.
    die_with_parent(signal.SIGTERM)


_ADDRESS = re.compile(r"--peers (/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+)")
Said = dict[str, Any]


class Program:
    """One started program, in a session of its own, so that Ctrl+C in the terminal reaches only us; its words go to `log`.

    threads: whether this process has other threads. Then the program cannot be told to end with us.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path, *, threads: bool = False):
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                cwd=cwd,
                start_new_session=True,
                preexec_fn=None if threads else _end_with_parent,  # safe in our only thread
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ended(self) -> int | None:
        """Its exit status (negative: the signal that ended it), or None while it runs."""
        return self._popen.poll()

    def terminate(self) -> None:
        if self.ended() is None:
            self._popen.terminate()

    def kill_tree(self) -> None:
        """SIGKILL it and all its descendants, the parents first so that none can react to the loss of a child."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.pid).children(recursive=True)
            self._popen.kill()
            kill(family)
        self._popen.wait()

    def wait(self, seconds: float) -> int | None:
        """Its exit status, or None if it still runs after `seconds`."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self, lines: int = 12) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def address(self) -> str:
        """A peer's, at which others can join; '' until it listens. The last one: a sidecar that was started again may have another port."""
        found = _ADDRESS.findall(self.text())
        return found[-1] if found else ""


def said(program: Program) -> list[Said]:
    """The lines of JSON in a program's log."""
    lines = []
    for line in program.text().splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
    return lines


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def descendants() -> list[psutil.Process]:
    """All living descendants of this process, adopted ones too."""
    living = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def settle(seconds: float) -> list[psutil.Process]:
    """Wait for all descendants to be gone; those that are not after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := descendants()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def names(processes: Sequence[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(f"{process.name()} ({process.pid})")
    return found


def end_all(programs: Sequence[Program], seconds: float = 25) -> list[str]:
    """Ask all to leave, wait, then kill what is left; returns the names of what had to be killed."""
    for program in programs:
        program.terminate()
    deadline = time.monotonic() + seconds
    for program in programs:
        program.wait(max(0.1, deadline - time.monotonic()))
    left = settle(3)
    stubborn = names(left)
    kill(left)
    settle(5)
    return stubborn


def memory_gib() -> float:
    """Memory that this process and its descendants use together, shared pages counted once (PSS)."""
    total = 0
    for process in [psutil.Process(), *descendants()]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            total += process.memory_full_info().pss
    return total / (1 << 30)
