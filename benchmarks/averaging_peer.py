"""One peer of `averaging.py`, a process of its own: averages a vector of random floats as often as it is told to.

Speaks JSON lines: says {"address": ...} once it can be reached, {"ready": ...} when it can average, and one line per round.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import torch
from blake3 import blake3

from benchmarks.common import cpu_seconds, family

SPREAD = 1e-3
"""Standard deviation of the values: about that of a round's update."""
GROUP_SECONDS = 60.0
"""For stock hivemind's search, which takes about 2 s, and the round."""


def main() -> None:
    torch.set_num_threads(1)
    plan = json.loads(sys.stdin.readline())
    torch.manual_seed(plan["index"])
    if plan["wire"] == "hivemind fp16":
        stock(plan)
    else:
        asyncio.run(ours(plan))


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def hear() -> dict:
    return json.loads(sys.stdin.readline() or '{"stop": true}')


class Clocks:
    """Wall seconds, and CPU seconds of this process and all that it started: p2pd, the DHT, the averager."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), _cpu_seconds()

    def since(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self.wall, "cpu_seconds": _cpu_seconds() - self.cpu}


def _cpu_seconds() -> float:
    return sum(map(cpu_seconds, family(os.getpid())))


def _resident_bytes(name: str) -> int:
    """VmRSS: now; VmHWM: the most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def digest(tensors: list[torch.Tensor]) -> str:
    hasher = blake3()
    for tensor in tensors:
        hasher.update(memoryview(tensor.numpy()).cast("B"))
    return hasher.hexdigest()


async def ours(plan: dict) -> None:
    from peer.contracts import Member
    from peer.sync.engine.codec import Wire
    from peer.sync.engine.net.streams import Streams
    from peer.sync.engine.round.averaging import Averager
    from peer.sync.engine.round.groups import Group
    from peer.sync.engine.vectors import Reused

    hear_soon = asyncio.get_running_loop().run_in_executor
    wire, vector = Wire(plan["wire"], plan["floats"]), torch.randn(plan["floats"]).mul_(SPREAD)
    async with _node(plan) as node:
        averager, memory = Averager(node.peer_id, Streams(node), wire), Reused(wire.num_bytes)  # a trainer's is its last contribution's
        await averager.start()
        say(address=(await node.maddrs())[0], peer=node.peer_id)
        peers = sorted((await hear_soon(None, hear))["peers"])
        while True:
            say(ready=True)
            order = await hear_soon(None, hear)
            if "stop" in order:
                return
            group = Group("p", tuple(Member(peer, 1, 1) for peer in peers), tuple(peers), str(order["round"]))
            resident, clocks = _resident_bytes("VmRSS"), Clocks()
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            mean = await averager.average(group, wire.encode(vector, memory.take()))
            for part in wire.parts:  # into the vector itself, as a round does
                part.decode(part.bytes_of(mean.encoded), part.of(vector))
            extra = _resident_bytes("VmHWM") - resident
            say(**clocks.since(), digest=digest([vector]), up=mean.traffic.up, extra=extra)
            del mean


@contextlib.asynccontextmanager
async def _node(plan: dict) -> AsyncIterator:
    from swarm.dht import SwarmNode

    node = await SwarmNode.join(initial_peers=plan["addresses"], identity_path=Path(plan["key"]), deadline_seconds=60)
    try:
        yield node
    finally:
        await node.close()


def stock(plan: dict) -> None:
    """hivemind's averager with its own fp16; `seconds` is its all-reduce alone, without the search for a group."""
    import hivemind
    from hivemind.averaging.partition import AllreduceException
    from hivemind.compression import Float16Compression

    dht = hivemind.DHT(initial_peers=plan["addresses"], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    tensors = list(torch.randn(plan["floats"]).mul_(SPREAD).split(-(-plan["floats"] // 10)))
    spent = multiprocessing.Value("d", 0.0)
    averager = _timed(hivemind.DecentralizedAverager, spent)(
        tensors, dht, prefix="benchmark", compression=Float16Compression(), target_group_size=plan["peers"],
        min_matchmaking_time=2.0, request_timeout=1.0, next_chunk_timeout=60.0, start=True,
    )  # fmt: skip
    del tensors  # it has copied them into shared memory
    say(address=str(dht.get_visible_maddrs()[0]), peer=str(dht.peer_id))
    hear()
    while True:
        say(ready=True)
        if "stop" in hear():
            break
        clocks = Clocks()
        try:
            group = averager.step(timeout=GROUP_SECONDS)
        except AllreduceException:  # now and then its peers do not find each other: such a round counts for nothing
            group = None
        measured = clocks.since()
        with averager.get_tensors() as shared:
            complete = group is not None and len(group) == plan["peers"]
            say(**{**measured, "seconds": spent.value}, digest=digest(list(shared)), complete=complete)
    # Its own shutdown sometimes hangs or prints a traceback; this ends our session, with all that it has forked, and nothing else.
    os.killpg(0, signal.SIGKILL)


def _timed(averager: type, spent: "multiprocessing.sharedctypes.Synchronized") -> Callable:
    class Timed(averager):
        async def _run_allreduce_inplace_(self, *args, **kwargs):
            began = time.perf_counter()
            try:
                return await super()._run_allreduce_inplace_(*args, **kwargs)
            finally:
                spent.value = time.perf_counter() - began

    return Timed


if __name__ == "__main__":
    main()
