"""What befalls the machines, each fault a task of its own that strikes now and then until the world is calm, and then undoes what it did."""

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.machine import Machine
    from simulation.world import World


async def _next(world: "World") -> "Machine | None":
    """Wait for the next strike: the machine that it hits; None once the world is calm."""
    until = world.loop.time() + world.rng.expovariate(1 / world.scenario.fault_seconds)
    while world.loop.time() < until:
        await asyncio.sleep(1.0)
        if world.calm:
            return None
    return world.rng.choice(world.live) if world.live else None


async def _for(world: "World", seconds: float) -> None:
    until = world.loop.time() + seconds
    while world.loop.time() < until and not world.calm:
        await asyncio.sleep(1.0)


def _struck(world: "World", name: str, machine: "Machine | None" = None, text: str = "") -> None:
    world.faults_done[name] += 1
    world.note(f"world: fault {name} {machine.short if machine else ''} {text}")


async def kill(world: "World") -> None:
    """A peer is killed and comes back on its disk, or another comes in its place."""
    while not world.calm:
        if (machine := await _next(world)) is None:
            continue
        _struck(world, "kill", machine)
        machine.kill()
        await _for(world, world.rng.choice([1.0, 10.0, 60.0]))
        if world.rng.random() < 0.7:
            machine.boot()
        else:
            world.machines.remove(machine)
            world.gone.append(machine)
            world.add_peer()


async def sidecar(world: "World") -> None:
    """A sidecar is killed; its trainer starts another."""
    while not world.calm:
        if (machine := await _next(world)) is not None and machine.sidecar is not None and not machine.sidecar.dead and machine.host:
            _struck(world, "sidecar", machine)
            machine.kill_sidecar()


async def power(world: "World") -> None:
    """A machine loses power, and with it what its disk had not flushed; others hear nothing of it."""
    while not world.calm:
        if (machine := await _next(world)) is None:
            continue
        _struck(world, "power", machine)
        machine.kill(power=True)
        await _for(world, world.rng.choice([5.0, 30.0, 300.0]))
        machine.boot()


async def stop(world: "World") -> None:
    """A process, or the whole machine, is stopped for a while: a debugger, a busy disk, a lid that was closed."""
    while not world.calm:
        if (machine := await _next(world)) is None:
            continue
        processes = world.rng.choice([[machine.sidecar], [machine.trainer], [machine.trainer, machine.sidecar]])
        processes = [process for process in processes if process is not None and not process.dead]
        seconds = world.rng.choice([2.0, 8.0, 25.0, 90.0])
        _struck(world, "stop", machine, f"{[process.name for process in processes]} {seconds:.0f} s")
        for process in processes:
            process.stop()
        await _for(world, seconds)
        for process in processes:
            if not process.dead:
                process.go_on()


async def sleep(world: "World") -> None:
    """A machine sleeps for an hour."""
    while not world.calm:
        if (machine := await _next(world)) is None:
            continue
        _struck(world, "sleep", machine)
        processes = [process for process in (machine.trainer, machine.sidecar) if process is not None]
        for process in processes:
            process.stop()
        await _for(world, 3600.0)
        for process in processes:
            if not process.dead:
                process.go_on()


async def partition(world: "World") -> None:
    """The net falls apart in two, and heals."""
    while not world.calm:
        if await _next(world) is None:
            continue
        side = world.rng.choice([1, max(1, len(world.machines) // 3), len(world.machines) // 2])
        world.network.sides = {machine.peer: 1 for machine in world.rng.sample(world.machines, min(side, len(world.machines)))}
        seconds = world.rng.choice([3.0, 15.0, 60.0])
        _struck(world, "partition", None, f"{len(world.network.sides)} for {seconds:.0f} s")
        await _for(world, seconds)
        world.network.sides = {}


async def reset(world: "World") -> None:
    """For a minute every hundredth message breaks its stream."""
    while not world.calm:
        if await _next(world) is None:
            continue
        _struck(world, "reset")
        world.network.reset_share = 0.01
        await _for(world, 60.0)
        world.network.reset_share = 0.0


async def disk(world: "World") -> None:
    """A disk is full for a while."""
    while not world.calm:
        if (machine := await _next(world)) is None:
            continue
        _struck(world, "disk", machine)
        machine.disk.full = True
        await _for(world, world.rng.choice([2.0, 20.0]))
        machine.disk.full = False


async def slow(world: "World") -> None:
    """A link has a fiftieth of its bandwidth and twenty times its latency, or a machine computes twenty times slower, for a while."""
    while not world.calm:
        if (machine := await _next(world)) is None:
            continue
        _struck(world, "slow", machine)
        link, (up, latency) = machine.link, (machine.link.up_mbit, machine.link.latency)
        if world.rng.random() < 0.5:
            link.up_mbit, link.latency = up / 50, latency * 20
        else:
            machine.slowness = 20.0
        await _for(world, 60.0)
        link.up_mbit, link.latency, machine.slowness = up, latency, 1.0


async def clock(world: "World") -> None:
    """A machine's clock is set, by up to 3 s."""
    while not world.calm:
        if (machine := await _next(world)) is not None:
            _struck(world, "clock", machine)
            machine.skew = world.rng.uniform(-1.5, 1.5)


async def server(world: "World") -> None:
    """The dataset server is killed, and is away for a second or for minutes."""
    while not world.calm:
        if await _next(world) is None:
            continue
        seconds = world.rng.choice([1.0, 20.0, 180.0])
        _struck(world, "server", None, f"away for {seconds:.0f} s")
        world.server.crash()
        await _for(world, seconds)
        world.server.boot()


async def answers(world: "World") -> None:
    """For a minute the dataset server is slow, or every fifth of its answers is lost on the way: what was asked is asked again."""
    while not world.calm:
        if await _next(world) is None:
            continue
        slow = world.rng.random() < 0.5
        _struck(world, "answers", None, "slow" if slow else "lost")
        world.server.slow_seconds, world.server.lost = (40.0, 0.0) if slow else (0.0, 0.2)
        await _for(world, 60.0)
        world.server.slow_seconds = world.server.lost = 0.0


async def ledger(world: "World") -> None:
    """The dataset server's disk is full for a while."""
    while not world.calm:
        if await _next(world) is None:
            continue
        _struck(world, "ledger")
        world.server.full(True)
        await _for(world, world.rng.choice([2.0, 20.0]))
        world.server.full(False)


async def pause(world: "World") -> None:
    """The host pauses the run for a quarter of a minute."""
    while not world.calm:
        if await _next(world) is None:
            continue
        _struck(world, "pause")
        world.server.orders.state = "paused"
        await _for(world, 15.0)
        world.server.orders.state = "running"


FAULTS = {fault.__name__: fault for fault in (kill, sidecar, power, stop, sleep, partition, reset, disk, slow, clock, server, answers, ledger, pause)}
