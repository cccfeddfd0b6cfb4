"""The DHT as its users meet it: records arrive late, some answers lack somebody or are a version old, and a partition hides the other side."""

import asyncio
import base64
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from simulation.network import Network
from swarm.records import LEAVING, RECORD_LIFE_SECONDS, PeerRecord, RunRecord


@dataclass(frozen=True)
class _Version:
    record: PeerRecord
    packed: bytes
    """As it was published; a stranger reads it by itself."""
    visible: float
    """By the loop's clock."""
    expires: float
    """By the wall clock."""


class Records:
    """Of one run. wall: a reader's own clock is given with each question. missing, stale: of all records read, those that are not in the
    answer, and those that are in it as they were before. delay: seconds after which a record is seen at the latest."""

    def __init__(
        self, network: Network, rng: random.Random, clock: Callable[[], float], missing: float = 0.02, stale: float = 0.05, delay: float = 0.5
    ):
        self._network, self._rng, self._clock = network, rng, clock
        self._missing, self._stale, self._delay = missing, stale, delay
        self._versions: dict[str, list[_Version]] = {}
        self._runs: dict[str, RunRecord] = {}

    async def publish(self, record: PeerRecord, wall: float) -> bool:
        await asyncio.sleep(self._rng.uniform(0.05, 0.3))
        packed = record.pack()
        checked = PeerRecord.unpack(packed, owner=record.peer_id)
        visible = self._clock() + self._rng.uniform(0, self._delay)
        version = _Version(checked, packed, visible, wall + RECORD_LIFE_SECONDS)
        self._versions[record.peer_id] = [*self._versions.get(record.peer_id, [])[-2:], version]
        return True

    async def read(self, reader: str, wall: float) -> dict[str, PeerRecord]:
        """By peer, what `reader` is told of each. wall: its own clock, in seconds since the epoch."""
        return {peer: version.record for peer, version in (await self._found(reader, wall)).items()}

    async def read_packed(self, reader: str, wall: float) -> dict[str, bytes]:
        """The same in the bytes that were published."""
        return {peer: version.packed for peer, version in (await self._found(reader, wall)).items()}

    async def _found(self, reader: str, wall: float) -> dict[str, _Version]:
        await asyncio.sleep(self._rng.uniform(0.05, 0.3))
        now, parted = self._clock(), self._network.parted
        found = {}
        for peer, versions in self._versions.items():
            if parted(reader, peer):
                continue
            known = [v for v in versions if v.visible <= now and v.expires > wall]
            if not known or (peer != reader and self._rng.random() < self._missing):
                continue
            found[peer] = known[-2 if len(known) > 1 and peer != reader and self._rng.random() < self._stale else -1]
        self._forget(now, wall)
        return found

    def _forget(self, now: float, wall: float) -> None:
        gone = [peer for peer, versions in self._versions.items() if versions[-1].expires < wall - 60]
        for peer in gone:
            del self._versions[peer]

    async def publish_run(self, peer: str, record: RunRecord) -> bool:
        await asyncio.sleep(self._rng.uniform(0.05, 0.3))
        self._runs[peer] = record
        return True

    async def runs(self) -> dict[str, RunRecord]:
        await asyncio.sleep(self._rng.uniform(0.05, 0.3))
        return dict(self._runs)


class Seen(NamedTuple):
    """A peer as a node sees it: when its newest record was signed, by its own clock; when that was read first; and since when it is there."""

    signed: float
    read: float
    since: float


class SimNode:
    """As `swarm.dht.SwarmNode`: one process in the network and the DHT."""

    came_by: tuple = ()
    unread: frozenset = frozenset()
    reachability = ""

    def __init__(self, network: Network, records: Records, host, wall: Callable[[], float]):
        self._network, self._records, self.host, self._wall = network, records, host, wall
        self.peer_id, self.client_mode = host.peer, host.link.behind_nat
        self.seen: dict[str, Seen] = {}
        """The peers that are there."""

    async def dial(self, peer, name):
        return await self._network.dial(self.host, peer, name)

    async def listen(self, name, handle):
        self.host.handlers[name] = handle

    async def maddrs(self):
        return [] if self.client_mode else [f"/ip4/10.0.0.1/tcp/4000/p2p/{self.peer_id}"]

    def admit(self, members):
        """Strangers' records are stored and read all the same: so the check of whoever reads them is tried, too."""

    def prefer(self, is_known):
        """There is room for all."""

    async def publish(self, run_id, record):
        return await self._records.publish(record, self._wall())

    async def publish_run(self, record):
        return await self._records.publish_run(self.peer_id, record)

    async def records(self, run_id):
        found = await self._records.read(self.peer_id, self._wall())
        self._note(found)
        return found

    def _note(self, found):
        now = self._network.loop.time()
        for peer, record in found.items():
            known = self.seen.get(peer)
            if record.phase == LEAVING:
                self.seen.pop(peer, None)
            elif known is None or now - known.read >= RECORD_LIFE_SECONDS:
                self.seen[peer] = Seen(record.time, now, now)
            elif record.time != known.signed:
                self.seen[peer] = Seen(record.time, now, known.since)

    async def find_runs(self):
        return await self._records.runs()

    async def meet(self, maddrs):
        return True

    def sign(self, statement):
        return signed(self.peer_id, statement)

    def key_of(self, peer):
        return f"ssh-rsa {peer}"

    def has_signed(self, peer, statement, key, signature):
        return key == self.key_of(peer) and signature == signed(peer, statement)

    def lot(self, statement):
        return signed(self.peer_id, b"lot " + statement)

    def is_lot(self, peer, statement, key, lot):
        return self.has_signed(peer, b"lot " + statement, key, lot)

    async def ended_within(self, seconds):
        await asyncio.sleep(seconds)
        return not self.host.alive

    async def alive(self):
        return self.host.alive

    async def close(self):
        self._network.die(self.host, power=False)


def signed(peer: str, statement: bytes) -> str:
    """What stands for an RSA signature, which would be another one each time, and is of the same length. Nobody here makes one in another's name."""
    return base64.b64encode(hashlib.shake_256(peer.encode() + statement).digest(256)).decode()
