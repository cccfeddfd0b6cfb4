"""Finding a run when all one knows is the address of a peer: a short visit to the DHT, as a client, under a passing identity."""

import asyncio
from collections.abc import Sequence

from swarm import sockets
from swarm.dht import SwarmNode
from swarm.runs import FoundRun, choose, genuine, named_in, several

FIND_SECONDS = 30.0
_LOOK_AGAIN_SECONDS = 2.0
_PATIENCE_SECONDS = 6.0
"""How long the record of the named peers may still be on its way. Until then a run that only other peers tell of is not taken for theirs."""


def find_run(peers: Sequence[str], *, run_id: str = "", seconds: float = FIND_SECONDS) -> FoundRun | None:
    """The run that the DHT behind `peers` serves; None when there is none after `seconds`.

    Raises UserError when none of `peers` answers, or when there are several runs and neither `run_id` nor `peers` say which.
    """
    return asyncio.run(_find(peers, run_id, seconds))


async def _find(peers: Sequence[str], run_id: str, seconds: float) -> FoundRun | None:
    folder = sockets.make_folder()  # swept away by the next program if this one is ended at once
    try:
        node = await SwarmNode.join(initial_peers=peers, identity_path=folder / "identity.key", client_mode=True, deadline_seconds=seconds)
        try:
            runs = await _look(node, peers, run_id, seconds)
            if len(runs) > 1:
                raise several(runs, {found.run.run_id: len(await node.records(found.run.run_id)) for found in runs})
            return runs[0] if runs else None
        finally:
            await node.close()
    finally:
        sockets.remove_folder(folder)


async def _look(node: SwarmNode, peers: Sequence[str], run_id: str, seconds: float) -> list[FoundRun]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        runs = choose(genuine(await node.find_runs(), named_in(peers)), run_id)
        if any(found.vouched for found in runs) or (runs and loop.time() - began >= _PATIENCE_SECONDS):
            return runs
        if loop.time() + _LOOK_AGAIN_SECONDS > began + seconds:
            return runs
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)
