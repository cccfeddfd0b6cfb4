"""One process that has imported what the tests and our programs import: pytest's workers, programs and dataset servers are forked off it.

The imports take ten seconds of a core, which each of these would spend. All else of a forked process is its own: pid, session, files,
environment and exit status. It is killed when the process that asked for it ends.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import selectors
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
_LOADED = (
    "peer.wiring", "peer.sync.engine.trainer.sidecar", "scripts.attacks.toy", "torch._dynamo", "peft",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion", "datasetserver.server", "uvloop",
)  # fmt: skip
_ADDRESS = "DD_TESTS_FORK_OFF"
_OF_WORKERS = "DD_TESTS_FORK_WORKERS_OFF"
_ACCOUNT = "DD_TESTS_CPU"
"""A file for the CPU seconds of each forked process, the test that asked for it, and what it ran. They are in no account of that test's worker."""
_LONGEST = 1 << 20
"""Bytes of a question, which has an environment in it."""
_MOST_FILES = 5
_ROOM = "-" * 2000
"""For the command lines of programs, which are written over ours."""


class Forked:
    """A process that was forked off: what tests ask of a `subprocess.Popen`.

    call: "module:function", called there with `options`; what it returns is the exit status. files: its stdin, stdout and stderr, and whatever else
    it has open, as its descriptors from 3 on. off: the socket of the process that forks, if not of the one that has imported our programs alone.
    """

    def __init__(self, call: str, options: dict[str, Any], files: Sequence[int], *, cwd: Path | str, environ: dict[str, str], off: str = ""):
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps the borders of what is said
        self._line.connect(off or _address())
        question = {"call": call, "options": options, "cwd": str(cwd), "environ": environ}
        socket.send_fds(self._line, [json.dumps(question).encode()], files)
        told = self._line.recv(_LONGEST)
        assert told, "the process that forks has ended"
        self.pid: int = json.loads(told)
        self.returncode: int | None = None
        self._says = Path(os.readlink(f"/proc/self/fd/{files[2]}"))
        _living.add(self)

    def poll(self) -> int | None:
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        status = self._status(timeout)
        if status is None:
            import subprocess

            raise subprocess.TimeoutExpired(f"{self.pid}, whose family does\n{self._where()}\n", timeout)
        return status

    def _where(self) -> str:
        """What it and its descendants do, and the end of what they said: with their stacks, those that were forked."""
        import psutil

        lines, family = [], []
        with contextlib.suppress(psutil.Error):
            family = [asked := psutil.Process(self.pid), *asked.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.Error, OSError):
                caught = int(Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2].split()[0], 16)
                if caught >> signal.SIGUSR2 - 1 & 1:
                    process.send_signal(signal.SIGUSR2)
                waits = Path(f"/proc/{process.pid}/wchan").read_text()
                lines.append(f"{process.pid} {process.status()} {waits} {shlex.join(process.cmdline())[:200]}")
        time.sleep(1)  # for the stacks
        said = self._says.read_text(errors="replace")[-10_000:] if self._says.is_file() else ""
        return "\n".join([*lines, said])

    def _status(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                told = self._line.recv(_LONGEST)
            except (BlockingIOError, TimeoutError):
                return None
            self.returncode = json.loads(told) if told else -signal.SIGKILL  # all end with the process that forked them
            self._line.close()
            _living.discard(self)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_living: set[Forked] = set()
"""Also those of which the tests have lost sight: they end with this process."""
atexit.register(lambda: [forked._line.close() for forked in _living])


@functools.cache
def _address() -> str:
    """The socket of the process that forks. It is in the environment of all that the first process starts which asks for it."""
    if _ADDRESS not in os.environ:
        import subprocess

        from swarm import sockets

        folder = sockets.make_folder()
        os.environ[_ADDRESS] = str(folder / "fork")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(os.environ[_ADDRESS])
            listener.listen()  # who comes before all is imported waits
            ended, alive = os.pipe()  # the second is closed by the end of this process, however it ends
            words = [sys.executable, "-u", "-m", "tests.forking", str(listener.fileno()), str(ended), _ROOM]
            process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno(), ended], start_new_session=True)
            os.close(ended)

        def stop() -> None:
            os.close(alive)
            process.wait(60)
            sockets.remove_folder(folder)

        atexit.register(stop)
    return os.environ[_ADDRESS]


