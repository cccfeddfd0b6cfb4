"""A run as the page may find it: what `Watch` takes, with peers whose names are anything but."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from swarm.page.history import History
from swarm.page.monitor import make_app
from swarm.page.watch import Watch
from swarm.protocol import LedgerTotals, PeerInfo, Progress

HOSTILE = "<img src=x onerror=alert(1)>"


def a_peer(number: int, **values: Any) -> PeerInfo:
    known = {
        "peer_id": f"QmPeer{number}",
        "round": 7,
        "samples": 14336,
        "samples_per_second": 3.5,
        "loss": 0.125,
        "phase": "train",
        "time": 1.0,
    }
    return PeerInfo(**{**known, "sent_bytes": 1_700_000_000, "received_bytes": 1_700_000_000, "transfer_seconds": 137.0, **values})


def a_run(peers: list[PeerInfo], **values: Any) -> dict[str, Any]:
    """The fields of Progress."""
    known = {
        "run_id": "0123456789abcdef", "run_name": "my cats", "round": 7, "samples": 14336, "total_samples": 65536, "target_batch_size": 2048,
        "resolution": 512, "waiting_samples": 512, "samples_per_second": sum(peer.samples_per_second for peer in peers), "loss": 0.125,
        "peers": peers, "samples_by_peer": {"QmPeer1": 10752, "QmPeer2": 3584}, "epoch": 1, "epoch_samples": 300, "dataset_samples": 1000,
        "ledger": LedgerTotals(available=1, leased=2, pending=3, counted=4), "finished": False, "server_time": time.time(),
    }  # fmt: skip
    return Progress(**{**known, **values}).model_dump()


class Scene:
    """What is to be seen now; the test changes it. An Exception is what keeps us from seeing it."""

    def __init__(self, now: dict[str, Any] | Exception | None):
        self.now = now

    async def take(self) -> dict[str, Any] | None:
        if isinstance(self.now, Exception):
            raise self.now
        return None if self.now is None else {**self.now, "server_time": time.time()}


@contextlib.asynccontextmanager
async def served(scene: Scene, history: History | None = None) -> AsyncIterator[tuple[str, Watch]]:
    """(URL, watch) of dd-monitor's application showing the scene; it looks when the test says so, and once a second."""
    watch = Watch(scene.take, history or History(None))
    runner = web.AppRunner(make_app(watch), shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", watch
    finally:
        watch.close()
        await asyncio.sleep(0)
        await runner.cleanup()
