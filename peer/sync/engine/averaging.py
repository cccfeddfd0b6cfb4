"""Exact all-reduce: each reducer averages one share of the vector, encodes the average once, and sends the same bytes to all.

All or nothing: a part that is not averaged over ALL members fails the round at whoever misses it. No peer ever adopts a mixed
average, and every peer that finishes holds the same bytes (stock hivemind returns differences, compressed for each sender).

Memory of one round: the encoded contribution and the encoded mean, and at a reducer _WINDOW parts of each sender; no float copy of
more than one part.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peer.sync.engine import points
from peer.sync.engine.codec import PART_ELEMENTS, Part, Wire, add_up, square_norm
from peer.sync.engine.groups import Group
from peer.sync.engine.streams import CONNECT_SECONDS, Channel, PeerLost, Streams
from peer.sync.engine.vectors import Reused
from swarm.tasks import end_tasks

log = logging.getLogger(__name__)

REDUCE = "distributed-diffusion.reduce.3"
PART_SECONDS = 30.0
_WINDOW = 8
_SLOWEST_BYTES_PER_SECOND = 125_000
_LARGEST_SQUARE = 2.0**1000
"""Of a part: no sum of a state's 3,280 parts (SD 1.5) overflows, and float32's largest values stay far below."""
_KNOWN_SOON_SECONDS = 10.0
COME_SECONDS = 15.0
"""Every member has dialled every reducer by then, or it died after the group was closed and nobody need wait longer."""


class RoundFailed(Exception):
    """The average is incomplete at this peer; whether others have it, their heads tell."""


@dataclass
class Traffic:
    """Bytes that this peer sent and received, headers included, and the seconds from the group to the whole average.

    `up` still grows while slower members take the last of our averages.
    """

    up: int = 0
    down: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Mean:
    """encoded: the weighted mean, (wire.num_bytes,) uint8. square_norm: the sum of squares of its decoded values, as the reducers
    worked it out; the same bits at every member, which no sum over a whole vector at each peer would be."""

    encoded: Tensor
    square_norm: float
    traffic: Traffic = field(default_factory=Traffic, compare=False)


class Averager:
    """Averages vectors that travel by `wire` within groups."""

    def __init__(self, peer_id: str, streams: Streams, wire: Wire):
        self._peer_id, self._streams, self._wire = peer_id, streams, wire
        self.memory = Reused(wire.num_bytes)
        """Of encoded means."""
        self._reductions: dict[str, _Reduction] = {}
        self._announced = asyncio.Condition()

    async def start(self) -> None:
        await self._streams.serve(REDUCE, self._serve)

    async def average(self, group: Group, mine: Tensor | None) -> Mean:
        """The mean, weighted by samples, of all members' vectors. Raises RoundFailed.

        mine: our vector, encoded, (num_bytes,) uint8; None at a reducer that is no member.
        """
        assert (mine is not None) == any(member.peer == self._peer_id for member in group.members)
        began = time.monotonic()
        run = _Run(group, mine, self.memory.take(), [0.0] * len(self._wire.parts))
        shares = dict(zip(group.reducers, share_out(self._wire.parts, len(group.reducers)), strict=True))
        own, reduction, reason = shares.pop(self._peer_id, []), None, "it left"
        tasks = [asyncio.create_task(self._exchange(reducer, share, run)) for reducer, share in shares.items() if share]
        if own:
            reduction = self._reductions[group.id] = _Reduction(run, [self._wire.parts[index] for index in own], own)
            tasks += [asyncio.create_task(self._reduce_own(reduction, run)), asyncio.create_task(reduction.fail_unless_all_come())]
        try:
            await asyncio.wait_for(_all(tasks), 60 + 2 * self._wire.num_bytes / _SLOWEST_BYTES_PER_SECOND)
        except (PeerLost, ValueError, asyncio.TimeoutError) as error:
            reason = str(error) or "it took too long"
            raise RoundFailed(reason) from None
        finally:
            # Whoever still takes averages from us does so in a handler of its own, which this does not end; whoever waits for one
            # that will not be, also because we were cancelled, need not sit out its deadline.
            if reduction is not None:
                reduction.fail(f"{self._peer_id[-6:]} gave up: {reason}")
                self._reductions.pop(group.id, None)
            await end_tasks(*tasks)
        run.traffic.seconds = time.monotonic() - began
        return Mean(run.result, add_up(run.squares), run.traffic)

    async def _reduce_own(self, reduction: "_Reduction", run: "_Run") -> None:
        if run.mine is not None:
            reduction.came(self._peer_id)
        async with self._announced:
            self._announced.notify_all()
        for index, part in enumerate(reduction.parts):
            if run.mine is not None:
                reduction.add(self._peer_id, index, part.bytes_of(run.mine))
            await reduction.mean(index)

    async def _exchange(self, reducer: str, share: Sequence[int], run: "_Run") -> None:
        """Send our part of a reducer's share to it, and take the averages back, both at once."""
        channel = await self._streams.open(reducer, REDUCE)
        parts = self._wire.parts

        async def send() -> None:
            for count, index in enumerate(share if run.mine is not None else ()):
                await channel.send({}, memoryview(parts[index].bytes_of(run.mine).numpy()), seconds=PART_SECONDS)
                await points.part_sent(count, len(share), self._peer_id)

        async def receive() -> None:
            for index in share:
                # The reducer gives up before us, and tells us because of whom.
                room = parts[index].bytes_of(run.result)
                header = await _receive(channel, parts[index], room, COME_SECONDS + PART_SECONDS)
                run.squares[index] = _square(header, reducer)

        with contextlib.closing(channel):
            tasks = []
            try:
                await channel.send({"group": run.group.id}, seconds=CONNECT_SECONDS)
                tasks = [asyncio.create_task(send()), asyncio.create_task(receive())]
                await _all(tasks)
            finally:
                await end_tasks(*tasks)
                run.count(channel)

    async def _serve(self, channel: Channel) -> None:
        """Take a member's parts of our share, and give it the averages."""
        request, _ = await channel.receive(seconds=CONNECT_SECONDS)
        reduction = await self._reduction(str(request.get("group")))
        reduction.came(channel.peer)

        async def take() -> None:
            # The same memory again and again: at any time, at most so many parts wait for those of others.
            room = torch.empty(_WINDOW + 1, max(part.num_bytes for part in reduction.parts), dtype=torch.uint8)
            for index, part in enumerate(reduction.parts if channel.peer in reduction.senders else ()):
                data = room[index % len(room)][: part.num_bytes]
                await _receive(channel, part, data, PART_SECONDS, whole=False)  # decoding it checks its values
                reduction.add(channel.peer, index, data)
                if index >= _WINDOW:
                    await reduction.mean(index - _WINDOW)

        async def give() -> None:
            for index in range(len(reduction.parts)):
                data, square = await reduction.mean(index)
                await channel.send({"square": square}, memoryview(data.numpy()), seconds=PART_SECONDS)

        taking, _ = tasks = [asyncio.create_task(take()), asyncio.create_task(give())]
        try:
            await _all(tasks)
        finally:
            await end_tasks(*tasks)
            reduction.run.count(channel)
            reasons = [task.exception() for task in tasks if not task.cancelled() and task.exception()]
            # A member whose parts are all here is in the average, even if it takes nothing back.
            if taking.cancelled() or taking.exception():
                reduction.fail(f"{channel.peer[-6:]} fell out: {reasons[0] if reasons else 'we are closing'}")

    async def _reduction(self, group_id: str) -> "_Reduction":
        # A member may hear of the group, and dial us, a moment before the leader's message reaches us.
        try:
            async with self._announced:
                await asyncio.wait_for(self._announced.wait_for(lambda: group_id in self._reductions), _KNOWN_SOON_SECONDS)
            return self._reductions[group_id]
        except (asyncio.TimeoutError, KeyError):
            raise PeerLost("unknown group") from None


