"""Finding a run when all one knows is the address of a peer: a short visit to the DHT, as a client, under a passing identity."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from swarm.dht import SwarmNode
from swarm.errors import ExitCode, UserError
from swarm.records import RunRecord

FIND_SECONDS = 30.0
_LOOK_AGAIN_SECONDS = 2.0


def find_run(peers: Sequence[str], *, run_id: str = "", seconds: float = FIND_SECONDS) -> RunRecord | None:
    """The run that the DHT behind `peers` serves, with its newest head; None when there is none after `seconds`.

    Raises UserError when none of `peers` answers, or when there are several runs and `run_id` does not say which.
    """
    found = asyncio.run(_find(peers, run_id, seconds))
    names = sorted({record.run_id for record in found})
    if len(names) > 1:
        raise UserError(f"These peers serve {len(names)} runs: {', '.join(names)}.", fix="Say which with --run_id.", code=ExitCode.CONFIG)
    return newest(found)


def newest(records: Sequence[RunRecord]) -> RunRecord | None:
    """Of several peers' descriptions of one run, the one whose head has the most samples."""
    return max(records, key=lambda record: (record.head or {"samples": 0})["samples"], default=None)


async def _find(peers: Sequence[str], run_id: str, seconds: float) -> list[RunRecord]:
    with tempfile.TemporaryDirectory(prefix="dd-visitor-") as folder:
        node = await SwarmNode.join(
            initial_peers=peers, identity_path=Path(folder) / "identity.key", client_mode=True, deadline_seconds=seconds
        )
        try:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + seconds
            while True:
                found = [record for record in await node.find_runs() if run_id in ("", record.run_id)]
                if found or loop.time() + _LOOK_AGAIN_SECONDS > deadline:
                    return found
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        finally:
            await node.close()
