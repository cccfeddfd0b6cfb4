"""Folders for Unix sockets and a visitor's key, named after their process: it removes its own, and those of processes that were killed."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "dd-sockets-"
_LONGEST = 60
"""A socket's whole path may have 107 bytes (Linux); p2pd's names take up to 30 of them."""


def make_folder() -> Path:
    """A new private folder of this process, after sweeping away what killed processes of this user left behind."""
    temporary = Path(tempfile.gettempdir())
    base = temporary if len(str(temporary)) < _LONGEST else Path("/tmp")
    _sweep(base)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base))


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and folder.stat().st_uid == os.getuid() and not _alive(int(pid)):
                remove_folder(folder)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's: not ours to judge
        return True
    return True
