"""A stranger in the swarm: an identity of its own, records, frames and questions, and nobody's permission.

It speaks to the wire (libp2p streams of hivemind's p2pd, msgpack frames, the DHT's records) and keeps to none of our limits: what it
sends is what an attack puts together, so that a bound is only ever met at the other end.
"""

import asyncio
import contextlib
import json
import random
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey

from swarm.budget import Budget
from swarm.daemon import Daemon
from swarm.dht import RUNS_KEY, Identity
from swarm.dht_protocol import ASKS_AT_ONCE, ASKS_PER_SECOND
from swarm.peer_key import peer_id_of

CALL, JOIN, REDUCE = "distributed-diffusion.call.5", "distributed-diffusion.join.5", "distributed-diffusion.reduce.5"
HEAD, CHUNKS, KIND = "distributed-diffusion.head.1", "distributed-diffusion.chunks.1", "distributed-diffusion.kind.1"
CERTIFICATE = "distributed-diffusion.certificate.1"
DIAL_ME = "distributed-diffusion.dial-me.1"
_FRAME = struct.Struct("<II")
_ANSWER_SECONDS = 10.0
_EXPONENT = 65537
_STORES_PER_SECOND, _STORES_AT_ONCE = 0.75 * ASKS_PER_SECOND, ASKS_AT_ONCE // 2
"""Of one stranger: the most that is answered, and room for what it reads. A node refuses more before it looks at the record."""
Record = dict[str, Any]
"""A peer's or a run's record as it travels: a msgpack mapping."""


class Gone(Exception):
    """The other end hung up, said an error, or nothing."""


@dataclass
class Frames:
    """One stream: frames of a msgpack header and a payload, each with its length before it."""

    peer: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        packed = msgpack.packb(dict(header))
        await self.send_raw(_FRAME.pack(len(packed), len(payload)) + packed + payload)

    async def send_raw(self, data: bytes) -> None:
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError as error:
            raise Gone(repr(error)) from None

    async def send_slowly(self, header: Mapping[str, Any], payload: bytes, seconds_a_byte: float) -> None:
        """A frame that is as long as it says, and comes one byte at a time."""
        packed = msgpack.packb(dict(header))
        await self.send_raw(_FRAME.pack(len(packed), len(payload)) + packed)
        for byte in payload:
            await self.send_raw(bytes([byte]))
            await asyncio.sleep(seconds_a_byte)

    async def receive(self, seconds: float = _ANSWER_SECONDS) -> tuple[Record, bytes]:
        try:
            return await asyncio.wait_for(self._receive(), seconds)
        except (OSError, EOFError, asyncio.TimeoutError, ValueError) as error:
            raise Gone(repr(error)) from None

    async def _receive(self) -> tuple[Record, bytes]:
        header_bytes, payload_bytes = _FRAME.unpack(await self.reader.readexactly(_FRAME.size))
        header = msgpack.unpackb(await self.reader.readexactly(header_bytes))
        payload = await self.reader.readexactly(payload_bytes)
        if "error" in header:
            raise Gone(str(header["error"]))
        return header, payload

    async def swallow(self) -> None:
        """Take whatever has come, and look at none of it. Raises Gone when the other end has hung up."""
        with contextlib.suppress(asyncio.TimeoutError, OSError):
            while await asyncio.wait_for(self.reader.read(1 << 16), 0.3):
                pass
            raise Gone("hung up")

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.close()


Serves = Callable[[Frames], Awaitable[None]]


class Key:
    """A key without a node: what it signs counts as a peer's."""

    def __init__(self, private: RSAPrivateKey | None = None):
        self.private = private or _wrapped(next(_cheap_keys))
        self._signer = RSASignatureValidator(self.private)
        self.peer_id = peer_id_of(self.private.get_public_key().to_bytes())
        self.subkey = self._signer.local_public_key

    @property
    def public(self) -> str:
        """In OpenSSH's words."""
        return self.private.get_public_key().to_bytes().decode()

    def sign(self, statement: bytes) -> str:
        """As honest peers sign what is no record."""
        return self.private.sign(statement).decode()

    def signed(self, key: str | DHTID, value: bytes, expires: float, subkey: bytes | None = None) -> "Stored":
        """A record as it is stored under `key`, whose subkey names our key, if nothing else is wanted of it."""
        key_id = key if isinstance(key, DHTID) else DHTID.generate(source=key)
        dumps, subkey = DHTProtocol.serializer.dumps, subkey or self.subkey
        record = DHTRecord(key_id.to_bytes(), dumps(subkey), dumps(value), expires)
        return Stored(key_id, subkey, self._signer.sign_value(record), expires)


