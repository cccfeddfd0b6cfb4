"""Programs of ours with everything imported: each is forked off one process, which has loaded what a trainer needs.

For tests whose subject is not a program's start, which takes ten seconds of a core. All else is a peer's own: its process, session, log and end.
"""

import atexit
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

_LOADED = ("peer.wiring", "torch._dynamo", "peft", "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion")


@functools.cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_LOADED])
    return context


class Warm:
    """What tests ask of a `subprocess.Popen`, of `python SCRIPT ...`, `python -m MODULE ...` or `python -c CODE ...` in a session of its own.

    env: what it has besides the environment in which the first one was started.
    """

    def __init__(self, words: Sequence[str], cwd: Path, log: Path, *, env: Mapping[str, str] = MappingProxyType({})):
        log.touch()
        self._process = _context().Process(target=_run, args=([*words], str(cwd), str(log), dict(env)))
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(words: list[str], cwd: str, log: str, env: dict[str, str]) -> None:
    os.setsid()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(cwd)
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
