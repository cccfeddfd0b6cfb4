"""What the console scripts call. Ctrl-C ends a program that still imports without a traceback: there is nothing to clean up yet."""

import contextlib
import signal
from collections.abc import Iterator
from importlib import import_module


def dd_peer() -> int:
    return _run("peer.supervise")


def dd_datasetserver() -> int:
    return _run("datasetserver.__main__")


def dd_generate() -> int:
    return _run("peer.generate")


def dd_export() -> int:
    return _run("peer.export")


def dd_status() -> int:
    return _run("swarm.status")


def dd_monitor() -> int:
    return _run("swarm.page.monitor")


def _run(module: str) -> int:
    with ended_quietly():
        cli = import_module(module).cli
    return cli()


@contextlib.contextmanager
def ended_quietly() -> Iterator[None]:
    """Within it Ctrl-C ends the process at once, unless it is ignored. For imports, which take 0.3 to 10 s.

    A KeyboardInterrupt raised there prints 20 lines of a traceback, or is lost in an import that expects any exception.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as in a job that a script has put into the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
