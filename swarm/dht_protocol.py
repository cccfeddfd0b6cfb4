"""How this node answers the DHT's questions and reads its answers: hivemind's protocol, with bounds for what strangers send.

A peer stores its own records and nobody else's. hivemind hands all that a node has on to every node it meets; ours need not: peers renew
their records every 5 s, at the nodes that are nearest by then, and their run's every minute.
"""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Collection, Coroutine, Iterator
from typing import Any

import hivemind.dht.node
import msgpack
from hivemind.dht import protocol
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

from swarm.budget import Budgets
from swarm.dht_rules import signer_of
from swarm.dht_storage import BYTES_OF_A_KEY, MOST_OF_A_KEY, RecordStore

log = logging.getLogger(__name__)

ASKS_PER_SECOND, ASKS_AT_ONCE = 64.0, 128
"""Questions of one peer that are answered, and that it is asked. An honest one asks every node some three times a second, in rounds of
0.4 s some twenty times; who is refused takes this node for gone for 5 s, so the bound is well above that."""
_MOST_ASKED = 1
"""Keys or records in one question; ours have one. An answer with four full keys is above the 4 MiB that travel, and hivemind kept each."""
_LARGEST_ANSWER = BYTES_OF_A_KEY + (64 << 10)
_MOST_BAD = 8
"""Records in an answer that do not pass, before the rest of it is not looked at: verifying 512 takes 20 ms."""
_ID_BYTES, _MAX_PEER_ID_BYTES = 20, 64
_RENAMINGS_PER_SECOND = 1 / 60
"""A peer has a new node id when it starts again."""
_MOST_CLAIMED = 4096
_DICTIONARY = 0x50


_REFUSALS: contextvars.ContextVar[list[ValidationError] | None] = contextvars.ContextVar("refusals", default=None)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Where nobody answers a ping within it as it should, hivemind's RuntimeError becomes what one of them said instead: a ValidationError."""
    token = _REFUSALS.set(found := [])
    try:
        yield
    except RuntimeError:
        if found:
            raise found[0] from None
        raise
    finally:
        _REFUSALS.reset(token)


def _is_node_id(data: bytes) -> bool:
    """'' for who has none."""
    return len(data) in (0, _ID_BYTES)


