"""Strangers that write into the DHT what they like, and ask for what costs more to answer than to ask."""

import asyncio
import contextlib
import time

import msgpack
from hivemind.dht.routing import DHTID

from scripts.attacks.band import Band
from scripts.attacks.wire import RUNS_KEY, Key, Record, Stored, say
from swarm.digest import digest_bytes, digest_json

_RENEW_SECONDS = 8.0


def _signed(band: Band, key: Key, record: Record) -> Stored:
    packed = msgpack.packb({**record, "peer_id": key.peer_id, "time": time.time()})
    return key.signed(f"{band.run_id}.peers", packed, time.time() + 20)


async def invented_records(band: Band) -> None:
    """Three peers that do not exist, every two seconds three others."""
    (stranger,) = await band.come()
    spare = [Key() for _ in range(300)]
    band.arrived()
    while True:
        head = await band.head()
        keys = [spare.pop() if spare else Key() for _ in range(3)]
        band.keys += keys
        await stranger.store(*(_signed(band, key, band.waiting(head)) for key in keys))
        await asyncio.sleep(2)


async def record_flood(band: Band) -> None:
    """400 peers that do not exist, all at once, for as long as it lasts."""
    (stranger,) = await band.come()
    band.keys = [Key() for _ in range(400)]
    await band.head()
    band.arrived()
    while True:
        head = await band.head()
        for at in range(0, len(band.keys), 50):
            await stranger.store(*(_signed(band, key, band.waiting(head)) for key in band.keys[at : at + 50]))
        await asyncio.sleep(_RENEW_SECONDS)


async def prefix_records(band: Band) -> None:
    """Thousands of long records of one signer: our key somewhere in each subkey, and something else around it."""
    (stranger,) = await band.come()
    await band.head()
    band.arrived()
    number, key = 0, stranger.key
    while number < 3000:
        batch = []
        for _ in range(20):
            number, junk = number + 1, band.rng.randbytes(band.rng.randint(1, 60)).hex().encode()
            subkey = band.rng.choice([junk + key.subkey, key.subkey + junk, junk + key.subkey + junk])
            value = band.rng.randbytes(band.rng.randint(1000, 4000))
            batch.append(key.signed(f"{band.run_id}.peers", value, time.time() + band.rng.uniform(60, 650), subkey))
        stored = await stranger.store(*batch)
        if not any(stored):
            await asyncio.sleep(0.5)
    await asyncio.sleep(3600)


async def junk_keys(band: Band) -> None:
    """Records under random keys, as fast as they are taken."""
    (stranger,) = await band.come()
    await band.head()
    band.arrived()
    while True:
        expires = time.time() + band.rng.uniform(300, 650)
        batch = [stranger.key.signed(DHTID.generate(), band.rng.randbytes(band.rng.randint(2000, 4000)), expires) for _ in range(100)]
        if not any(await stranger.store(*batch)):
            await asyncio.sleep(0.5)


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
    (stranger,) = await band.come()
    band.keys = [Key() for _ in range(32)]
    head = await band.head()
    band.arrived()
    # Our own record, too: that one we may sign wherever others' are refused.
    for key in (*band.keys, stranger.key):
        where = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{other.peer_id}" for other in (key, *band.rng.sample(band.keys, 5))]
        await stranger.store(_signed(band, key, band.waiting(head, maddrs=where)))
    while True:
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
