"""Asking single peers for the records that they keep, besides the nodes nearest to a key.

Whoever invents more than 20 nodes near a key has all its copies, and may hide them. Each peer that can be dialled keeps its own record
itself as well, so a look asks the peers that we know, where the nearest nodes gave nothing of theirs. A look in a swarm of up to 20
nodes asks all of them anyway: there it is not one question more.

Not promised: that two peers which have not met find each other, nor one that cannot be dialled, which keeps no record itself.
"""

import asyncio
from collections.abc import Sequence

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import ValueWithExpiration

from swarm.tasks import end_tasks

MOST_ASKED = 4
ANSWER_SECONDS = 2.0
"""A look is done every 5 s, and given up after 5 s. Who is late is not asked again for 5 s, then 10 s, and so on."""

Records = dict[bytes, ValueWithExpiration]
"""By owner, as `DHTNode.get` gives them: without their signatures, which were checked."""


async def ask(dht: DHTNode, key: DHTID, peers: Sequence[PeerID]) -> Records:
    """The newest record of each owner under `key` among those that these peers keep and give within ANSWER_SECONDS."""
    questions = {asyncio.create_task(dht._call_find_with_blacklist(peer, [key])): peer for peer in peers}
    if not questions:
        return {}
    try:
        done, late = await asyncio.wait(questions, timeout=ANSWER_SECONDS)
    finally:
        await end_tasks(*questions)
    for question in late:
        dht.blacklist.register_failure(questions[question])
    records: Records = {}
    for answer in filter(None, (question.result() for question in done)):
        kept, _ = answer[key]
        merge(records, {owner: _bare(dht, key, owner, item) for owner, item in kept.value.items()} if kept else {})
    return records


def merge(records: Records, more: Records) -> None:
    """Add to `records` what is new or newer."""
    for owner, item in more.items():
        if owner not in records or records[owner].expiration_time < item.expiration_time:
            records[owner] = item


def _bare(dht: DHTNode, key: DHTID, owner: bytes, item: ValueWithExpiration) -> ValueWithExpiration:
    record = DHTRecord(key.to_bytes(), msgpack.packb(owner), item.value, item.expiration_time)
    return ValueWithExpiration(dht.protocol.serializer.loads(dht.protocol.record_validator.strip_value(record)), item.expiration_time)
