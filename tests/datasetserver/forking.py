"""Dataset servers forked from a process that has imported what they import: 1.2 s of a core each that the tests need not pay every time.

A forked server is a process as any other: it has its pid, its pipes and its exit status, and is killed alone.
"""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Parent:
    """The process that forks."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps the borders of what is asked
        command = [sys.executable, "-m", "tests.datasetserver.forking", str(theirs.fileno())]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self._turn = threading.Lock()
        atexit.register(self._end)

    def ask(self, question: dict, pipes: Sequence[int] = ()) -> int | None:
        with self._turn:
            socket.send_fds(self._channel, [json.dumps(question).encode()], pipes)
            return json.loads(self._channel.recv(100))

    def _end(self) -> None:
        self._channel.close()
        self._process.wait(60)


parent = functools.cache(Parent)


class Forked:
    """A server with these arguments. Its attributes are those of `subprocess.Popen` that the tests use."""

    def __init__(self, argv: Sequence[str]):
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        self.pid = parent().ask({"argv": [*argv], "environ": {**os.environ}}, [their_out, their_err])
        os.close(their_out)
        os.close(their_err)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            self._status = parent().ask({"status_of": self.pid})
        return self._status

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired."""
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("datasetserver", timeout)
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve_parent(channel: socket.socket) -> list[str]:
    """Fork for whoever asks; returns the arguments in each child, and never in the parent, which ends with who asks."""
    while True:
        text, pipes, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        if not text:
            os._exit(0)
        question = json.loads(text)
        if "status_of" in question:
            pid, status = os.waitpid(question["status_of"], os.WNOHANG)
            channel.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        if pid := os.fork():
            channel.send(json.dumps(pid).encode())
        else:
            channel.close()
            os.environ.clear()
            os.environ.update(question["environ"])
            for number, pipe in enumerate(pipes, start=1):
                os.dup2(pipe, number)
        for pipe in pipes:
            os.close(pipe)
        if not pid:
            return question["argv"]


if __name__ == "__main__":
    import uvloop  # noqa: F401

    import datasetserver.server  # noqa: F401
    from datasetserver.__main__ import cli

    sys.exit(cli(_serve_parent(socket.socket(fileno=int(sys.argv[1])))))
