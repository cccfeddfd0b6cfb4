"""Writing that survives a power cut."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Make what was written into a file, or renamed within a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