class DHTProtocol(protocol.DHTProtocol):
    """Named like hivemind's, since the name is on the wire."""

    @classmethod
    async def create(cls, *args: Any, **options: Any) -> "DHTProtocol":
        self = await super().create(*args, **options)
        self.storage = RecordStore()
        return self

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._served, self._asked = (Budgets(ASKS_PER_SECOND, ASKS_AT_ONCE) for _ in range(2))
        self._pinged = Budgets(ASKS_PER_SECOND, ASKS_AT_ONCE)
        self._renamed = Budgets(_RENAMINGS_PER_SECOND, 2)
        self._claimed: dict[PeerID, DHTID] = {}
        self._watched: list[tuple[DHTID, set[PeerID]]] = []
        self._begun: set[asyncio.Task] = set()

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Keep records of the caller itself."""
        self._serve(context.remote_id, request)
        columns = (request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache)
        if len({len(column) for column in columns}) != 1:
            raise ValueError("a question that is not aligned")
        self._begin(super().rpc_ping(dht_pb2.PingRequest(peer=request.peer), context))
        caller = context.remote_id.to_base58()
        kept = [not in_cache and self._keep(caller, *record) for *record, in_cache in zip(*columns, strict=True)]
        return dht_pb2.StoreResponse(store_ok=kept, peer=self.node_info)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        self._serve(context.remote_id, request)
        return await super().rpc_find(request, context)

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """Who wants us to look whether we reach it costs us 3 s of a call, and where it asks too often gets no more than our name."""
        if not _is_node_id(request.peer.node_id) or not self._pinged.take(context.remote_id):
            return dht_pb2.PingResponse(peer=self.node_info, dht_time=get_dht_time(), available=False)
        return await super().rpc_ping(request, context)

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        """As hivemind's, but who answers with a wrong time, or a name that is none, has not answered: one such keeps nobody out of a swarm.

        What it said is kept, for when nobody answers better (`refusals`).
        """
        try:
            return await super().call_ping(peer, validate, strict)
        except (ValidationError, AssertionError, ValueError, OverflowError) as error:
            log.debug("%s answers a ping wrongly: %r", peer, error)
            if isinstance(error, ValidationError) and (found := _REFUSALS.get()) is not None:
                found.append(error)
            return None

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> dict[DHTID, tuple[Any, dict[DHTID, PeerID]]] | None:
        """Ask `peer` for records and for nodes nearer to them; None when it does not answer, or not as it should.

        A peer is asked a bounded number of times: two that name each other under ever new ids would keep a search going for ever.
        """
        keys = list(keys)
        if not self._asked.take(peer):
            return None
        try:
            request = dht_pb2.FindRequest(keys=list(map(DHTID.to_bytes, keys)), peer=self.node_info)
            async with self.rpc_semaphore:
                response = await self.get_stub(peer).rpc_find(request, timeout=self.wait_timeout)
            if response.peer.node_id:
                self._begin(self.update_routing_table(DHTID.from_bytes(response.peer.node_id), peer, responded=True))
            pairs = zip(keys, response.results, strict=True)
            answer = {key: (self._records_in(key, result), self._nodes_in(result)) for key, result in pairs}
            for key, answered in self._watched:
                if key in answer:
                    answered.add(peer)
            return answer
        except Exception as error:  # hivemind raises its own kinds, and msgpack others
            log.debug("%s does not answer as it should: %r", peer, error)
            self._begin(self.update_routing_table(self.routing_table.get(peer_id=peer), peer, responded=False))
            return None

    @contextlib.contextmanager
    def watching(self, key: DHTID) -> Iterator[set[PeerID]]:
        """The peers that answer a question about `key` within it."""
        watch: tuple[DHTID, set[PeerID]] = (key, set())
        self._watched.append(watch)
        try:
            yield watch[1]
        finally:
            self._watched = [other for other in self._watched if other is not watch]

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """One id for each peer, its last one, and one peer for each id: neither takes the places of others in the table."""
        table = self.routing_table
        before = table.get(peer_id=peer_id)
        if not responded:
            if before is not None:
                del table[before]
            return
        if node_id is None or table.get(node_id=node_id, default=peer_id) != peer_id:
            return
        if before not in (None, node_id):
            if not self._renamed.take(peer_id):
                return
            del table[before]
        if (stale := table.add_or_update_node(node_id, peer_id)) is not None:
            self._begin(self.call_ping(stale[1]))
        bucket = table.buckets[table.get_bucket_index(node_id)]
        for spare in list(bucket.replacement_nodes)[: -table.bucket_size]:
            del table[spare]

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)

    def _serve(self, caller: PeerID, request: dht_pb2.StoreRequest | dht_pb2.FindRequest) -> None:
        """Raises ValueError for a question that is not answered."""
        if not self._served.take(caller):
            raise ValueError("too many questions")
        if len(request.keys) > _MOST_ASKED or any(len(key) != _ID_BYTES for key in request.keys):
            raise ValueError("too long a question")
        if not _is_node_id(request.peer.node_id):
            raise ValueError("a node of no name")

    def _keep(self, caller: str, key: bytes, subkey: bytes, value: bytes, expiration_time: float) -> bool:
        try:
            if signer_of(subkey) != caller:
                return False
        except ValueError:
            return False
        if not self._validate_record(key, subkey, value, expiration_time):
            return False
        return self.storage.store_subkey(DHTID.from_bytes(key), msgpack.unpackb(subkey), value, expiration_time)

    def _records_in(self, key: DHTID, result: dht_pb2.FindResult) -> ValueWithExpiration | None:
        """The records of an answer that are what they should be. Raises ValueError, msgpack's errors.

        Taken apart here: hivemind lets the answer say when it is over (a search ends with the first that says never) and how
        long its dictionary may be, and one bad record spoils the good ones.
        """
        if result.type != dht_pb2.FOUND_DICTIONARY:
            return None
        if len(result.value) > _LARGEST_ANSWER:
            raise ValueError(f"an answer of {len(result.value)} bytes")
        packed = msgpack.unpackb(result.value)
        if not isinstance(packed, msgpack.ExtType) or packed.code != _DICTIONARY:
            raise ValueError("an answer that is not a dictionary")
        _, _, items = msgpack.unpackb(packed.data)
        found, bad = DictionaryDHTValue(), 0
        for owner, value, expiration_time in items[:MOST_OF_A_KEY]:
            typed = isinstance(owner, bytes) and isinstance(value, bytes) and isinstance(expiration_time, float)
            if typed and self._validate_record(key.to_bytes(), msgpack.packb(owner), value, expiration_time):
                found.store(owner, value, expiration_time)
            elif (bad := bad + 1) >= _MOST_BAD:
                break
        return ValueWithExpiration(found, found.latest_expiration_time) if len(found) else None

    def _nodes_in(self, result: dht_pb2.FindResult) -> dict[DHTID, PeerID]:
        """The nodes that an answer names, each peer under one id.

        One peer under many ids, all nearest to a key, would be given all copies of its records.
        """
        nodes: dict[DHTID, PeerID] = {}
        for node_bytes, peer_bytes in zip(result.nearest_node_ids[: self.bucket_size], result.nearest_peer_ids, strict=False):
            if len(node_bytes) == _ID_BYTES and len(peer_bytes) <= _MAX_PEER_ID_BYTES:
                node_id, peer = DHTID.from_bytes(node_bytes), PeerID(peer_bytes)
                if peer != self.p2p.peer_id and node_id == self._id_of(peer, node_id):
                    nodes[node_id] = peer
        return nodes

    def _id_of(self, peer: PeerID, claimed: DHTID) -> DHTID:
        """The node id that `peer` has told us, or else the first that another claimed for it."""
        while len(self._claimed) >= _MOST_CLAIMED:
            del self._claimed[next(iter(self._claimed))]
        return self.routing_table.get(peer_id=peer) or self._claimed.setdefault(peer, claimed)


# DHTNode.create takes its protocol by this name, and no other way.
hivemind.dht.node.DHTProtocol = DHTProtocol
