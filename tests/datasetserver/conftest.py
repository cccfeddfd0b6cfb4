import multiprocessing

import pytest

from swarm import workers


@pytest.fixture
def forked_decoders(monkeypatch):
    """Processes that decode are forked off one that has imported everything: a fresh interpreter takes 0.8 s of a core.

    The fresh ones of a real server are shown by tests/datasetserver/test_program.py, and their limit of memory by test_ingest_hostile.py.
    """
    monkeypatch.setattr(workers, "get_context", lambda kind: multiprocessing.get_context("forkserver"))
