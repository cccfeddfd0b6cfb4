"""A short visit to the swarm under a passing identity: whether its DHT takes us in, who is there, whether others can dial us, how fast they are."""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from peer.config import PeerConfig
from peer.launch.joining import Joined
from peer.launch.membership import visitor
from peer.launch.resolving import token_for
from peer.sync.engine.net.link import Speed, measure_link
from peer.sync.engine.net.streams import PeerLost, Streams
from swarm.dht import SwarmNode
from swarm.errors import UserError

_ANSWER_SECONDS = 10.0
_ASKED = 3


@dataclass
class Visit:
    """error: why we did not come in. why: why no link was measured."""

    error: UserError | None = None
    peers: int = 0
    client_mode: bool = False
    reachability: str = ""
    speed: Speed | None = None
    why: str = ""


def visit(joined: Joined, peer: PeerConfig, scratch: Path, join_seconds: float) -> Visit:
    return asyncio.run(_visit(joined, peer, scratch, join_seconds))


async def _visit(joined: Joined, peer: PeerConfig, scratch: Path, join_seconds: float) -> Visit:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # hivemind's tasks that p2pd's end leaves behind
    try:
        node = await SwarmNode.join(
            initial_peers=joined.initial_peers,
            host_maddrs=peer.host_maddrs,
            announce_maddrs=peer.announce_maddrs,
            identity_path=scratch / "visitor.key",
            client_mode=peer.client_mode,
            deadline_seconds=join_seconds,
        )
    except UserError as error:
        return Visit(error, why=error.message)
    try:
        found = Visit(client_mode=node.client_mode, reachability=node.reachability)
        try:
            members = await asyncio.to_thread(visitor, joined, scratch / "visitor.key", token_for(joined.server_url, peer))
        except UserError as error:
            return Visit(error, why=error.message, client_mode=node.client_mode, reachability=node.reachability)
        node.admit(members)
        with contextlib.suppress(Exception):  # hivemind raises its own kinds; then nobody is known to be there
            records = await asyncio.wait_for(node.records(joined.run.run_id), _ANSWER_SECONDS)
            found.peers = len(records)
            streams = Streams(node, members=members)
            for record in sorted(records.values(), key=lambda record: record.client_mode)[:_ASKED]:
                try:
                    found.speed = await measure_link(streams, record.peer_id)
                    break
                except PeerLost as lost:
                    found.why = str(lost)
        return found
    finally:
        await node.close()
