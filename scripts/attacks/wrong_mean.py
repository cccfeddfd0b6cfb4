"""A member that assists, and gives all members of each group one wrong mean, which it signs (docs/decisions/0030). Else it does as honest ones do.

It also asks the others what they sent, with lots that are none.
"""

import asyncio
import contextlib

from peer.sync.engine.round.checks import INPUTS
from scripts.attacks.band import Band
from scripts.attacks.two_faced import Signing
from scripts.attacks.wire import Frames, Gone, Stranger

_PRY_SECONDS = 5.0


class WrongMean(Signing):
    async def run(self) -> None:
        prying = asyncio.create_task(self._pry_forever())
        try:
            await super().run()
        finally:
            prying.cancel()

    async def _well_placed(self) -> Stranger:
        stranger = await super()._well_placed()
        await stranger.serve(INPUTS, self._show)  # once: p2pd refuses a name that is served already
        return stranger

    @property
    def _to_all_by(self) -> str:
        return self._key.peer_id

    async def _show(self, frames: Frames) -> None:
        """What members signed, to whoever asks: it brings nothing of its own."""
        name = (await frames.receive(15))[0].get("group")
        if name not in self._rounds:
            raise Gone("a group that we are not in")
        inputs = [vars(each) for each in self._rounds[name].reduction.signed_inputs]
        await frames.send({"inputs": inputs, "slices": []})

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
