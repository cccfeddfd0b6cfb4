"""A peer that assists as honest ones do, so that all have met it, and signs made-up children of the newest state in half of its looks.

Peers count whom they have met: what one of these can do alone is said in docs/internals.md, "What a liar can still do".
"""

import contextlib
from typing import Any

from peer.sync.engine.round.groups import Group
from scripts.attacks.band import Band
from scripts.attacks.rounds import Guest
from scripts.attacks.states import Forger, Shelf, child_of
from scripts.attacks.two_faced import Signing
from scripts.attacks.wire import Gone, Record


class _Forging(Guest):
    """group: in which it reduced last. Its child is what came of that, by its header, where the newest state is the one that it went on from."""

    def __init__(self, *args: Any, **record: Any):
        super().__init__(*args, **record)
        self.group: Group | None = None
        self._shelf = Shelf(self.band)
        # Values that float32 rounds as coarsely as honest ones: a peer that follows two of its states rebases from one to the other.
        self._forger = Forger(self.band, self._shelf, self._child, decades=1)

    async def settle_in(self) -> None:
        await self._shelf.open()
        await super().settle_in()

    async def _look(self) -> None:
        await super()._look()
        if self.band.rng.random() < 0.5:
            with contextlib.suppress(Gone):  # the state that it saw is old by now
                record = await self._forger.forge()
                await self.stranger.publish(self.band.run_id, {**record, "maddrs": await self.stranger.addresses(), **self._record})

    def _child(self, band: Band, header: Record, digest: str) -> Record:
        if self.group is not None and self.group.parent == digest:
            return child_of(header, digest, *({"peer": each.peer, "number": each.number, "samples": each.samples} for each in self.group.members))
        ours = self.stranger.peer_id
        return child_of(header, digest, {"peer": ours, "number": header["included"].get(ours, 0) + 1, "samples": band.rng.randint(1, 2 * band.target)})


class MetChild(Signing):
    enters_as = _Forging

    def _is_lied_to(self, known: Any, peer: str) -> bool:
        return False

    async def _goes_on(self, guest: _Forging, group: Group) -> None:
        guest.group = group


async def met_child(band: Band) -> None:
    await MetChild(band).run()
