"""Nodes in the test's own asyncio loop: `swarm` has real ones with a p2pd each, `virtual` the simulator's, in virtual time."""

import zlib
from collections.abc import Awaitable, Callable

import pytest

pytest.register_assert_rewrite("tests.peer.sync.replicas")

from peer.sync.engine import codec  # noqa: E402
from tests.peer.sync.swarm_tools import PART, Nodes, run_swarm  # noqa: E402
from tests.peer.sync.virtual import VirtualNodes, run_virtual  # noqa: E402

LOOP_SECONDS = 540.0
"""Far above the longest scenario, also on a machine ten times as slow, and below pytest's own limit, which would say less."""


@pytest.fixture
def swarm(tmp_path) -> Callable[[Callable[[Nodes], Awaitable]], None]:
    """`swarm(scenario)` runs the coroutine function with a `Nodes`; everything it started is ended, whatever happened."""

    return lambda scenario: run_swarm(tmp_path, scenario, LOOP_SECONDS)


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """Vectors travel in parts of `PART` elements: what several parts are for is seen at a sixteenth of the numbers to add up, hash and keep."""
    monkeypatch.setattr(codec, "PART_ELEMENTS", PART)


@pytest.fixture
def virtual(tmp_path, request) -> Callable[[Callable[[VirtualNodes], Awaitable]], None]:
    """As `swarm`, without processes and without waiting. Each test has a seed of its own, always the same: chance is `simulation`'s part."""
    seed = zlib.crc32(request.node.name.encode())
    return lambda scenario: run_virtual(tmp_path, scenario, seed)
