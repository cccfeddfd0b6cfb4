"""Real nodes with a real p2pd each, all in the test's own asyncio loop."""

import asyncio
import contextlib
import gc
import random
import warnings
from collections.abc import Awaitable, Callable

import pytest

from tests.peer.sync.swarm_tools import Nodes

LOOP_SECONDS = 100.0


@pytest.fixture
def seed(request) -> int:
    """Printed with a failure, so that it can be repeated."""
    value = random.randrange(1 << 30)
    print(f"seed={value}")
    return value


@pytest.fixture
def swarm(tmp_path) -> Callable[[Callable[[Nodes], Awaitable]], None]:
    """`swarm(scenario)` runs the coroutine function with a `Nodes`; everything it started is ended, whatever happened."""

    async def scene(scenario) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await scenario(Nodes(tmp_path, stack))

    def run(scenario) -> None:
        try:
            asyncio.run(asyncio.wait_for(scene(scenario), LOOP_SECONDS))
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # hivemind leaves its connection to p2pd to the collector
                gc.collect()

    return run
