"""Nodes without p2pd, in virtual time: the simulator's network and records, without faults, under the tests' own peers.

What a test says of rounds, groups and transfers needs no processes, and what it only waits for costs nothing. How streams behave on a real
p2pd is said in test_streams.py, test_leaving.py, test_garbage.py and tests/swarm.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from peer.sync.engine.net.streams import Streams
from simulation.loop import VirtualLoop
from simulation.network import Host, Link, Network
from simulation.records import Records, SimNode
from swarm.tasks import end_tasks


class Process:
    """Whose handlers a node runs; keeps them, as p2pd's client does."""

    stopped = dead = False

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task] = set()

    def spawn(self, coroutine) -> None:
        self.tasks.add(task := asyncio.get_running_loop().create_task(coroutine))
        task.add_done_callback(self.tasks.discard)


class Node(SimNode):
    async def close(self) -> None:
        await super().close()
        await end_tasks(*self.host.owner.tasks)


class VirtualNodes:
    """As `swarm_tools.Nodes`."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack, rng: random.Random):
        loop = asyncio.get_running_loop()
        self.folder, self._stack, self.rng, self._count = folder, stack, rng, 0
        self.clock = loop.time
        began = time.time()
        self.wall: Callable[[], float] = lambda: began + loop.time()
        self._network = Network(loop, rng)
        self._records = Records(self._network, rng, loop.time, missing=0.0, stale=0.0, delay=0.0)
        self.maddrs: list[str] = []

    async def node(self, *, client_mode: bool = False, again: SimNode | None = None) -> Node:
        self._count += 1
        await asyncio.sleep(self.rng.uniform(0.3, 0.8))  # as p2pd needs: peers of one test never begin at one moment
        peer = again.peer_id if again else f"Qm{self.rng.getrandbits(176):044x}"
        # A home's link: what is sent to nobody who takes it must wait somewhere.
        host = Host(peer, Link(up_mbit=1000.0, down_mbit=1000.0, latency=0.001, behind_nat=client_mode), owner=Process())
        self._network.hosts[peer] = host
        node = Node(self._network, self._records, host, self.wall)
        self._stack.push_async_callback(node.close)
        return node

    def split(self, one_side: Iterable[str]) -> None:
        """From now on neither side reaches the other."""
        self._network.sides = dict.fromkeys(one_side, 1)

    def heal(self) -> None:
        self._network.sides = {}

    async def streams(self, count: int):
        nodes = [await self.node() for _ in range(count)]
        return [(node, Streams(node)) for node in nodes]

    def at_end(self, close: Callable[[], None]) -> None:
        self._stack.callback(close)

    def ends_with_the_test(self, *tasks: asyncio.Task) -> None:
        self._stack.push_async_callback(end_tasks, *tasks)


def run_virtual(folder: Path, scenario: Callable[[VirtualNodes], Awaitable], seed: int, seconds: float = 3600.0):
    """What `scenario` returns, after so many virtual seconds at most."""
    rng = random.Random(seed)

    async def scene():
        async with contextlib.AsyncExitStack() as stack:
            return await scenario(VirtualNodes(folder, stack, rng))

    loop = VirtualLoop(random.Random(seed))
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(asyncio.wait_for(scene(), seconds))
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()