@dataclass
class _Run:
    """One average on its way: what goes in, and what has come of it so far."""

    group: Group
    mine: Tensor | None
    result: Tensor
    squares: list[float]
    """Of each part of the mean."""
    traffic: Traffic = field(default_factory=Traffic)

    def count(self, channel: Channel) -> None:
        self.traffic.up += channel.sent
        self.traffic.down += channel.received


class _Reduction:
    """Our share within one group: parts come in from all members, each average is made once when its last part is there."""

    def __init__(self, run: _Run, parts: Sequence[Part], indices: Sequence[int]):
        self.run, self.parts, self._indices = run, parts, indices
        members = run.group.members
        self.senders = {member.peer for member in members}
        self._takers = self.senders | set(run.group.reducers)
        self._came: set[str] = set()
        self._all_came = asyncio.Event()
        self._weights = {member.peer: member.samples / run.group.samples for member in members}
        # Kept for all parts: fresh memory for each would be page faults.
        self._scratch = torch.empty(2, PART_ELEMENTS)
        self._received: list[dict[str, Tensor]] = [{} for _ in parts]
        self._means = [asyncio.get_running_loop().create_future() for _ in parts]

    def came(self, peer: str) -> None:
        """`peer` wants to send its parts and take the averages, which it may do once. Raises PeerLost."""
        if peer not in self._takers:
            raise PeerLost("not a member of this group")
        if peer in self._came:
            raise PeerLost("sending already")
        self._came.add(peer)
        if self._came >= self.senders:
            self._all_came.set()

    async def fail_unless_all_come(self) -> None:
        try:
            await asyncio.wait_for(self._all_came.wait(), COME_SECONDS)
        except asyncio.TimeoutError:
            self.fail(f"{', '.join(sorted(peer[-6:] for peer in self.senders - self._came))} did not come")

    def add(self, peer: str, index: int, data: Tensor) -> None:
        """One encoded part of one member, of the right length."""
        if self._means[index].done():
            return
        self._received[index][peer] = data
        if len(self._received[index]) == len(self.senders):
            try:
                self._means[index].set_result(self._average(index))
            except PeerLost as error:
                self.fail(str(error))
            except ValueError as error:
                self.fail(f"the average has {error}")
            self._received[index] = {}

    async def mean(self, index: int) -> tuple[Tensor, float]:
        """The encoded average of one part, and its sum of squares. Raises PeerLost when it cannot be had any more."""
        future = self._means[index]
        if not future.done():
            await asyncio.wait([future], timeout=PART_SECONDS)
        if not future.done():
            missing = sorted(peer[-6:] for peer in self.senders - self._received[index].keys())
            self.fail(f"{', '.join(missing)} sent no part for {PART_SECONDS:g} s")
        return future.result()

    def fail(self, reason: str) -> None:
        for future in self._means:
            if not future.done():
                future.set_exception(PeerLost(reason))
                future.exception()  # nobody need be waiting for it
        self._received = [{} for _ in self.parts]

    def _average(self, index: int) -> tuple[Tensor, float]:
        part = self.parts[index]
        total, values = self._scratch[:, : part.end - part.start]
        for count, peer in enumerate(sorted(self.senders)):
            into = values if count else total
            try:
                part.decode(self._received[index][peer], into)
            except ValueError as error:
                raise PeerLost(f"{peer[-6:]} sent {error}") from None
            into.mul_(self._weights[peer])
            if count:
                total.add_(into)
        encoded = part.encode(total, part.bytes_of(self.run.result))
        # Decoding checks it: finite values may add up to more than a float holds.
        square = self.run.squares[self._indices[index]] = square_norm(part.decode(encoded, values))
        return encoded, square


