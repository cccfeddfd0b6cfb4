"""A swarm, a server and a process, seen from outside."""

import contextlib
import json
import urllib.request
from typing import Any

import psutil

from swarm import status
from tests.datasetserver.hosting import Host


def fetch(where: str, **options: Any) -> dict[str, Any]:
    """One look, as dd-status takes it."""
    with status.asking(where, **options) as look:
        return look()


def progress(host: Host) -> dict[str, Any]:
    with urllib.request.urlopen(f"{host.url}/v1/progress", timeout=60) as answer:
        return json.load(answer)


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
