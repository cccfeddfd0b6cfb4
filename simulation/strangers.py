"""Strangers who mean harm: the attacks of `scripts/strangers`, on the network and the DHT of a world.

A row is the same function as there. Real stay those about what is not simulated: hivemind's DHT (`prefix-records`, `junk-keys`), sockets
(`third-party-dials`, `dial-me`), and programs that run once (`forged-run`, `export-votes`, the server's). A node of ours stores only what
its signer brings itself, so records of invented keys without nodes go nowhere.
"""

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgpack

from scripts.attacks.band import Band
from scripts.attacks.rows import ROWS
from scripts.attacks.wire import Frames, Gone, Record, Serves, Stranger, newest
from simulation.machine import Process
from simulation.network import Host, Link, SimPipe
from simulation.records import signed
from swarm.members import said, sign_membership
from swarm.records import PeerRecord
from swarm.unpacking import unpack

if TYPE_CHECKING:
    from simulation.world import World

_COME_AFTER_SECONDS = 30.0
"""How long the honest peers have at least to meet each other: what newcomers believe is another matter."""
_PATIENCE_SECONDS = 3600.0


async def attack(world: "World", row: str, *, members: int = 0) -> None:
    """For as long as the world lives. members: how many identities that the host let in come, in a run for members; 0: strangers, as many as the row has."""
    await asyncio.sleep(_COME_AFTER_SECONDS)
    count = world.scenario.peers + world.scenario.assistants
    while count > 1 and not all(machine.met() for machine in world.machines[:count]):
        await asyncio.sleep(1)  # who has met nobody yet believes whoever comes first
    band = SimBand(world, random.Random(f"{world.scenario.seed} {row}"), members)
    harm = ROWS[row].find()
    process = Process(SimpleNamespace(short=row, world=world), "stranger")
    band.process, band.met = process, row == "met-child"
    world.note(f"world: {row} comes")
    attacking = process.spawn(harm(band))
    await asyncio.wait([attacking])
    error = attacking.exception()
    world.checks.breach(f"the stranger of {row} ended", error=error)


class _Key:
    def __init__(self, peer_id: str):
        self.peer_id, self.public = peer_id, f"ssh-rsa {peer_id}"

    def sign(self, statement: bytes) -> str:
        return signed(self.peer_id, statement)


class SimBand(Band):
    process: Process
    met: bool
    """Whether honest peers are to meet it, and not only to hear of it."""

    def __init__(self, world: "World", rng: random.Random, members: int = 0):
        super().__init__("", None, rng, contextlib.AsyncExitStack())
        self._world, self._members = world, members
        self.run = {"run_id": world.run.run_id, "run": world.run.to_mapping()}

    async def come(self, count: int = 1) -> list[Stranger]:
        for _ in range(self._members or count):
            self.strangers.append(SimStranger(self._world, self.process, self.rng, self._draw(), member=self._members > 0))
        return self.strangers

    def _draw(self) -> str:
        return f"Qm{hashlib.sha256(self.rng.randbytes(16)).hexdigest()[:44]}"

    def draw_keys(self, count: int) -> list[_Key]:
        return [_Key(self._draw()) for _ in range(count)]

    async def honest(self) -> dict[str, Record]:
        """Strangers do not fall for each other."""
        while True:
            found = {peer: record for peer, record in (await super().honest()).items() if peer not in self._world.strangers}
            if newest(found):
                return found
            await asyncio.sleep(0.5)

    def say(self, **values: Any) -> None:
        if values["event"] == "forged" and self.met:
            self._world.checks.forged_by_met.add(values["digest"])
        elif values["event"] == "forged":
            self._world.checks.forged[values["digest"]] = self._members > 0
        if values["event"] == "lied":
            self._world.checks.lies.told(values["parent"], values["members"], values["to_all_by"])
        if values["event"] == "pried":
            self._world.checks.breach(f"{values['of'][-6:]} showed what it sent to one that was not drawn to check")


class SimStranger(Stranger):
    """One identity with a node of its own."""

    def __init__(self, world: "World", process: Process, rng: random.Random, peer_id: str, *, member: bool = False):
        key, run = world.server.dataset.key, world.run
        self._membership = said(sign_membership(key, run, peer_id, world.server.wall)) if member else None
        self._world, self.rng, self.peer_id, self.key = world, rng, peer_id, _Key(peer_id)
        self._host = Host(peer_id, Link(100.0, 100.0, 0.01), process.machine.short, owner=process)
        world.network.hosts[peer_id] = self._host
        world.strangers.add(peer_id)
        if member:
            world.server.lets_in(peer_id)

    def _wall(self) -> float:
        return self._world.server.wall()

    async def records(self, run_id: str) -> dict[str, Record]:
        found = await self._world.records.read_packed(self.peer_id, self._wall())
        return {peer: unpack(packed) for peer, packed in found.items() if peer != self.peer_id}

    async def publish_for(self, run_id: str, records: Mapping[_Key, Record], seconds: float = 20.0) -> None:
        for key, record in records.items():
            if key.peer_id != self.peer_id:
                continue
            own = {"membership": self._membership, "seal": ""} if self._membership else {}
            packed = msgpack.packb({**record, "peer_id": self.peer_id, "time": self._wall(), **own})
            with contextlib.suppress(ValueError):  # one that no reader takes
                await self._world.records.publish(PeerRecord.unpack(packed, owner=self.peer_id), self._wall())

    async def addresses(self) -> list[str]:
        return [f"/ip4/10.0.0.1/tcp/4000/p2p/{self.peer_id}"]

    async def open(self, peer: str, name: str, seconds: float = 10.0) -> Frames:
        try:
            frames = SimFrames(peer, await asyncio.wait_for(self._world.network.dial(self._host, peer, name), seconds))
            if self._membership:
                await frames.send(self._membership)
            return frames
        except (OSError, asyncio.TimeoutError) as error:
            raise Gone(repr(error)) from None

    async def serve(self, name: str, handler: Serves) -> None:
        async def handle(peer: str, place: str, pipe: SimPipe) -> None:
            frames = SimFrames(peer, pipe)
            try:
                if self._membership:
                    await frames.receive()  # the caller's
                await handler(frames)
                await asyncio.sleep(1)
            except Gone:
                pass
            except Exception as error:  # another stranger asked it for what it does not have
                self._world.note(f"a stranger failed: {error!r}")
            finally:
                frames.close()

        self._host.handlers[name] = handle


class SimFrames(Frames):
    """`Frames` on a simulated pipe, which stands for reader and writer."""

    def __init__(self, peer: str, pipe: SimPipe):
        super().__init__(peer, self, self)
        self._pipe = pipe

    def _until(self) -> float:
        return asyncio.get_running_loop().time() + _PATIENCE_SECONDS

    async def send_raw(self, data: bytes) -> None:
        try:
            await self._pipe.send(data, until=self._until())
        except OSError as error:
            raise Gone(repr(error)) from None

    async def readexactly(self, count: int) -> bytes:
        room = bytearray(count)
        await self._pipe.take(memoryview(room), self._until())
        return bytes(room)

    async def read(self, most: int) -> bytes:
        return await self._pipe.take_some(most, self._until())

    def close(self) -> None:
        self._pipe.close()
