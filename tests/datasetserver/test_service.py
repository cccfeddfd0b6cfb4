"""What a server says of its run, of records as strangers may sign them."""

import asyncio
import time
from types import SimpleNamespace

from datasetserver.service import progress_of
from swarm.protocol import MAX_COUNT, PeerInfo
from swarm.run_config import RunConfig
from tests.datasetserver.test_book import book, clock, db  # noqa: F401 (fixtures)


def test_records_that_wait_with_more_samples_than_a_count_may_be_break_no_progress(book):  # noqa: F811
    async def call(operation):
        return operation(book)

    peers = [PeerInfo(peer_id="mallory", waiting_samples=MAX_COUNT), PeerInfo(peer_id="alice", waiting_samples=1)]
    service = SimpleNamespace(
        live_peers=lambda: peers, ledger=SimpleNamespace(call=call), run=RunConfig(model="m"), total_samples=0, wall=time.time,
        bans=SimpleNamespace(peers=dict, trusted=()), proven=SimpleNamespace(reasons=lambda wrong: {}),
        data=SimpleNamespace(manifest=SimpleNamespace(total=11)), states=SimpleNamespace(newest=lambda: None),
    )  # fmt: skip
    assert asyncio.run(progress_of(service)).waiting_samples == MAX_COUNT
