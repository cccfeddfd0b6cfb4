"""What a worker may be asked, and how it may end."""

import os
import signal
from multiprocessing.connection import Connection


def nothing() -> None: ...


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def broken() -> None:
    raise ImportError("a library is missing")


def half(pipe: Connection, data: bytes) -> None:
    os.write(pipe.fileno(), data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def answer(number: int) -> int:
    """The number; 2: killed in the middle of its answer, 3: crashes, 4: raises."""
    if number == 2:
        Connection._send = half
    if number == 3:
        os._exit(1)
    if number == 4:
        raise OSError("no such number")
    return number
