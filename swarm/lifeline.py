"""Processes that never outlive the one that started them, however that ends, and that it never loses sight of."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(deadly: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Ask the kernel to send `deadly` to this process when its parent dies (Linux), also by SIGKILL.

    parent: its process id, where it may have gone before we could ask; this process then ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(deadly), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """From now on, descendants whose parent dies become our children, not init's (Linux): psutil's `children(recursive=True)` has all of them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