def share_out(parts: Sequence[Part], reducers: int) -> list[list[int]]:
    """Which parts each reducer averages: consecutive ones, by integers that every peer repeats; as nearly equal in bytes as parts allow."""
    shares: list[list[int]] = [[] for _ in range(reducers)]
    total = parts[-1].stop if parts else 0
    for index, part in enumerate(parts):
        shares[(part.begin + part.stop) * reducers // (2 * total)].append(index)
    return shares


async def _receive(channel: Channel, part: Part, room: Tensor, seconds: float, *, whole: bool = True) -> dict:
    """One encoded part into `room`, its length checked, and its values if `whole`; the message's header. Raises PeerLost."""
    header, count = await channel.receive_into(memoryview(room.numpy()), seconds=seconds)
    try:
        (part.check if whole else part.check_length)(room[:count])
    except ValueError as error:
        raise PeerLost(f"{channel.peer[-6:]} sent {error}") from None
    return header


def _square(header: dict, peer: str) -> float:
    square = header.get("square")
    if not isinstance(square, float) or not 0 <= square <= _LARGEST_SQUARE:
        raise PeerLost(f"{peer[-6:]} sent {str(square)[:40]} for a sum of squares")
    return square


async def _all(tasks: list[asyncio.Task]) -> None:
    await asyncio.gather(*tasks)
