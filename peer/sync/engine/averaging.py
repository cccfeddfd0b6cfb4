"""Exact all-reduce: each reducer averages one slice of the vector, encodes the average once, and sends the same bytes to all.

All or nothing: a part that is not averaged over ALL members fails the round at whoever misses it. No peer ever adopts a mixed
average, and every peer that finishes holds the same bytes (stock hivemind returns differences, compressed for each sender).
"""

import asyncio
import contextlib
import itertools
import logging

import torch
from torch import Tensor

from peer.sync.engine.codec import Codec
from peer.sync.engine.groups import Group
from peer.sync.engine.streams import CONNECT_SECONDS, Channel, PeerLost, Streams
from swarm.tasks import end_tasks

log = logging.getLogger(__name__)

REDUCE = "distributed-diffusion.reduce.1"
PART_ELEMENTS = 128 << 10
"""256 KiB at fp16: small enough to pipeline, large enough that Python's share stays small."""
PART_SECONDS = 30.0
_WINDOW = 8
_SLOWEST_BYTES_PER_SECOND = 125_000
_KNOWN_SOON_SECONDS = 10.0
COME_SECONDS = 15.0
"""Every member has dialled every reducer by then, or it died after the group was closed and nobody need wait longer."""


class RoundFailed(Exception):
    """The average is incomplete at this peer; whether others have it, their heads tell."""


