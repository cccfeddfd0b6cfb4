"""The internet between machines: links of some latency and bandwidth, routers that let nobody in, partitions, streams that break.

A message waits for its sender's uplink and its receiver's downlink, one after the other; what is lost costs a retransmission's time. Whoever
is killed hangs up; a machine without power says nothing at all.
"""

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

SERVER = ""
"""The dataset server, in the place of a peer: it is on a side of a partition, too."""
_RETRANSMISSION_SECONDS = 0.3
_LINGER_SECONDS = 60.0
"""How long a stream lives over a broken path, as TCP does; then both ends hear that it is gone."""


@dataclass
class Link:
    """A machine's way to the others. latency: seconds to the middle of the net and from there."""

    up_mbit: float
    down_mbit: float
    latency: float
    behind_nat: bool = False
    loss: float = 0.0
    up_free: float = 0.0
    down_free: float = 0.0


@dataclass(eq=False)
class Host:
    """One p2pd: what it serves, and its open pipes in the order in which they were opened."""

    peer: str
    link: Link
    place: str = ""
    """Its address for others, where that is not its own alone: a router's, or one machine's of a band."""
    alive: bool = True
    powered: bool = True
    handlers: dict[str, Callable[[str, str, "SimPipe"], Awaitable[None]]] = field(default_factory=dict)
    owner: Any = None
    context: Any = None
    pipes: dict["SimPipe", None] = field(default_factory=dict)


class Network:
    def __init__(self, loop: asyncio.AbstractEventLoop, rng: random.Random):
        self.loop, self._rng, self._random = loop, rng, rng.random
        self._context = contextvars.Context()
        """Of no process: the net lives on when one dies."""
        self.hosts: dict[str, Host] = {}
        self.sides: dict[str, int] = {}
        """Peer -> its sides, a bit for each partition that there is; who is not named is on side 0 of all."""
        self.cut_off: list[str] = []
        """Peers that reach nobody, whatever side they are on; once for each strike that cuts them off."""
        self._partitions = 0
        self.messages = self.bytes = self.resets = self.dials = 0
        self.reset_share = 0.0
        """Of all messages, those on which a stream breaks."""

    def parted(self, one: str, other: str) -> bool:
        if self.cut_off and one != other and (one in self.cut_off or other in self.cut_off):
            return True
        return bool(self.sides) and self.sides.get(one, 0) != self.sides.get(other, 0)

    def reaches_server(self, peer: str) -> bool:
        return not self.parted(peer, SERVER)

    def part(self, peers: Iterable[str]) -> int:
        """The net falls apart, these on one side; returns what `heal` needs. Partitions may overlap: none ends another one."""
        self._partitions += 1
        side = 1 << self._partitions
        self.sides |= {peer: self.sides.get(peer, 0) | side for peer in peers}
        return side

    def heal(self, side: int) -> None:
        self.sides = {peer: left for peer, sides in self.sides.items() if (left := sides & ~side)}

    def reaches(self, caller: str, peer: str) -> bool:
        """Whether `caller` can open a stream to `peer`: directly, over a connection that a peer behind NAT has opened to one that can be
        dialled, or through a relay, which anybody on their side who can be dialled is."""
        there = self.hosts.get(peer)
        if there is None or not there.alive or self.parted(caller, peer):
            return False
        if not (there.link.behind_nat and self.hosts[caller].link.behind_nat):
            return True
        return any(h.alive and not h.link.behind_nat and h.peer not in (caller, peer) and not self.parted(h.peer, peer) for h in self.hosts.values())

    async def dial(self, caller: Host, peer: str, name: str) -> "SimPipe":
        self.dials += 1
        there = self.hosts.get(peer)
        if there is None or not there.powered or self.parted(caller.peer, peer) or not caller.alive:
            await asyncio.sleep(3600)  # nothing answers; who dials has a deadline
        await asyncio.sleep(self.delay(caller, there) + self.delay(there, caller))
        if not self.reaches(caller.peer, peer):
            raise ConnectionRefusedError("nobody is there")
        if name not in there.handlers:
            raise ConnectionRefusedError(f"it does not serve {name}")
        ours, theirs = SimPipe(self, caller), SimPipe(self, there)
        ours.other, theirs.other = theirs, ours
        caller.pipes[ours] = there.pipes[theirs] = None
        handler = there.handlers[name](caller.peer, caller.place or caller.peer, theirs)
        there.owner.spawn(handler)
        return ours

    def delay(self, one: Host, other: Host) -> float:
        return (one.link.latency + other.link.latency) * (0.9 + (1.4 - 0.9) * self._random())

    def carry(self, pipe: "SimPipe", data: bytes) -> float:
        """Send `data` from a pipe's end to its other one; returns when the sender's uplink has taken it."""
        here, there, now = pipe.host, pipe.other.host, self.loop.time()
        self.messages, self.bytes = self.messages + 1, self.bytes + len(data)
        begins = here.link.up_free if here.link.up_free > now else now
        here.link.up_free = sent = begins + len(data) * 8e-6 / here.link.up_mbit
        arrives = sent + self.delay(here, there)
        if here.link.loss and self._rng.random() < here.link.loss:
            arrives += _RETRANSMISSION_SECONDS
        there.link.down_free = arrives = max(arrives, there.link.down_free) + len(data) * 8e-6 / there.link.down_mbit
        arrives = pipe.last = max(arrives, pipe.last)
        if self.reset_share and self._rng.random() < self.reset_share:
            self.resets += 1
            self._at(arrives, pipe.reset)
        else:
            self._send(pipe, data, arrives)
        return sent

    def _send(self, pipe: "SimPipe", data: bytes | None, arrives: float) -> None:
        """data: None: the end."""
        pipe.under_way.append(data)
        self._at(arrives, self._deliver, pipe, arrives + _LINGER_SECONDS)

    def _deliver(self, pipe: "SimPipe", until: float) -> None:
        """What is under way in `pipe` for longest: nothing overtakes in a stream, also not after a partition."""
        here, there = pipe.host, pipe.other.host
        if not there.powered or self.parted(here.peer, there.peer):
            if self.loop.time() > until:
                return pipe.reset()
            return self._at(self.loop.time() + 1.0, self._deliver, pipe, until)
        pipe.other.take_in(pipe.under_way.popleft())

    def hang_up(self, pipe: "SimPipe") -> None:
        if pipe.other.closed:
            return  # nobody is there to hear of it
        at = max(self.loop.time() + self.delay(pipe.host, pipe.other.host), pipe.last)
        self._send(pipe, None, at)

    def _at(self, when: float, call: Callable, *args: Any) -> None:
        self.loop.call_at(when, call, *args, context=self._context)

    def die(self, host: Host, *, power: bool) -> None:
        """The process is gone. With power its machine hangs up all streams; without, the others hear nothing."""
        host.alive = False
        host.powered = not power
        host.handlers.clear()
        for pipe in list(host.pipes):
            if not power:
                self.hang_up(pipe)
            pipe.closed = True
        host.pipes.clear()


