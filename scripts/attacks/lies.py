"""What a peer contributes that lies no louder than it may: it states its norm truly, so that only the clip and the average stand in its way.

It claims two rounds' samples, without a receipt: it counts like the usual member where the others have one (docs/decisions/0023). What it copies
or turns round is the mean of the last round: that is all of the others' work that a member sees whole.
"""

import math

import torch
from torch import Tensor

from peer.sync.engine.codec import Part, rough_square
from scripts.attacks.band import Band
from scripts.attacks.rounds import Guest, Outlet, as_bytes, contribute, decoded, random_values
from scripts.attacks.wire import Record


class Stretched:
    """Brings the mean of the last round that it came to, multiplied by `times`; zeros before there was one."""

    def __init__(self, times: float):
        self._times = times

    def states(self, guest: Guest) -> Record:
        """The samples and the norm of what it brings next."""
        norm = math.sqrt(sum(rough_square(self._sent(guest, part)) for part in guest.wire.parts))
        return {"samples": 2 * guest.band.target, "norm": norm}

    async def sends(self, guest: Guest, reducer: Outlet, parts: list[Part]) -> None:
        """Its parts to one reducer, whose means it remembers."""
        for part in parts:
            await reducer.send(as_bytes(part.encode(self._sent(guest, part))))
        # Remembered once all have what was stated for it.
        means = {part.start: decoded(part, (await reducer.receive(40))[1]) for part in parts}
        guest.memory |= means

    def _sent(self, guest: Guest, part: Part) -> Tensor:
        """(elements,), as it comes out at the other end."""
        return part.decode(part.encode(self._values(guest, part)))

    def _values(self, guest: Guest, part: Part) -> Tensor:
        return self._mean(guest, part) * self._times

    @staticmethod
    def _mean(guest: Guest, part: Part) -> Tensor:
        return guest.memory.get(part.start, torch.zeros(part.end - part.start))


class Noise(Stretched):
    """As long, and in no direction. Other noise for each round."""

    _seed = 0

    def states(self, guest: Guest) -> Record:
        self._seed = guest.band.rng.getrandbits(60)
        return super().states(guest)

    def _values(self, guest: Guest, part: Part) -> Tensor:
        noise = random_values(self._seed + part.start, part)
        return noise * (self._times * torch.linalg.vector_norm(self._mean(guest, part)) / torch.linalg.vector_norm(noise))


async def _bring(band: Band, lie: Stretched) -> None:
    await contribute(band, lie.sends, lie.states)


async def opposite(band: Band) -> None:
    await _bring(band, Stretched(-20))


async def turned(band: Band) -> None:
    await _bring(band, Stretched(-1))


async def x10(band: Band) -> None:
    await _bring(band, Stretched(10))


async def x1e6(band: Band) -> None:
    await _bring(band, Stretched(1e6))


async def copies(band: Band) -> None:
    await _bring(band, Stretched(1))


async def noise(band: Band) -> None:
    await _bring(band, Noise(10))
