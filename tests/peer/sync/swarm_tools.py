"""What the tests of rounds share: nodes, streams between them, and waits that end."""

import asyncio
import contextlib
import os
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import torch
from pydantic import TypeAdapter

from peer.contracts import Member
from peer.sync.engine.net.streams import Streams
from peer.sync.engine.round.groups import Ticket
from peer.sync.engine.state import Head, State, first_state
from peer.sync.engine.transfer.disk import StateStore
from peer.sync.engine.transfer.donors import Donor
from peer.sync.engine.transfer.replay import MeanStore
from peer.sync.engine.vectors import SharedBuffer
from swarm.dht import SwarmNode
from swarm.tasks import end_tasks
from tests.clock import Clock
from tests.swarm import p2pds

ANYTHING = TypeAdapter(dict)
"""For `Channel.receive`: a message as it travels."""
PART = 16 << 10
"""Elements of a part where the fixture `small_parts` is: a sixteenth of the product's."""
WAIT_SECONDS = 100.0
"""Far above what anything takes on a busy machine; only a failure waits for so long."""


class Nodes:
    """Starts swarm nodes on loopback that know each other, and ends them with the test."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack):
        self.folder, self._stack, self._count = folder, stack, 0
        self._lender = stack.enter_context(p2pds.keeper().lending())
        self._keys: dict[str, Path] = {}
        self.maddrs: list[str] = []
        self.clock, self.wall, self.rng = time.monotonic, time.time, random.SystemRandom()

    async def node(self, *, own: bool = False, double: SwarmNode | None = None) -> SwarmNode:
        """A new one; or one beside `double`, with a copy of its identity. own: with a p2pd of its own, which a node with a double has."""
        self._count += 1
        key = self.folder / f"{self._count}.key"
        if double:
            shutil.copy(self._keys[double.peer_id], key)
        else:
            self._lender.write_key(key, own=own)
        node = await SwarmNode.join(initial_peers=self.maddrs, identity_path=key, deadline_seconds=60)
        self._keys[node.peer_id] = key
        self._stack.push_async_callback(node.close)
        self.maddrs = self.maddrs or await node.maddrs()
        return node

    async def streams(self, count: int) -> list[tuple[SwarmNode, Streams]]:
        nodes = [await self.node() for _ in range(count)]
        return [(node, Streams(node)) for node in nodes]

    def at_end(self, close: Callable[[], None]) -> None:
        self._stack.callback(close)

    def ends_with_the_test(self, *tasks: asyncio.Task) -> None:
        self._stack.push_async_callback(end_tasks, *tasks)


def run_swarm(folder: Path, scenario: Callable[[Nodes], Awaitable], seconds: float):
    """What `scenario` returns; everything it started is ended, whatever happened."""

    async def scene():
        async with contextlib.AsyncExitStack() as stack:
            return await scenario(Nodes(folder, stack))

    return p2pds.run(scene(), seconds)


async def until(true: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    """Wait for a condition; fails the test when it does not come."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    while not true():
        assert clock() < deadline, "waited in vain"
        await asyncio.sleep(0.02)


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Says with a failure which of several scenes of one swarm it is."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


def ticket(peer: str, *, parent: str = "p", number: int = 1, samples: int = 8, reduces: bool = True) -> Ticket:
    return Ticket(parent, Member(peer, number, samples), reduces)


def state_of(values: torch.Tensor, run: str = "run", schema: str = "schema", slots: int = 0) -> State:
    return first_state(run, schema, values, slots)


def shared_copy(vector: torch.Tensor) -> SharedBuffer:
    raw = vector.contiguous().view(torch.uint8)
    buffer = SharedBuffer(raw.numel())
    buffer.bytes().copy_(raw)
    return buffer


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Holder:
    """A node that gives `state`, which the test may change."""

    def __init__(self, nodes, node, streams, state, clock):
        self.node, self.streams, self.state = node, streams, state
        self.store = StateStore(nodes.folder / node.peer_id)
        self.means = MeanStore(nodes.folder / node.peer_id / "means")
        self.donor = Donor(streams, lambda: self.state, self.store, self.means, clock=clock or Clock())

    def moves_to(self, state: State) -> None:
        before, self.state = self.state, state
        self.donor.retire(before)


def held(claims: Iterable[tuple[Head, str]]) -> dict[Head, set[str]]:
    """Heads, the most signed first, and who signs each."""
    signers: dict[Head, set[str]] = {}
    for head, peer in claims:
        signers.setdefault(head, set()).add(peer)
    return dict(sorted(signers.items(), key=lambda item: (-len(item[1]), -item[0].samples)))


async def holder(nodes, state: State, clock=None) -> Holder:
    ((node, streams),) = await nodes.streams(1)
    giver = Holder(nodes, node, streams, state, clock)
    await giver.donor.start()
    nodes.at_end(giver.donor.close)
    return giver


def same(state: State, other: State) -> bool:
    return state.digest == other.digest and state.header == other.header and torch.equal(state.buffer.bytes(), other.buffer.bytes())
