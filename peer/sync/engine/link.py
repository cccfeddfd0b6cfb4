"""How fast bytes go to a peer and come from it, asked before one takes part: `dd-peer --check`. A few MB, one asker at a time."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from peer.sync.engine.streams import Channel, PeerLost, Streams

LINK = "distributed-diffusion.link.1"
PIECE_BYTES = 256 << 10
MOST_PIECES = 32
"""8 MiB in each direction."""
_PIECE_SECONDS = 10.0


@dataclass(frozen=True)
class Speed:
    """Bits per second, each way."""

    up: float
    down: float


async def serve_link(streams: Streams) -> None:
    """Take what an asker sends, and send it back as much as it wants: at most 8 MiB, and one asker at a time."""
    busy = asyncio.Lock()

    async def answer(channel: Channel) -> None:
        if busy.locked():
            raise PeerLost("another one is measuring, try again later")
        async with busy:
            for _ in range(MOST_PIECES):
                header, _ = await channel.receive(max_payload=PIECE_BYTES, seconds=_PIECE_SECONDS)
                if not header.get("more"):
                    break
            await channel.send({}, seconds=_PIECE_SECONDS)
            wanted = header.get("pieces")
            for _ in range(min(wanted, MOST_PIECES) if isinstance(wanted, int) else 0):
                await channel.send({}, bytes(PIECE_BYTES), seconds=_PIECE_SECONDS)

    await streams.serve(LINK, answer)


async def measure_link(streams: Streams, peer: str, seconds: float = 5.0, clock: Callable[[], float] = time.monotonic) -> Speed:
    """To `peer` and back, for so long each way at most. Raises PeerLost."""
    with contextlib.closing(await streams.open(peer, LINK)) as channel:
        began, pieces = clock(), 0
        while pieces < MOST_PIECES - 1 and clock() - began < seconds:
            await channel.send({"more": True}, bytes(PIECE_BYTES), seconds=_PIECE_SECONDS)
            pieces += 1
        await channel.send({"more": False, "pieces": pieces}, seconds=_PIECE_SECONDS)
        await channel.receive(seconds=_PIECE_SECONDS * 2)
        up, began, came = 8 * pieces * PIECE_BYTES / max(clock() - began, 1e-6), clock(), 0
        while came < pieces and (not came or clock() - began < seconds):
            await channel.receive(max_payload=PIECE_BYTES, seconds=_PIECE_SECONDS)
            came += 1
        return Speed(up, 8 * came * PIECE_BYTES / max(clock() - began, 1e-6))
