"""One look at a swarm, as dd-status takes it."""

from typing import Any

from swarm import status


def fetch(where: str, **options: Any) -> dict[str, Any]:
    with status.asking(where, **options) as look:
        return look()
