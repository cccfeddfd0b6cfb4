import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.dht import SwarmNode
from tests.swarm import p2pds


@pytest.fixture
def nodes(tmp_path):
    """`nodes(scenario)` runs a coroutine function with `start(name, **options) -> SwarmNode`; what it started is ended.

    A node has a lent p2pd, or one of its own where `own=True` says so or an option is p2pd's.
    """
    return scenes(tmp_path, p2pds.keeper())


def scenes(folder: Path, keeper: p2pds.Keeper, lends: Callable[[str], bool] = lambda name: True) -> Callable:
    """lends: which nodes have the keeper's p2pds, which another of their last test may still dial."""

    async def scene(scenario):
        async with contextlib.AsyncExitStack() as stack:
            lender = stack.enter_context(keeper.lending())

            async def start(name, *, own=False, **options):
                path = folder / name
                if not path.exists():
                    lender.write_key(path, own=own or not lends(name) or bool(options.keys() & {"host_maddrs", "announce_maddrs", "client_mode"}))
                node = await SwarmNode.join(identity_path=path, **{"deadline_seconds": 60, **options})
                stack.push_async_callback(node.close)
                return node

            await scenario(start)

    return lambda scenario: p2pds.run(scene(scenario), 240)
