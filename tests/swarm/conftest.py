import asyncio
import contextlib
import gc
import warnings

import pytest

from swarm.dht import SwarmNode


@pytest.fixture
def nodes(tmp_path):
    """`nodes(scenario)` runs a coroutine function with `start(name, **options) -> SwarmNode`; what it started is ended."""

    async def scene(scenario):
        async with contextlib.AsyncExitStack() as stack:

            async def start(name, **options):
                node = await SwarmNode.join(identity_path=tmp_path / name, **{"deadline_seconds": 60, **options})
                stack.push_async_callback(node.close)
                return node

            await scenario(start)

    def run(scenario):
        try:
            asyncio.run(asyncio.wait_for(scene(scenario), 240))
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # hivemind leaves its connection to p2pd to the collector
                gc.collect()

    return run
