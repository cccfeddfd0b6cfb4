"""What the benchmarks share: where and with what they ran, a table to read, and one line of JSON to keep."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from scripts.demo.results import read_lines
from swarm.errors import UserError, run_program

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("torch", "hivemind", "numpy")
_LOOK_SECONDS = 0.05
_MAPPING = re.compile(
    r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+) *(.*)\n(?:.*\n)*?Rss: +(\d+) kB\nPss: +(\d+) kB\n(?:.*\n)*?Anonymous: +(\d+) kB$", re.MULTILINE
)
"""One of /proc/PID/smaps: inode, name, kB that are there, this process's share of them, and what of them was written and is no file's any more."""
_SHARED = ("/memfd:", "/dev/shm/", "/dev/zero")
"""What is no file of a disk, by its name."""


class Peer:
    """A sleeper (sleeper.py) with these options in a process of its own, and what it wrote into `folder`, which is new.

    within: what goes before the command; how: for `subprocess.Popen`.
    """

    def __init__(self, folder: Path, *options: str, within: Sequence[str] = (), **how: Any):
        self.folder = folder
        folder.mkdir(parents=True)
        command = [*within, sys.executable, "-m", "benchmarks.sleeper", "--output_dir", str(folder), *options]
        with (folder / "log.txt").open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, **how)

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def rounds(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "rounds.jsonl")


def about() -> dict[str, Any]:
    """Hardware, versions and commit."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "commit": commit(ROOT),
    }


def argument_parser(doc: str, prog: str | None = None) -> argparse.ArgumentParser:
    """Of a benchmark, whose help is what its file says of itself, line by line."""
    return argparse.ArgumentParser(prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def start(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], int | None]) -> int:
    """Run `measure` with the options of the command line, `--debug` among them, and answer its exit status."""
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args()
    return run_program(lambda: measure(options), debug=options.debug)


def heed_sigterm() -> None:
    """Let SIGTERM end this program as Ctrl+C does: through the blocks that end what it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def wait(what: str, found: Callable[[], Any], peers: Sequence[Peer], seconds: float) -> Any:
    """What `found()` returns, once that is something. Raises UserError when it does not come, or a peer has ended by itself."""
    until = time.monotonic() + seconds
    while not (value := found()):
        for peer in peers:
            if peer.process.poll() is not None or time.monotonic() > until:
                last = "\n".join(peer.log.splitlines()[-8:])
                raise UserError(f"{what} did not come within {seconds:.0f} s; {peer.folder.name} says:\n{last}", fix="Look at its log.")
        time.sleep(_LOOK_SECONDS)
    return value


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it; none when it has ended."""
    with contextlib.suppress(psutil.Error):
        own = psutil.Process(pid)
        return [own, *own.children(recursive=True)]
    return []


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def held(pid: int) -> tuple[int, int]:
    """Bytes of memory that a process and all that descend from it hold, without and with the pages of files.

    A buffer that processes share counts once, also while it moves from one to the other between two looks.
    """
    own, files, shared = 0, 0, {}
    for process in family(pid):
        with contextlib.suppress(OSError):
            for inode, name, *kib in _MAPPING.findall(Path(f"/proc/{process.pid}/smaps").read_text()):
                there, share, written = (int(each) * 1024 for each in kib)
                if name.startswith(_SHARED):
                    shared[inode] = max(shared.get(inode, 0), there)
                elif name.startswith("/"):
                    own, files = own + written, files + max(0, share - written)
                else:
                    own += share
    own += sum(shared.values())
    return own, own + files


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One line per row under the keys of all rows, in the order of their first appearance; a missing value stays empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([_text(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def print_result(result: dict[str, Any]) -> None:
    """The benchmark's last line: its figures, and under "about" what they were measured on."""
    print(json.dumps({**result, "about": about()}), flush=True)


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def version(package: str) -> str:
    """'' when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit(root: Path) -> str:
    """Of the checkout, with a + when files differ from it; '' when git does not know."""
    return _git(root, "rev-parse", "--short", "HEAD") + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *command: str) -> str:
    try:
        return subprocess.run(["git", "-C", root, *command], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