def lend_to_multiprocessing() -> None:
    """Where a test's subject has multiprocessing fork off a server, that server is forked, too, and has everything imported."""
    from multiprocessing import connection, forkserver, resource_tracker

    server, one_at_a_time = forkserver._forkserver, threading.Lock()

    def ensure_running() -> None:
        with one_at_a_time:  # several threads may start a process each
            if server._forkserver_alive_fd is None:
                start()

    def start() -> None:
        resource_tracker.ensure_running()
        server._forkserver_address = connection.arbitrary_address("AF_UNIX")
        ended, server._forkserver_alive_fd = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener, open(os.devnull) as nothing:
            listener.bind(server._forkserver_address)
            listener.listen()
            files = nothing.fileno(), 1, 2, listener.fileno(), ended
            options = {"listener_fd": 3, "alive_r": 4, "preload": []}
            Forked("multiprocessing.forkserver:main", options, files, cwd=os.getcwd(), environ={**os.environ})
        os.close(ended)

    server.ensure_running = ensure_running


# ---------------------------------------------------------------- pytest's workers


def python(tests: Sequence[str]) -> str:
    """What execnet starts in the place of Python: a few lines of it, whose stdin and stdout a forked process has. tests: what pytest was given."""
    os.environ[_OF_WORKERS] = _address() + "-workers"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, open(os.devnull, "r+") as nothing:
        listener.bind(os.environ[_OF_WORKERS])
        listener.listen()
        files = nothing.fileno(), nothing.fileno(), nothing.fileno(), listener.fileno()
        Forked("tests.forking:_fork_workers", {"tests": [*tests], "listener": 3}, files, cwd=os.getcwd(), environ={**os.environ})
    return shlex.join([sys.executable, "-S", "-I", __file__, "python"])


