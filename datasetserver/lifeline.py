"""Helper processes that never outlive the server, however it ends."""

import ctypes
import signal


def die_with_parent(deadly: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `deadly` to this process when its parent dies (Linux), also by SIGKILL."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(deadly), 0, 0, 0)
