"""A limit on what this process sends to other peers: `--max_upload_mbit`.

Counted where our own streams write. p2pd's own traffic, some kB/s of DHT and whatever it relays for others, is not in it.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

_BURST_SECONDS = 0.1
"""What may go at once after a pause."""
_SHORT_BYTES = 4 << 10
"""A word of matchmaking is due within seconds; behind four downloads' pieces it would wait 8 s at 1 Mbit/s."""


class Bucket:
    """Lets `mbit` million bits a second through. clock: seconds, monotonic."""

    def __init__(
        self, mbit: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    ):
        self._bytes_per_second, self._clock, self._sleep = mbit * 1e6 / 8, clock, sleep
        self._free_at = self._rounds_free_at = clock() - _BURST_SECONDS

    async def take(self, num_bytes: int, *, seconds: float = math.inf, of_round: bool = False) -> None:
        """Wait until what was taken before is paid for; whoever asks first goes first. A large message is sent whole, and paid for by the next.

        A short one waits for nobody, and is paid for by the next large one. of_round: one of a round waits for others of rounds alone; what
        strangers ask for must not hold it up. Raises TimeoutError at once where it would wait for longer than `seconds`.
        """
        now, length = self._clock(), num_bytes / self._bytes_per_second
        begins = max(self._rounds_free_at if of_round else self._free_at, now - _BURST_SECONDS)
        waits = begins > now and num_bytes > _SHORT_BYTES
        if waits and begins - now > seconds:
            raise TimeoutError(f"what this machine may send is spoken for, for {begins - now:.0f} s")
        if of_round:
            self._rounds_free_at = begins + length
        self._free_at = max(self._free_at, now - _BURST_SECONDS) + length
        if waits:
            await self._sleep(begins - now)
