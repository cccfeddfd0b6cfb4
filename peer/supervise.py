"""`dd-peer`: starts the trainer as a child that dies with it, passes signals on, and ends as the child ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from swarm.lifeline import die_with_parent


def main(argv: Sequence[str]) -> int:
    """Run `peer/finetune.py argv...` to its end; returns its exit code, 0 after a clean stop."""
    child = start(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: child.send_signal(number))
    code = child.wait()
    return code if code >= 0 else 128 - code


def start(argv: Sequence[str]) -> subprocess.Popen:
    """The trainer in a process group of its own, so that Ctrl-C reaches it once, through us; it stops cleanly when we are gone."""
    program = Path(__file__).resolve().with_name("finetune.py")
    parent = os.getpid()
    return subprocess.Popen([sys.executable, str(program), *argv], start_new_session=True, preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent))


def cli() -> int:
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(cli())
