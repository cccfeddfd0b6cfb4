"""The newest state of a run, fetched from those who hold it by one who trains nothing and stays no longer than that takes."""

import asyncio
import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from peer.config import PeerConfig
from peer.data.client.probing import download_state
from peer.data.client.transport import Refusal, ServerAway
from peer.launch.joining import Joined
from peer.launch.membership import visitor
from peer.launch.resolving import resolve_run
from peer.rooms import load_part
from peer.sync.engine.first_state import FirstState
from peer.sync.engine.transfer.disk import StateStore
from swarm.dht import SwarmNode
from swarm.errors import UserError
from swarm.run.strategy import swarms
from swarm.run_config import RunConfig
from swarm.runs import named_in

log = logging.getLogger(__name__)


def fetch_state(
    place: str, folder: Path, *, token: str = "", host_key: str = "", seconds: float, look: Callable[[RunConfig], object] = lambda run: None
) -> Path:
    """The file of the newest state of the run at `place` (URL or multiaddr), with what run it is of beside it.

    That is the one that the server keeps, or the peer at this multiaddr signs, or the server knows of; failing these, most live peers sign it.
    It is checked against its digest, chunk by chunk. look: told the run before anything large is fetched; may raise. Raises UserError.
    """
    where = {"peers": (place,)} if place.startswith("/") else {"datasetserver": place, "token": token}
    # dry_run: nothing of the host is remembered in a folder that is gone soon; assist: it needs neither data nor model to take part.
    peer = PeerConfig(output_dir=str(folder), host_key=host_key, dry_run=True, assist=True, **where)
    joined = resolve_run(peer, {})
    if not swarms(joined.run.sync):
        raise UserError(
            f"The run '{joined.run.run_name}' has --sync none: its peers share no state.", fix="Ask one of them for its result."
        )
    look(joined.run)
    about = joined.about()
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    token = token if joined.server_url == place else ""
    if kept := _of_server(joined.server_url, folder, token):
        return kept
    return asyncio.run(_fetch(joined, token, named_in(peer.peers), folder, seconds))


def _of_server(url: str, folder: Path, token: str) -> Path | None:
    """The state that the host's server keeps; None where it keeps none, or does not give it."""
    if not url:
        return None
    try:
        path = download_state(url, folder / "fetched", token)
    except (ServerAway, Refusal) as fault:
        log.warning("the server does not give the state that it keeps: %s", fault)
        return None
    if path:
        log.info("fetched the state that the server keeps: %s", path.name)
    return path


async def _fetch(joined: Joined, token: str, named: Collection[str], folder: Path, seconds: float) -> Path:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # hivemind's tasks that p2pd's end leaves behind
    run, identity = joined.run, folder / "visitor.key"
    node = await SwarmNode.join(
        initial_peers=joined.initial_peers, identity_path=identity, client_mode=True, deadline_seconds=min(seconds, 60)
    )
    try:
        strategy, known = load_part("sync", run.sync).strategy(run), (joined.last_known or {}).get("digest", "")
        members = await asyncio.to_thread(visitor, joined, identity, token)
        node.admit(members)
        state = await FirstState(run, strategy, node, members, named=named, known=known).within(seconds)
    finally:
        await node.close()
    log.info("fetched round=%d samples=%d state=%s", state.header.round, state.header.samples, state.digest[:8])
    return StateStore(folder / "fetched").save(state)
