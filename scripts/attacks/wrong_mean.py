"""A member that assists, and gives all members of each group one wrong mean, which it signs (docs/decisions/0030).

Nobody who checks is answered: it serves no stream for that. It also asks the others what they sent, with lots that are none.
"""

import asyncio
import contextlib

from peer.sync.engine.round.checks import INPUTS
from scripts.attacks.band import Band
from scripts.attacks.two_faced import Signing
from scripts.attacks.wire import Gone

_PRY_SECONDS = 5.0


class WrongMean(Signing):
    async def run(self) -> None:
        prying = asyncio.create_task(self._pry_forever())
        try:
            await super().run()
        finally:
            prying.cancel()

    @property
    def _to_all_by(self) -> str:
        return self._key.peer_id

    async def _pry_forever(self) -> None:
        while True:
            await asyncio.sleep(_PRY_SECONDS)
            for group in [each.group for each in self._rounds.values()][-1:]:
                member = self.band.rng.choice(group.members).peer
                look = {"group": group.id, "lot": self._key.sign(b"a lot"), "key": self._key.public, "sought": []}
                with contextlib.suppress(Gone):
                    await self.band.strangers[-1].ask(member, INPUTS, look)
                    self.band.say(event="pried", of=member)


async def wrong_mean_to_all(band: Band) -> None:
    await WrongMean(band).run()
