"""Real nodes with a real p2pd each, all in the test's own asyncio loop."""

import random
from collections.abc import Awaitable, Callable

import pytest

pytest.register_assert_rewrite("tests.peer.sync.replicas")

from tests.peer.sync.swarm_tools import Nodes, run_swarm  # noqa: E402

LOOP_SECONDS = 540.0
"""Far above the longest scenario, also on a machine ten times as slow, and below pytest's own limit, which would say less."""


@pytest.fixture
def seed(request) -> int:
    """Printed with a failure, so that it can be repeated."""
    value = random.randrange(1 << 30)
    print(f"seed={value}")
    return value


@pytest.fixture
def swarm(tmp_path) -> Callable[[Callable[[Nodes], Awaitable]], None]:
    """`swarm(scenario)` runs the coroutine function with a `Nodes`; everything it started is ended, whatever happened."""

    return lambda scenario: run_swarm(tmp_path, scenario, LOOP_SECONDS)