class Averager:
    """Averages encoded vectors of `size` elements within groups."""

    def __init__(self, peer_id: str, streams: Streams, codec: Codec, size: int):
        self._peer_id, self._streams, self._codec, self._size = peer_id, streams, codec, size
        self._reductions: dict[str, _Reduction] = {}
        self._announced = asyncio.Condition()

    async def start(self) -> None:
        await self._streams.serve(REDUCE, self._serve_sender)

    async def average(self, group: Group, mine: Tensor) -> Tensor:
        """The encoded mean, weighted by samples, of all members' vectors; `mine` is ours, encoded, (n,) uint8. Raises RoundFailed."""
        width = self._codec.bytes_per_element
        result = torch.empty(self._size * width, dtype=torch.uint8)
        slices = cut(self._size, len(group.reducers))
        seconds = 60 + 2 * result.numel() / _SLOWEST_BYTES_PER_SECOND
        reduction = None
        if self._peer_id in group.reducers:
            start, end = slices[group.reducers.index(self._peer_id)]
            reduction = await self._announce(group, end - start)
        tasks = []
        for reducer, (start, end) in zip(group.reducers, slices, strict=True):
            part, into = mine[start * width : end * width], result[start * width : end * width]
            if reducer == self._peer_id:
                tasks.append(asyncio.create_task(self._reduce_own(reduction, part, into)))
            else:
                tasks.append(asyncio.create_task(self._exchange(reducer, group.id, part, into)))
        watch = asyncio.create_task(reduction.fail_unless_all_come()) if reduction is not None else None
        try:
            await asyncio.wait_for(_all(tasks), seconds)
        except (PeerLost, ValueError, asyncio.TimeoutError) as error:
            if reduction is not None:
                reduction.fail(f"{self._peer_id[-6:]} gave up: {error}")
            raise RoundFailed(str(error) or "it took too long") from None
        finally:
            await end_tasks(*tasks, *([watch] if watch else []))
            # Whoever still takes averages from us does so in a handler of its own, which this does not end.
            self._reductions.pop(group.id, None)
        return result

    async def _announce(self, group: Group, elements: int) -> "_Reduction":
        reduction = self._reductions[group.id] = _Reduction(group, elements, self._codec, self._peer_id)
        async with self._announced:
            self._announced.notify_all()
        return reduction

    async def _reduce_own(self, reduction: "_Reduction", part: Tensor, into: Tensor) -> None:
        for index, (start, end) in enumerate(reduction.parts):
            reduction.add(self._peer_id, index, part[start:end])
            into[start:end] = await reduction.mean(index)

    async def _exchange(self, reducer: str, group_id: str, part: Tensor, into: Tensor) -> None:
        """Send our part of a reducer's slice to it, and take the averages back, both at once."""
        channel = await self._streams.open(reducer, REDUCE)
        with contextlib.closing(channel):
            await channel.send({"group": group_id}, seconds=CONNECT_SECONDS)
            pieces = cut_parts(part.numel() // self._codec.bytes_per_element, self._codec.bytes_per_element)

            async def send() -> None:
                for start, end in pieces:
                    await channel.send({}, memoryview(part[start:end].numpy()), seconds=PART_SECONDS)

            async def receive() -> None:
                for start, end in pieces:
                    _, data = await channel.receive(max_payload=end - start, seconds=PART_SECONDS)
                    into[start:end] = self._checked(data, end - start, reducer)

            tasks = [asyncio.create_task(send()), asyncio.create_task(receive())]
            try:
                await _all(tasks)
            finally:
                await end_tasks(*tasks)

    async def _serve_sender(self, channel: Channel) -> None:
        request, _ = await channel.receive(seconds=CONNECT_SECONDS)
        reduction = await self._reduction(str(request.get("group")))
        reduction.came(channel.peer)

        async def take() -> None:
            for index, (start, end) in enumerate(reduction.parts):
                _, data = await channel.receive(max_payload=end - start, seconds=PART_SECONDS)
                reduction.add(channel.peer, index, self._checked(data, end - start, channel.peer))
                if index >= _WINDOW:
                    await reduction.mean(index - _WINDOW)

        async def give() -> None:
            for index in range(len(reduction.parts)):
                await channel.send({}, memoryview((await reduction.mean(index)).numpy()), seconds=PART_SECONDS)

        taking, giving = tasks = [asyncio.create_task(take()), asyncio.create_task(give())]
        try:
            await _all(tasks)
        except (PeerLost, asyncio.TimeoutError) as error:
            raise PeerLost(str(error) or "too slow") from None
        finally:
            await end_tasks(*tasks)
            # A member whose parts are all here is in the average, even if it takes nothing back.
            if taking.cancelled() or taking.exception() is not None:
                reason = giving.exception() if taking.cancelled() and not giving.cancelled() else None
                reason = reason or (taking.exception() if not taking.cancelled() else None)
                reduction.fail(f"{channel.peer[-6:]} fell out: {reason or 'too slow'}")

    async def _reduction(self, group_id: str) -> "_Reduction":
        # A member may hear of the group, and dial us, a moment before the leader's message reaches us.
        try:
            async with self._announced:
                await asyncio.wait_for(self._announced.wait_for(lambda: group_id in self._reductions), _KNOWN_SOON_SECONDS)
            return self._reductions[group_id]
        except (asyncio.TimeoutError, KeyError):
            raise PeerLost("unknown group") from None

    def _checked(self, data: bytes, length: int, peer: str) -> Tensor:
        if len(data) != length:
            raise PeerLost(f"{peer[-6:]} sent a part of {len(data)} bytes instead of {length}")
        part = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            self._codec.decode(part)
        except ValueError as error:
            raise PeerLost(f"{peer[-6:]} sent {error}") from None
        return part


class _Reduction:
    """One reducer's slice within one group: parts come in from all members, each average is made once when its last part is there."""

    def __init__(self, group: Group, elements: int, codec: Codec, own: str):
        self.parts = cut_parts(elements, codec.bytes_per_element)
        self.senders = {member.peer for member in group.members}
        self._came, self._all_came = {own}, asyncio.Event()
        self._weights = {member.peer: member.samples / group.samples for member in group.members}
        self._codec = codec
        self._received: list[dict[str, Tensor]] = [{} for _ in self.parts]
        self._means = [asyncio.get_running_loop().create_future() for _ in self.parts]

    def came(self, peer: str) -> None:
        """`peer` wants to send its parts, which it may do once. Raises PeerLost."""
        if peer not in self.senders:
            raise PeerLost("not a member of this group")
        if peer in self._came:
            raise PeerLost("sending already")
        self._came.add(peer)
        if self._came == self.senders:
            self._all_came.set()

    async def fail_unless_all_come(self) -> None:
        if self._came == self.senders:
            return
        try:
            await asyncio.wait_for(self._all_came.wait(), COME_SECONDS)
        except asyncio.TimeoutError:
            self.fail(f"{', '.join(sorted(peer[-6:] for peer in self.senders - self._came))} did not come")

    def add(self, peer: str, index: int, part: Tensor) -> None:
        if self._means[index].done():
            return
        self._received[index][peer] = part
        if len(self._received[index]) == len(self.senders):
            try:
                self._means[index].set_result(self._average(index))
            except ValueError as error:
                self.fail(f"the average has {error}")
            self._received[index] = {}

    async def mean(self, index: int) -> Tensor:
        """The encoded average of one part. Raises PeerLost when it cannot be had any more."""
        return await asyncio.wait_for(asyncio.shield(self._means[index]), PART_SECONDS)

    def fail(self, reason: str) -> None:
        for future in self._means:
            if not future.done():
                future.set_exception(PeerLost(reason))
                future.exception()  # nobody need be waiting for it
        self._received = [{} for _ in self.parts]

    def _average(self, index: int) -> Tensor:
        total = None
        for peer in sorted(self.senders):
            weighted = self._codec.decode(self._received[index][peer]) * self._weights[peer]
            total = weighted if total is None else total.add_(weighted)
        encoded = self._codec.encode(total)
        self._codec.decode(encoded)  # finite values may add up to more than a float holds
        return encoded


def cut(size: int, parts: int) -> list[tuple[int, int]]:
    """`size` elements in `parts` slices [start, end) of nearly equal length, by integers that every peer repeats."""
    bounds = [size * index // parts for index in range(parts + 1)]
    return list(itertools.pairwise(bounds))


def cut_parts(elements: int, bytes_per_element: int) -> list[tuple[int, int]]:
    """A slice's parts as byte ranges [start, end)."""
    starts = range(0, elements, PART_ELEMENTS)
    return [(start * bytes_per_element, min(start + PART_ELEMENTS, elements) * bytes_per_element) for start in starts]


async def _all(tasks: list[asyncio.Task]) -> None:
    await asyncio.gather(*tasks)
