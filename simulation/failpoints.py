"""The engine's failpoints (`peer/sync/engine/failpoints.py`) in a simulated world: what a strike has armed happens to the one that comes there."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peer.sync.engine import failpoints
from peer.sync.engine.net.streams import PeerLost
from simulation.loop import OWNER

if TYPE_CHECKING:
    from simulation.machine import Machine, Process
    from simulation.world import World


@dataclass(eq=False)
class Armed:
    """What one strike has armed, and what that has done: the strike undoes nothing else."""

    machine: Machine
    name: str
    action: str
    stopped: Process | None = None
    cut_off: bool = False
    fell: bool = False


class Failpoints:
    """hit: how often something happened at each. At most one point is armed for a machine: that of the last strike."""

    def __init__(self, world: World):
        self._world = world
        self._armed: dict[str, Armed] = {}
        self.hit: Counter[str] = Counter()

    def listen(self) -> None:
        failpoints.hook, failpoints.hook_in_trainer = self._reached, self._reached_in_trainer

    @staticmethod
    def deaf() -> None:
        failpoints.hook = failpoints.hook_in_trainer = None

    def arm(self, name: str, action: str, machine: Machine) -> Armed:
        self._armed[machine.peer] = armed = Armed(machine, name, action)
        return armed

    def disarm(self, armed: Armed) -> bool:
        """What it stopped or cut off goes on. Returns whether its machine fell, and must be booted."""
        peer = armed.machine.peer
        if self._armed.get(peer) is armed:
            del self._armed[peer]
        if armed.cut_off:
            self._world.network.cut_off.remove(peer)
        if armed.stopped is not None and not armed.stopped.dead:
            armed.stopped.go_on()
        return armed.fell

    async def _reached(self, name: str, peer: str) -> None:
        if name == "saved":
            self._world.checks.saved(OWNER.get().machine)
        armed = self._take(name, peer)
        if armed is None:
            return
        machine = OWNER.get().machine
        if armed.action == "fail":
            raise PeerLost(f"failed at {name}, as it was told to")
        if armed.action == "cut":
            return self._cut(armed)
        if armed.action == "stop":
            self._stop(armed, machine.sidecar)
            return await asyncio.sleep(0)
        if armed.action == "kill":
            machine.kill_sidecar()
        else:
            self._fall(armed)
        await asyncio.get_running_loop().create_future()  # of a process that is dead nothing goes on

    def _reached_in_trainer(self, name: str) -> None:
        machine = OWNER.get().machine
        armed = self._take(name, machine.peer)
        if armed is None:
            return
        if armed.action == "cut":
            return self._cut(armed)
        if armed.action == "stop":
            self._stop(armed, machine.trainer)
        elif armed.action == "kill":
            self._world.later(0.0, lambda: self._kill_sidecar(machine, machine.sidecar))
        else:
            # A thread cannot end itself: the world does it as soon as it blocks.
            self._world.later(0.0, lambda: self._fall(armed))
        machine.thread.block(1e-6)

    def _take(self, name: str, peer: str) -> Armed | None:
        armed = self._armed.get(peer)
        if armed is None or armed.name != name:
            return None
        del self._armed[peer]
        self.hit[name] += 1
        self._world.note(f"world: {peer[-6:]} is at {name}: {armed.action}")
        return armed

    def _cut(self, armed: Armed) -> None:
        """The others go on, perhaps with what it had just sent."""
        armed.cut_off = True
        self._world.network.cut_off.append(armed.machine.peer)

    @staticmethod
    def _stop(armed: Armed, process: Process) -> None:
        process.stop()
        armed.stopped = process

    def _kill_sidecar(self, machine: Machine, process: Process) -> None:
        """Before it has written what it has just handed to the trainer."""
        if machine.sidecar is process and not process.dead:
            machine.kill_sidecar()

    @staticmethod
    def _fall(armed: Armed) -> None:
        if armed.machine.alive:
            armed.fell = True
            armed.machine.kill(power=armed.action == "power")
