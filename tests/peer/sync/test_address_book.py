"""Whom a peer dials on the word of records."""

import asyncio
import time
from types import SimpleNamespace

from peer.sync.engine.net.address_book import AddressBook
from peer.sync.engine.net.presence import Presence
from swarm.records import PeerRecord


def record(peer: str, port: int = 1000) -> PeerRecord:
    place = f"/ip4/8.8.4.4/tcp/{port}/p2p/{peer}"
    return PeerRecord(peer_id=peer, config="c", schema="s", round=0, samples=0, digest="d", maddrs=(place,), time=time.time())


def test_those_we_have_met_keep_their_places_whoever_else_comes():
    friends = [f"QmFriend{number}" for number in range(20)]
    book = AddressBook(met=set(friends))
    book.see(map(record, friends), ())
    for number in range(1000):
        book.see([record(f"QmStranger{number}")], ())
    strangers = book.addresses.keys() - set(friends)
    assert book.addresses.keys() >= set(friends) and len(strangers) == 8 and "QmStranger999" in strangers


def test_the_lost_are_dialled_in_turn_and_those_we_have_met_first():
    book = AddressBook(met={"QmFriend"})
    book.see([record("QmStranger"), record("QmFriend"), record("QmLive")], ())
    dialled = [book.next_lost({"QmLive"})[0].rpartition("/")[2] for _ in range(4)]
    assert dialled == ["QmFriend", "QmStranger", "QmFriend", "QmStranger"]
    assert book.next_lost(book.addresses) == ()


def test_a_few_of_the_lost_are_dialled_a_minute_however_many_records_named_addresses():
    class Node:
        came_by, dialled = (), []

        async def meet(self, maddrs):
            self.dialled.append(maddrs)

    class Neighbours:
        members = SimpleNamespace(bans=SimpleNamespace(peers=lambda: {"QmFriend7"}))

        def others(self):
            return []

    clock = [0.0]
    node = Node()
    friends = {f"QmFriend{number}" for number in range(32)}
    nothing = [None] * 2
    presence = Presence(None, node, Neighbours(), *nothing, lambda: clock[0], friends)
    presence.book.see(map(record, sorted(friends)), ())

    async def minutes(count: int) -> int:
        before = len(node.dialled)
        for _ in range(4 * count):
            await presence._meet_lost()
            clock[0] += 15.0
        return len(node.dialled) - before

    assert asyncio.run(minutes(1)) <= 12
    assert asyncio.run(minutes(10)) == 60
    assert {maddrs for maddrs in node.dialled} == {presence.book.addresses[peer] for peer in friends - {"QmFriend7"}}, "who is banned is not dialled"
