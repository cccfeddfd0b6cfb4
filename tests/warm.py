"""Programs of ours with everything imported: each is a forked process (tests/forking.py), and so is its sidecar.

For tests whose subject is not a program's start, which takes ten seconds of a core and a sidecar's five.
"""

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from swarm.lifeline import die_with_parent
from tests.forking import ROOT, Forked, end

_POLL_SECONDS = 0.02
_TORCHRUN = ("-m", "torch.distributed.run")


def _context():
    """Of `multiprocessing`, for a test whose subject starts a process by it."""
    return multiprocessing.get_context("forkserver")


class Warm(Forked):
    """`python SCRIPT ...`, `python -m MODULE ...` or `python -c CODE ...` in a session of its own.

    env: what it has besides our environment. failpoints: the file that arms them. namespace: of the network in which it runs, as
    `ip netns` names it. sidecars: how many of its sidecars are forked; those after them start as ever. forks: it is dd-peer,
    torchrun or a script, and the programs that it starts are forked.
    """

    def __init__(
        self,
        words: Sequence[object],
        cwd: Path | str,
        log: Path,
        *,
        env: Mapping[str, str] = MappingProxyType({}),
        failpoints: Path | str = "",
        namespace: str = "",
        sidecars: int = 1,
        forks: bool = False,
    ):
        options = {"words": [str(word) for word in words], "sidecars": 0 if forks else sidecars, "forks": forks}
        options |= {"failpoints": str(failpoints), "namespace": namespace}
        with open(os.devnull) as nothing, log.open("ab") as said:
            files = nothing.fileno(), said.fileno(), said.fileno()
            super().__init__("tests.warm:_begin", options, files, cwd=cwd, environ={**os.environ, **env})


def run(code: str, *words: str, env: Mapping[str, str] = MappingProxyType({}), seconds: float = 240) -> subprocess.CompletedProcess[str]:
    """`python -c CODE ...` to its end, as `subprocess.run(..., capture_output=True, text=True)` has it. Raises subprocess.TimeoutExpired."""
    options = {"words": ["-c", code, *words], "sidecars": 0, "forks": False}
    with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = nothing.fileno(), out.fileno(), err.fileno()
        process = Forked("tests.warm:_run", options, files, cwd=ROOT, environ={**os.environ, **env})
        try:
            status = process.wait(seconds)
        finally:
            process.kill()
        said = [file.read() for file in (out, err) if file.seek(0) == 0]
    return subprocess.CompletedProcess([*words], status, *said)


def _begin(*, failpoints: str, namespace: str, **options) -> None:
    if namespace:
        _enter(namespace)
    if failpoints:
        from peer.sync.engine import failpoints as failing

        failing._file = os.environ["DD_FAILPOINTS"] = failpoints
    _run(**options)


def _run(words: list[str], sidecars: int, forks: bool) -> None:
    """The program, in this process."""
    _call_itself(words)
    if tuple(words[:2]) == _TORCHRUN:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = _Subprocess.Popen
    elif forks:
        from peer.watchdog import trainer_process
        from scripts.demo import processes

        processes.subprocess = trainer_process.subprocess = _Subprocess
    _with_spare_sidecars(sidecars)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _call_itself(words: list[str]) -> None:
    """Be `python WORDS` in the table of processes, where programs look for each other; as much of it as there is room for."""
    begin, end = (int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])  # arg_start, arg_end
    line = "\0".join([sys.executable, *words]).encode()[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


# ---------------------------------------------------------------- its sidecar, and what it starts


class _Child:
    """What is asked of a `subprocess.Popen`, of a process that was forked off this one; `live`: what it does there, and its exit status."""

    def __init__(self, live: Callable[[], int]):
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _end(live)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (threading.TIMEOUT_MAX if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_POLL_SECONDS)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _end(live: Callable[[], int]) -> NoReturn:
    """Live, and end with that status, without going back to what this process was forked off."""
    atexit._clear()  # the parent's: its folders are not ours to remove
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end(live)


def _with_spare_sidecars(count: int) -> None:
    """This process's first `count` sidecars are forked now, while nothing has begun, and wait for their end of the port; others start as ever."""
    from peer.sync.engine.trainer import sidecar_process
    from peer.sync.engine.trainer.port import Port

    def live() -> int:
        ours.close()
        die_with_parent(signal.SIGTERM)
        _, descriptors, _, _ = socket.recv_fds(theirs, 1, 1)
        if not descriptors:  # the trainer has ended without
            return 0
        return _sidecar(descriptors[0])

    spares, start_another = [], sidecar_process._spawn
    for _ in range(count):
        ours, theirs = socket.socketpair()
        spares.append((_Child(live), ours))
        theirs.close()

    def spawn():
        if not spares:
            return start_another()
        (spare, line), (port, its_port) = spares.pop(), Port.pair()
        socket.send_fds(line, [b"!"], [its_port.socket.fileno()])
        line.close()
        its_port.close()
        return spare, port

    sidecar_process._spawn = spawn


def _sidecar(descriptor: int) -> int:
    from peer.sync.engine.trainer import sidecar

    _call_itself(["-m", "peer.sync.engine.trainer.sidecar", str(descriptor)])
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return sidecar.main(descriptor)


def spawn_sidecar():
    """In the place of `sidecar_process._spawn`, for a trainer in the process of the tests: a forked sidecar, and our end of its port."""
    from peer.sync.engine.trainer.port import Port

    port, its_port = Port.pair()
    with open(os.devnull) as nothing:
        files = nothing.fileno(), 1, 2, its_port.socket.fileno()
        sidecar = Forked("tests.warm:_sidecar", {"descriptor": 3}, files, cwd=os.getcwd(), environ={**os.environ})
    its_port.close()
    return sidecar, port


class _Subprocess:
    """What is asked of `subprocess` by those who start our programs, torchrun among them: these are forked off them.

    When they fork they have no other thread that holds a lock, except those of torch's store. A rank does not use that store.
    """

    DEVNULL, STDOUT, TimeoutExpired = subprocess.DEVNULL, subprocess.STDOUT, subprocess.TimeoutExpired

    @staticmethod
    def Popen(args, *, stdout, env, preexec_fn=lambda: None, cwd=".", stdin=None, stderr=None, start_new_session=True):
        program, *words = map(str, args)
        if launcher := program == str(Path(sys.executable).with_name("torchrun")):
            words = [*_TORCHRUN, *words]
        assert (program == sys.executable or launcher) and preexec_fn and start_new_session
        words = words[1:] if words[0] == "-u" else words  # as a forked process writes its lines, too: at once

        def live() -> int:
            for stream in (1, 2) if stdout is not None else ():
                os.dup2(stdout if isinstance(stdout, int) else stdout.fileno(), stream)
            preexec_fn()
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(env)
            forks = launcher or "peer.supervise" in words
            _run(words, sidecars=int(not forks and "datasetserver" not in words), forks=forks)
            return 0

        return _Child(live)
