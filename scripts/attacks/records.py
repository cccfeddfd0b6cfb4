"""Strangers that write into the DHT what they like, and ask for what costs more to answer than to ask."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import msgpack
from hivemind.dht.routing import DHTID

from scripts.attacks.band import Band
from scripts.attacks.wire import RUNS_KEY, Gone, Key, Record, Stored, Stranger, say
from swarm.digest import digest_bytes, digest_json

_RENEW_SECONDS = 8.0
_INVENTED_NODES, _FLOOD_NODES = 6, 8
"""Identities of an attack with nodes of their own: an honest peer stores no record but that of who brings it. More than the four strangers that
count at a time; each costs the machine that all this runs on 20 MB and a process."""


def _signed(band: Band, key: Key, record: Record) -> Stored:
    packed = msgpack.packb({**record, "peer_id": key.peer_id, "time": time.time()})
    return key.signed(f"{band.run_id}.peers", packed, time.time() + 20)


async def _own_records(band: Band, strangers: Sequence[Stranger], **changes: Any) -> None:
    """Each signs and stores its own record, which nobody refuses: a peer that is about to average, and at no address where anybody answers."""
    head = await band.head()
    for stranger in strangers:
        with contextlib.suppress(Gone):
            await stranger.publish(band.run_id, band.waiting(head, **changes))


async def invented_records(band: Band) -> None:
    """Three peers every two seconds that answer nobody: of 6 that have nodes, so that their records are taken, and three more of keys alone."""
    strangers = await band.come(_INVENTED_NODES)
    spare = band.draw_keys(300)
    band.arrived()
    first = 0
    while True:
        head = await band.head()
        keys = [spare.pop() for _ in range(3)] if spare else band.draw_keys(3)
        band.keys += keys
        await strangers[0].publish_for(band.run_id, {key: band.waiting(head) for key in keys})
        await _own_records(band, [strangers[(first + number) % len(strangers)] for number in range(3)])
        first += 3
        band.stored()
        await asyncio.sleep(2)


async def record_flood(band: Band) -> None:
    """400 peers that do not exist, all at once, for as long as it lasts; 8 more have nodes, and bring 50 of the others each."""
    strangers = await band.come(_FLOOD_NODES)
    band.keys = band.draw_keys(400)
    await band.head()
    band.arrived()
    while True:
        await _own_records(band, strangers)
        head = await band.head()
        brought = [{key: band.waiting(head) for key in band.keys[number :: len(strangers)]} for number in range(len(strangers))]
        await asyncio.gather(*(stranger.publish_for(band.run_id, records) for stranger, records in zip(strangers, brought, strict=True)))
        band.stored()
        await asyncio.sleep(_RENEW_SECONDS)


async def prefix_records(band: Band) -> None:
    """Thousands of long records of one signer: our key somewhere in each subkey, and something else around it."""
    (stranger,) = await band.come()
    await band.head()
    band.arrived()
    key = stranger.key
    for number in range(3000):
        junk = band.rng.randbytes(band.rng.randint(1, 60)).hex().encode()
        subkey = band.rng.choice([junk + key.subkey, key.subkey + junk, junk + key.subkey + junk])
        value = band.rng.randbytes(band.rng.randint(1000, 4000))
        await stranger.store(key.signed(f"{band.run_id}.peers", value, time.time() + band.rng.uniform(60, 650), subkey))
        if number % 20 == 19:
            band.stored()
    await asyncio.sleep(3600)


async def junk_keys(band: Band) -> None:
    """Records under random keys, as fast as they are answered."""
    (stranger,) = await band.come()
    await band.head()
    band.arrived()
    while True:
        expires = time.time() + band.rng.uniform(300, 650)
        values = [band.rng.randbytes(band.rng.randint(2000, 4000)) for _ in range(20)]
        await stranger.store(*(stranger.key.signed(DHTID.generate(), value, expires) for value in values))
        band.stored()


async def third_party_dials(band: Band) -> None:
    """Records of peers that do not exist, at addresses of somebody who has nothing to do with it: a port where we count who knocks."""
    knocks = 0

    async def knock(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal knocks
        knocks += 1
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(100), 2)
        writer.close()

    listening = await asyncio.start_server(knock, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    stranger, *_ = strangers = await band.come(_INVENTED_NODES)
    band.keys = [Key() for _ in range(32)]
    band.arrived()

    def where(of: str) -> list[str]:
        others = [key.peer_id for key in band.rng.sample(band.keys, 5)]
        return [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}" for peer in (of, *others)]

    while True:
        head = await band.head()
        for key in band.keys:
            await stranger.store(_signed(band, key, band.waiting(head, maddrs=where(key.peer_id))))
        for one in strangers:  # their own records are taken wherever others' are refused
            await _own_records(band, [one], maddrs=where(one.peer_id))
        band.stored()
        await asyncio.sleep(2)
        say(event="figures", knocks=knocks)


async def dial_me(band: Band) -> None:
    """Five identities that ask everybody all the time whether they can be dialled, at addresses where nobody answers."""
    await band.come(5)
    band.arrived()
    asked: set[asyncio.Task] = set()
    while True:
        honest = await band.honest()
        for stranger in band.strangers:
            places = [f"/ip4/127.0.0.1/tcp/{band.rng.randint(1024, 65000)}" for _ in range(3)] + await stranger.addresses()
            asked |= {asyncio.create_task(stranger.dial_me(peer, places, 30)) for peer in honest}
        while len(asked) > 40:
            _, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.3)


async def forged_run(band: Band) -> None:
    """The run's record once more, of another model and with more samples, under the real run's id."""
    (stranger,) = await band.come()
    real = band.run
    run = {**real["run"], "model": f"/models/{band.rng.randrange(10**6)}", "model_digest": digest_bytes(band.rng.randbytes(8))}
    head = {
        "digest": digest_json(band.rng.random()),
        "round": 10**6,
        "samples": band.rng.randrange(2**40, 2**53),
        "peers": [stranger.peer_id],
    }
    record = {**real, "run": run, "server_url": "", "head": head}
    signed = stranger.key.signed(RUNS_KEY, msgpack.packb(record), time.time() + 600)
    await stranger.store(signed)
    band.arrived()
    say(event="figures", model_digest=run["model_digest"])
    await asyncio.sleep(3600)
