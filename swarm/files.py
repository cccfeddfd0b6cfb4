"""Writing that survives a power cut."""

import os
import threading
from pathlib import Path


def flush(path: Path) -> None:
    """Make what was written into a file, or renamed within a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file so that it is there in whole or not at all, durably. mode: less the umask. Raises OSError, and leaves what was there."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    flush(path.parent)