class SimPipe:
    """As `swarm.pipe.Pipe`; an end of a stream."""

    other: "SimPipe"

    def __init__(self, network: Network, host: Host):
        self._network, self.host = network, host
        self._data, self._ended, self._broken, self.closed = bytearray(), False, False, False
        self._waiting: asyncio.Future | None = None
        self.last = 0.0
        self.under_way: deque[bytes | None] = deque()
        """To the other end."""

    async def send(self, *pieces: bytes | memoryview, until: float) -> None:
        if self.closed or self._broken or not self.host.alive:
            raise ConnectionResetError("it is gone")
        loop = self._network.loop
        sent = self._network.carry(self, b"".join(pieces))
        # Some 100 kB are on their way before a sender notices that nothing is taken.
        if sent - loop.time() > 0.02:
            await asyncio.sleep(max(min(sent, until) - loop.time(), 0))
        if sent > until:
            raise TimeoutError("its time is over")

    async def take(self, into: memoryview, until: float) -> None:
        data, count = self._data, len(into)
        while len(data) < count:
            if self._broken or self.closed:
                raise ConnectionResetError("it is gone")
            if self._ended:
                raise EOFError("it hung up")
            await self._changed(until)
        into[:] = data[:count]
        del data[:count]

    async def take_some(self, most: int, until: float) -> bytes:
        """What has come, up to `most` bytes; b"" at the end."""
        while not self._data:
            if self._broken or self.closed:
                raise ConnectionResetError("it is gone")
            if self._ended:
                return b""
            await self._changed(until)
        some = bytes(self._data[:most])
        del self._data[:most]
        return some

    async def hung_up(self, until: float) -> None:
        while not (self._ended or self._broken or self.closed):
            await self._changed(until)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.host.pipes.pop(self, None)
            self._wake()
            if self.host.alive and not self._broken:
                self._network.hang_up(self)

    def take_in(self, data: bytes | None) -> None:
        if data is None:
            self._ended = True
        elif not self.closed:
            self._data += data
        self._wake()

    def reset(self) -> None:
        """The stream breaks, at both ends."""
        for end in (self, self.other):
            end._broken = True
            end.host.pipes.pop(end, None)
            end._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _changed(self, until: float) -> None:
        loop = self._network.loop
        self._waiting = waiting = loop.create_future()
        late = loop.call_at(until, _time_out, waiting)
        try:
            await waiting
        finally:
            late.cancel()
            if self._waiting is waiting:
                self._waiting = None


def _time_out(waiting: asyncio.Future) -> None:
    if not waiting.done():
        waiting.set_exception(TimeoutError("its time is over"))
