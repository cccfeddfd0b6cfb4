"""How fast bytes go to a peer and come from it, asked before one takes part: `dd-peer --check`. A few MB, and seldom."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from peer.sync.engine.net.messages import LinkPiece, Nothing
from peer.sync.engine.net.streams import Channel, PeerLost, Streams
from swarm.quota import Quota

LINK = "distributed-diffusion.link.1"
PIECE_BYTES = 256 << 10
MOST_PIECES = 32
"""8 MiB in each direction."""
_PIECE_SECONDS = 10.0
_SECONDS = 60.0
"""For one asker, also for one that lets every piece wait."""
_PER_MINUTE, _PER_MINUTE_AND_PEER = 2, 1
"""However many ask, 16 MiB a minute in each direction: 2.2 Mbit/s. One that is refused asks somebody else."""


@dataclass(frozen=True)
class Speed:
    """Bits per second, each way."""

    up: float
    down: float


async def serve_link(streams: Streams, clock: Callable[[], float] = time.monotonic) -> None:
    """Take what an asker sends, and send it back as much as it wants: at most 8 MiB, one asker at a time, and within a budget."""
    busy, budget = asyncio.Lock(), Quota(_PER_MINUTE, _PER_MINUTE_AND_PEER, 60.0, clock)

    async def answer(channel: Channel) -> None:
        if busy.locked() or not budget.take(channel.peer):
            raise PeerLost("others have measured a moment ago, try another peer")
        async with busy:
            try:
                await asyncio.wait_for(_to_and_fro(channel), _SECONDS)
            except asyncio.TimeoutError:
                raise PeerLost(f"measuring took longer than {_SECONDS:.0f} s") from None

    await streams.serve(LINK, answer)


async def _to_and_fro(channel: Channel) -> None:
    for _ in range(MOST_PIECES):
        piece, _ = await channel.receive(LinkPiece, max_payload=PIECE_BYTES, seconds=_PIECE_SECONDS)
        if not piece.more:
            break
    await channel.send(Nothing(), seconds=_PIECE_SECONDS)
    for _ in range(min(piece.pieces, MOST_PIECES)):
        await channel.send(Nothing(), bytes(PIECE_BYTES), seconds=_PIECE_SECONDS)


async def measure_link(streams: Streams, peer: str, seconds: float = 5.0) -> Speed:
    """To `peer` and back, with this deadline for each way. Raises PeerLost."""
    with contextlib.closing(await streams.open(peer, LINK)) as channel:
        began, pieces = time.monotonic(), 0
        while pieces < MOST_PIECES - 1 and time.monotonic() - began < seconds:
            await channel.send(LinkPiece(more=True), bytes(PIECE_BYTES), seconds=_PIECE_SECONDS)
            pieces += 1
        await channel.send(LinkPiece(pieces=pieces), seconds=_PIECE_SECONDS)
        await channel.receive(Nothing, seconds=_PIECE_SECONDS * 2)
        up, began, came = 8 * pieces * PIECE_BYTES / max(time.monotonic() - began, 1e-6), time.monotonic(), 0
        while came < pieces and (not came or time.monotonic() - began < seconds):
            await channel.receive(Nothing, max_payload=PIECE_BYTES, seconds=_PIECE_SECONDS)
            came += 1
        return Speed(up, 8 * came * PIECE_BYTES / max(time.monotonic() - began, 1e-6))