def _wrapped(key: rsa.RSAPrivateKey) -> RSAPrivateKey:
    private = RSAPrivateKey.__new__(RSAPrivateKey)
    private._private_key = key
    return private


def _draw_keys() -> Iterator[rsa.RSAPrivateKey]:
    """Keys of 2,048 bits, each prime in several of them: 400 cost 2 s instead of 40, and an attacker does not care that they are weak."""
    primes: list[int] = []
    while True:
        numbers = rsa.generate_private_key(public_exponent=_EXPONENT, key_size=2048).private_numbers()
        for prime in (numbers.p, numbers.q):
            for other in primes:
                if (prime * other).bit_length() == 2048:
                    yield _key_of(prime, other)
            primes.append(prime)


def _key_of(p: int, q: int) -> rsa.RSAPrivateKey:
    d = pow(_EXPONENT, -1, (p - 1) * (q - 1))
    public = rsa.RSAPublicNumbers(_EXPONENT, p * q)
    numbers = rsa.RSAPrivateNumbers(p, q, d, rsa.rsa_crt_dmp1(d, p), rsa.rsa_crt_dmq1(d, q), rsa.rsa_crt_iqmp(p, q), public)
    return numbers.private_key(unsafe_skip_rsa_key_validation=True)


_cheap_keys = _draw_keys()


@dataclass(frozen=True)
class Stored:
    key_id: DHTID
    subkey: bytes
    value: bytes
    expires: float


