"""How fast a peer's link is, asked by one that wants to know, and by those that want to keep it busy."""

import asyncio
import contextlib

import pytest

from peer.sync.engine.net import link
from peer.sync.engine.net.link import LINK, MOST_PIECES, PIECE_BYTES, measure_link, serve_link
from peer.sync.engine.net.streams import PeerLost, Refused
from tests.clock import Clock
from tests.peer.sync.swarm_tools import ANYTHING


async def flood(streams, peer: str, served: list[str]) -> int:
    """Ask as often as can be, for as much as can be had, and go on once the budget is spent; bytes that were sent here."""
    came = tried = 0
    while tried < 6:
        tried += len(served) >= 2
        with contextlib.suppress(PeerLost), contextlib.closing(await streams.open(peer, LINK)) as channel:
            await channel.send({"more": False, "pieces": 1 << 40}, bytes(PIECE_BYTES), seconds=60)
            while True:
                came += len((await channel.receive(ANYTHING, max_payload=PIECE_BYTES, seconds=60))[1])
                if streams.peer_id not in served:
                    served.append(streams.peer_id)
    return came


def test_five_that_ask_all_the_time_get_no_more_than_the_budget(virtual):
    async def scenario(nodes):
        ((server, serving), (_, honest), *strangers) = await nodes.streams(7)
        clock = Clock()
        await serve_link(serving, clock)
        served = []
        came = await asyncio.gather(*(flood(streams, server.peer_id, served) for _, streams in strangers))
        assert 0 < sum(came) <= 2 * MOST_PIECES * PIECE_BYTES
        with pytest.raises(Refused, match="try another peer"):
            await measure_link(honest, server.peer_id)
        clock.now = 60.0
        speed = await measure_link(honest, server.peer_id)
        assert speed.up > 0 and speed.down > 0
        assert not serving.mishaps

    virtual(scenario)


def test_an_asker_that_lets_every_piece_wait_is_ended(virtual, monkeypatch):
    monkeypatch.setattr(link, "_SECONDS", 0.5)

    async def scenario(nodes):
        ((server, serving), (_, streams)) = await nodes.streams(2)
        await serve_link(serving)
        with contextlib.closing(await streams.open(server.peer_id, LINK)) as channel:
            await channel.send({"more": True}, bytes(PIECE_BYTES), seconds=60)
            with pytest.raises(Refused, match="longer than"):
                await channel.receive(ANYTHING, seconds=60)

    virtual(scenario)
