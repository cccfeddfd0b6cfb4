"""The better state that is on its way to us: which one to fetch, whether to wait for it, and whether it is still wanted once it is here."""

import asyncio

from peer.sync.engine.cell import Cell
from peer.sync.engine.net.neighbours import Neighbours
from peer.sync.engine.net.streams import Streams
from peer.sync.engine.round.claims import head_of
from peer.sync.engine.round.heads import Heads
from peer.sync.engine.state import Head, State, better
from peer.sync.engine.transfer.donors import ask_head
from peer.sync.engine.transfer.state_fetch import StateFetch
from swarm.records import JOINING
from swarm.tasks import end_tasks

_ASK_SECONDS = 5.0


class CatchUp:
    def __init__(self, streams: Streams, state: Cell[State], heads: Heads, neighbours: Neighbours, state_fetch: StateFetch):
        self._streams, self._state, self._heads, self._neighbours, self._state_fetch = streams, state, heads, neighbours, state_fetch

    def look(self) -> None:
        """Fetch what is right in place of ours."""
        self._state_fetch.consider(self._heads.right(), self._state.value)

    def arrived(self) -> State | None:
        """A state that was fetched, and is still wanted."""
        before, state = self._state_fetch.began_from, self._state_fetch.result()
        if state is None:
            return None
        head = Head.of(state)
        wanted = self._heads.is_right(head) or (self._state.value is before and not self._heads.keeps(head))
        return state if wanted else None

    @property
    def held_back(self) -> bool:
        """Whether to wait for it: unless more live peers are with us than with it."""
        if not self._state_fetch.signers:
            return False
        digest = self._state.value.digest
        with_us = 1 + sum(record.digest == digest and record.phase != JOINING for record in self._neighbours.others())
        return self._state_fetch.signers >= with_us

    async def ask(self) -> set[str]:
        """Ask the others directly: their records may be seconds old, and a member may have committed what we missed. Returns who is ahead."""
        asked = {asyncio.create_task(ask_head(self._streams, r.peer_id)): r.peer_id for r in self._neighbours.counted_upon()}
        told = {}
        if asked:
            done, late = await asyncio.wait(asked, timeout=_ASK_SECONDS)
            await end_tasks(*late)
            told = {asked[task]: task.result() for task in done if task.result() is not None}
            for peer, head in told.items():
                self._heads.heard(peer, head)
            self.look()
        await self._neighbours.read()
        ours = Head.of(self._state.value)
        heads = [*told.items(), *((record.peer_id, head_of(record)) for record in self._neighbours.others())]
        return {peer for peer, head in heads if better(head, ours)}

    @property
    def words(self) -> str:
        """For people: what keeps us from going on."""
        return f"fetching a newer state: {self._state_fetch.share:.0%} of it is here" if self._state_fetch.signers else ""

    @property
    def trouble(self) -> str:
        return self._state_fetch.trouble
