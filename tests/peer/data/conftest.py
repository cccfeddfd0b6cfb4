"""Sources that lease from a real server."""

import pytest

from peer.contracts import SourceContext
from peer.data.dataset_server import build, fetch_run
from swarm.run_config import RunConfig
from tests.identities import id_of, identity_file
from tests.peer.machine.shallow import tiny_model  # noqa: F401


@pytest.fixture
def join(tmp_path):
    """`join(url, "alice")` is a source; all are closed in the end."""
    sources = []

    def make(url, peer_id, *, batch_samples=2, cache_gib=1.0):
        run = RunConfig.from_mapping(fetch_run(url, 20).run, where=url)
        cache = tmp_path / f"cache-{peer_id}"
        key = {"peer_id": id_of(peer_id), "identity_file": identity_file(tmp_path / f"{peer_id}.key", peer_id)}
        context = SourceContext(run=run, url=url, **key, cache_dir=cache, cache_gib=cache_gib, batch_samples=batch_samples)
        sources.append(build(context))
        return sources[-1]

    yield make
    for source in sources:
        source.close()