def _stand_in(words: Sequence[str]) -> int:
    """For `python ... -c CODE`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: whoever started us ends us
    off = os.environ[_OF_WORKERS]
    forked = Forked("tests.forking:_run", {"code": words[-1]}, (0, 1, 2), cwd=os.getcwd(), environ={**os.environ}, off=off)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # else the other side would not see that the worker has closed it
    return forked.wait()


def _run(code: str) -> None:
    exec(code, {"__name__": "__main__"})


def _fork_workers(tests: Sequence[str], listener: int) -> int | None:
    """Import the tests, once for all workers, and fork these. Their asserts are rewritten; bytecode is written where a clone has none yet."""
    import pytest

    words = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    helper = os.fork()
    pytest.main(words, plugins=[_Importing(half=int(bool(helper)))])
    if not helper:
        os._exit(0)
    os.waitpid(helper, 0)
    pytest.main(words, plugins=[_Importing()])
    gc.collect()
    gc.freeze()
    ended, _alive = os.pipe()  # for ever: we end with the process that forked us
    return _live(*_Parent(socket.socket(fileno=listener), ended).fork())


class _Importing:
    """For pytest: test files are imported, all or every second one, and no tests are made of them."""

    def __init__(self, half: int | None = None):
        self._half, self._seen = half, 0

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if self._half is None or collection_path.suffix != ".py":
            return None
        self._seen += 1
        return True if self._seen % 2 == self._half else None

    def pytest_pycollect_makeitem(self) -> list:
        return []


# ---------------------------------------------------------------- the process that forks

Question = tuple[dict[str, Any], list[int]]
"""What was asked, and the files of the new process."""


class _Parent:
    """Forks for all who ask. ended: a pipe that is closed when the process ends for which all this is done."""

    def __init__(self, listener: socket.socket, ended: int):
        self._children: dict[socket.socket, int] = {}  # by the line to who asked; 0 before it has asked
        self._asked: dict[int, dict[str, Any]] = {}  # by child
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno())
        self._listener, self._ended, self._selector = listener, ended, selectors.DefaultSelector()
        for file, do in ((listener, self._answer), (ended, self._stop), (self._woken, self._reap)):
            self._selector.register(file, selectors.EVENT_READ, do)

    def fork(self) -> Question:
        """Returns in each child, and never in the parent."""
        while True:
            for key, _ in self._selector.select():
                if question := key.data(key.fileobj):
                    self._let_go()
                    return question

    def _answer(self, listener: socket.socket) -> None:
        line = listener.accept()[0]
        self._children[line] = 0
        self._selector.register(line, selectors.EVENT_READ, self._hear)

    def _stop(self, ended: int) -> None:
        os._exit(0)  # all that was forked dies with us

    def _reap(self, woken: socket.socket) -> None:
        woken.recv(_LONGEST)
        for line, pid in list(self._children.items()):
            if pid and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self._hang_up(line)

    def _hear(self, line: socket.socket) -> Question | None:
        if line not in self._children:  # hung up a moment ago
            return None
        text, files = b"", []
        with contextlib.suppress(ConnectionResetError):
            text, files, _, _ = socket.recv_fds(line, _LONGEST, _MOST_FILES)
        if not text:  # who asked has ended
            self._hang_up(line)
            return None
        question = json.loads(text)
        pid = self._children[line] = os.fork()
        if not pid:
            return question, files
        self._asked[pid] = question
        _tell(line, pid)
        for file in files:
            os.close(file)
        return None

    def _hang_up(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        if pid := self._children.pop(line):
            os.kill(pid, signal.SIGKILL)  # which one that has ended does not feel
            _, status, used = os.wait4(pid, 0)
            _charge(self._asked.pop(pid), used.ru_utime + used.ru_stime)
            _tell(line, os.waitstatus_to_exitcode(status))
        line.close()

    def _let_go(self) -> None:
        """In the child, of all that is the parent's."""
        signal.set_wakeup_fd(-1)
        for file in (self._selector, self._listener, self._woken, self._wake, *self._children):
            file.close()
        os.close(self._ended)


def _tell(line: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):  # who asked has ended
        line.send(json.dumps(number).encode())


def _charge(question: dict[str, Any], seconds: float) -> None:
    if file := question["environ"].get(_ACCOUNT):
        test, options = question["environ"].get("PYTEST_CURRENT_TEST", ""), json.dumps(question["options"])
        with open(file, "a", encoding="utf-8") as account:
            account.write(f"{seconds:.2f}\t{test.partition(' ')[0]}\t{question['call']} {options}\n")


def _live(question: dict[str, Any], files: list[int]) -> int | None:
    """The forked process; returns its exit status."""
    from swarm.lifeline import die_with_parent

    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored in a suite that runs under nohup
    faulthandler.register(signal.SIGUSR2, file=2)  # asked by who has waited in vain
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(question["environ"])
    os.chdir(question["cwd"])
    sys.argv, sys.modules["__main__"] = ["-c"], types.ModuleType("__main__")
    module, _, function = question["call"].partition(":")
    return getattr(importlib.import_module(module), function)(**question["options"])


def end(live: Callable[[], int | None]) -> NoReturn:
    """Live, and end with that status, as an interpreter does but for taking all modules down, which takes half a second."""
    status = 1
    try:
        status = live() or 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if status and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 0xFF)


def _main(words: Sequence[str]) -> None:
    if words[0] == "python":
        sys.exit(_stand_in(words[1:]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, which is for pytest
    for module in _LOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a child that collects would else copy all pages
    listener, ended = map(int, words[:2])
    end(functools.partial(_live, *_Parent(socket.socket(fileno=listener), ended).fork()))


if __name__ == "__main__":
    _main(sys.argv[1:])
