"""Sources that lease from a real server."""

import pytest

from peer.config import PeerConfig
from peer.contracts import SourceContext
from peer.data.client.runs import fetch_run
from peer.data.dataset_server import build
from swarm.run_config import RunConfig
from tests.identities import id_of, identity_file
from tests.peer.machine.shallow import tiny_model  # noqa: F401


@pytest.fixture
def join(tmp_path):
    """`join(url, "alice")` is a source; all are closed in the end."""
    sources = []

    def make(url, peer_id, *, batch_samples=2, cache_gib=1.0):
        run = RunConfig.from_mapping(fetch_run(url, 20).run, where=url)
        key = identity_file(tmp_path / f"{peer_id}.key", peer_id)
        peer = PeerConfig(identity_path=str(key), cache_dir=str(tmp_path / f"cache-{peer_id}"), cache_gib=cache_gib)
        context = SourceContext(run=run, url=url, peer=peer, peer_id=id_of(peer_id), batch_samples=batch_samples)
        sources.append(build(context))
        return sources[-1]

    yield make
    for source in sources:
        source.close()