class Stranger:
    """One identity with a node of its own. `rng` is where every value of an attack comes from.

    membership: of the run, where the host has let it in. fellows: peer ids of the same attack, whose nodes it need not convince. asked, answered: questions to nodes to store a record, and how many had one of yes or no.
    """

    membership: Record | None = None
    fellows: Collection[str] = ()
    asked = answered = 0

    def __init__(self, daemon: Daemon, dht: DHTNode, identity: Identity, rng: random.Random):
        self._daemon, self._dht, self._identity, self.rng = daemon, dht, identity, rng
        self.p2p, self.peer_id, self.key = daemon.p2p, identity.peer_id, Key(identity.key)
        self._nodes: set[PeerID] = set()
        self._pace = Budget(_STORES_PER_SECOND, _STORES_AT_ONCE)

    @classmethod
    @contextlib.asynccontextmanager
    async def come(cls, address: str, folder: Path, rng: random.Random, name: str = "stranger") -> AsyncIterator["Stranger"]:
        """All that it knows is one peer's address."""
        identity = Identity(folder / f"{name}.key")
        places = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "dht_mode": "server", "force_reachability": "public"}
        daemon = await Daemon.start(initial_peers=[address], identity_path=str(identity.path), **places)
        try:
            dht = await DHTNode.create(
                p2p=daemon.p2p, initial_peers=[address], record_validator=RSASignatureValidator(identity.key), cache_nearest=0
            )
            yield cls(daemon, dht, identity, rng)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(dht.shutdown(), 5)
        finally:
            await daemon.close()
            identity.close()

    # ---------------------------------------------------------------- records

    async def run(self) -> Record:
        """The run's record, as a newcomer finds it."""
        while not (runs := await self._read(RUNS_KEY)):
            await asyncio.sleep(0.5)
        return next(iter(runs.values()))

    async def records(self, run_id: str) -> dict[str, Record]:
        """Everybody's but ours, by peer id."""
        found = await self._read(f"{run_id}.peers")
        return {record["peer_id"]: record for owner, record in found.items() if owner != self.peer_id and record.get("peer_id") == owner}

    async def _read(self, key: str) -> dict[str, Record]:
        """Records by the peer id of who signed them."""
        answer = await self._dht.get(key, latest=True)
        found = {}
        for subkey, item in answer.value.items() if answer is not None and isinstance(answer.value, dict) else ():
            with contextlib.suppress(ValueError, TypeError):
                found[peer_id_of(subkey[len(b"[owner:") : -1])] = msgpack.unpackb(item.value)
        return found

    async def store(self, *records: Stored) -> None:
        """At every foreign node that we ever knew, so that none is spared: hivemind forgets who does not answer.

        One record in a question, and no faster than they are answered. What is refused unread attacks nothing.
        """
        call = self._dht.protocol.call_store
        for record in records:
            while not self._pace.take():
                await asyncio.sleep(1 / _STORES_PER_SECOND)
            there = self._dht.protocol.routing_table.peer_id_to_uid
            self._nodes.update(node for node in there if node.to_base58() not in self.fellows)
            columns = [record.key_id], [record.value], [record.expires], [record.subkey]
            answers = await asyncio.gather(*(call(node, *columns) for node in self._nodes))
            self.asked += len(answers)
            self.answered += sum(answer is not None for answer in answers)

    async def publish(self, run_id: str, record: Record, key: Key | None = None, seconds: float = 20.0) -> None:
        """Sign `record` as ours, or as another key's."""
        await self.publish_for(run_id, {key or self.key: record}, seconds)

    async def publish_for(self, run_id: str, records: Mapping[Key, Record], seconds: float = 20.0) -> None:
        """Sign each record with the key beside it, and store them all."""
        now = time.time()
        own = {"membership": self.membership, "seal": ""} if self.membership else {}
        packed = {key: msgpack.packb({**record, "peer_id": key.peer_id, "time": now, **own}) for key, record in records.items()}
        await self.store(*(key.signed(f"{run_id}.peers", value, now + seconds) for key, value in packed.items()))

    async def addresses(self) -> list[str]:
        return [str(maddr) for maddr in await self.p2p.get_visible_maddrs(latest=True)]

    # ---------------------------------------------------------------- streams

    async def open(self, peer: str, name: str, seconds: float = _ANSWER_SECONDS) -> Frames:
        try:
            _, reader, writer = await asyncio.wait_for(self.p2p.call_binary_stream_handler(PeerID.from_base58(peer), name), seconds)
        except Exception as error:  # hivemind raises its own kinds
            raise Gone(repr(error)) from None
        frames = Frames(peer, reader, writer)
        if self.membership:
            await frames.send(self.membership)
        return frames

    async def ask(self, peer: str, name: str, header: Mapping[str, Any] | None = None, seconds: float = _ANSWER_SECONDS) -> Record:
        """One question, one answer."""
        frames = await self.open(peer, name, seconds)
        try:
            if header is not None:
                await frames.send(header)
            return (await frames.receive(seconds))[0]
        finally:
            frames.close()

    async def serve(self, name: str, handler: Serves) -> None:
        async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            frames = Frames(info.peer_id.to_base58(), reader, writer)
            try:
                if self.membership:
                    await frames.receive()  # the caller's
                await handler(frames)
                await asyncio.sleep(1)  # p2pd resets a stream that is closed before its last bytes have gone
            except Gone:
                pass
            finally:
                frames.close()

        await self.p2p.add_binary_stream_handler(name, handle)

    async def dial_me(self, peer: str, maddrs: Sequence[str], seconds: float) -> None:
        """Ask `peer` to try whether it can dial us; whatever it answers."""
        question = json.dumps([maddr.rsplit("/p2p/", 1)[0] for maddr in maddrs]).encode()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.p2p._client.call_unary_handler(PeerID.from_base58(peer), DIAL_ME, question), seconds)


def newest(records: Mapping[str, Record], foreign: Sequence[str] = ()) -> Record | None:
    """The record with the most samples, of who is none of `foreign` (the stranger's own identities)."""
    honest = [record for peer, record in records.items() if peer not in foreign and record["digest"]]
    return max(honest, key=lambda record: record["samples"], default=None)


def say(**values: Any) -> None:
    """A line of JSON for the harness."""
    print(json.dumps(values), flush=True)
