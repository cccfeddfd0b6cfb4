"""The engine's failpoints (`peer/sync/engine/failpoints.py`) in a simulated world: what a strike has armed happens to the one that comes there."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from peer.sync.engine import failpoints
from peer.sync.engine.net.streams import PeerLost
from simulation.loop import OWNER

if TYPE_CHECKING:
    from simulation.machine import Machine, Process
    from simulation.world import World


class Failpoints:
    """hit: how often something happened at each. At most one point is armed for a machine."""

    def __init__(self, world: World):
        self._world = world
        self._armed: dict[str, tuple[str, str]] = {}
        self._fell: set[str] = set()
        self._stopped: dict[str, Process] = {}
        self.hit: Counter[str] = Counter()

    def listen(self) -> None:
        failpoints.hook, failpoints.hook_in_trainer = self._reached, self._reached_in_trainer

    @staticmethod
    def deaf() -> None:
        failpoints.hook = failpoints.hook_in_trainer = None

    def arm(self, name: str, action: str, machine: Machine) -> None:
        self._armed[machine.peer] = (name, action)

    def disarm(self, machine: Machine) -> bool:
        """What was stopped or cut off goes on. Returns whether the machine fell, and must be booted."""
        self._armed.pop(machine.peer, None)
        self._world.network.cut_off.discard(machine.peer)
        process = self._stopped.pop(machine.peer, None)
        if process is not None and not process.dead:
            process.go_on()
        fell = machine.peer in self._fell
        self._fell.discard(machine.peer)
        return fell

    async def _reached(self, name: str, peer: str) -> None:
        if name == "saved":
            self._world.checks.saved(OWNER.get().machine)
        action = self._take(name, peer)
        if not action:
            return
        machine = OWNER.get().machine
        if action == "fail":
            raise PeerLost(f"failed at {name}, as it was told to")
        if action == "cut":
            return self._cut(machine)
        if action == "stop":
            self._stop(machine, machine.sidecar)
            return await asyncio.sleep(0)
        if action == "kill":
            machine.kill_sidecar()
        else:
            self._fall(machine, power=action == "power")
        await asyncio.get_running_loop().create_future()  # of a process that is dead nothing goes on

    def _reached_in_trainer(self, name: str) -> None:
        machine = OWNER.get().machine
        action = self._take(name, machine.peer)
        if not action:
            return
        if action == "cut":
            return self._cut(machine)
        if action == "stop":
            self._stop(machine, machine.trainer)
        elif action == "kill":
            self._world.later(0.0, lambda: self._kill_sidecar(machine, machine.sidecar))
        else:
            # A thread cannot end itself: the world does it as soon as it blocks.
            self._world.later(0.0, lambda: self._fall(machine, power=action == "power"))
        machine.thread.block(1e-6)

    def _take(self, name: str, peer: str) -> str:
        armed, action = self._armed.get(peer, ("", ""))
        if armed != name:
            return ""
        del self._armed[peer]
        self.hit[name] += 1
        self._world.note(f"world: {peer[-6:]} is at {name}: {action}")
        return action

    def _cut(self, machine: Machine) -> None:
        """The others go on, perhaps with what it had just sent."""
        self._world.network.cut_off.add(machine.peer)

    def _stop(self, machine: Machine, process: Process) -> None:
        process.stop()
        self._stopped[machine.peer] = process

    def _kill_sidecar(self, machine: Machine, process: Process) -> None:
        """Before it has written what it has just handed to the trainer."""
        if machine.sidecar is process and not process.dead:
            machine.kill_sidecar()

    def _fall(self, machine: Machine, *, power: bool) -> None:
        if machine.alive:
            self._fell.add(machine.peer)
            machine.kill(power=power)
