"""Who may start to train, and who waits for what."""

import time

from peer.sync.engine.beginning import Beginning
from peer.sync.engine.state import Head
from swarm.records import PeerRecord
from swarm.run_config import RunConfig
from tests.peer.sync.swarm_tools import Clock

BASE = Head("b" * 64, 0)


def record(peer: str, **values) -> PeerRecord:
    common = {"config": "c", "schema": "s", "round": 0, "samples": 0, "digest": BASE.digest, "phase": "joining", "time": time.time()}
    return PeerRecord(peer_id=peer, **{**common, **values})


def test_nobody_starts_before_the_company_it_asks_for_and_what_becomes_of_that_does_not_matter():
    said = []
    beginning = Beginning(RunConfig(model="x"), None, (), 3, Clock())

    def may(*others):
        return beginning.may_start(BASE, own_round=0, fetching=False, others=others, news=said.append)

    assert not may() and not may(record("a"))
    assert said == ["waiting for company: 1 of 3 peers are live (--min_peers)", "waiting for company: 2 of 3 peers are live (--min_peers)"]
    assert not may(record("a"), record("helper", phase="assist"))  # which is no company to train with
    assert may(record("a"), record("b")) and said[-1] == "3 peers are live; starting"
    assert may()


def test_whoever_asks_for_no_company_starts_alone():
    beginning = Beginning(RunConfig(model="x"), None, (), 1, Clock())
    assert beginning.may_start(BASE, own_round=0, fetching=False, others=(), news=lambda text: None)


def test_a_newcomer_waits_for_a_better_state_but_not_for_ever():
    clock = Clock()
    beginning = Beginning(RunConfig(model="x"), None, (), 1, clock)
    better = record("a", samples=5, digest="a" * 64)

    def may(fetching=False):
        return beginning.may_start(BASE, own_round=0, fetching=fetching, others=[better], news=lambda text: None)

    assert not may()
    clock.now = 61.0
    assert may() and not may(fetching=True)
