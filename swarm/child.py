"""What a process of ours is started with."""

import os
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def environment() -> dict[str, str]:
    """Ours, and the way to these packages: they need not be installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))}
