"""Who is waited for: somebody who stayed away often is left out for a while, which grows, and ends sooner when he calls."""

import asyncio
import time

import pytest

from peer.sync.engine.neighbours import PATIENT_ATTEMPTS, Neighbours
from swarm.records import PeerRecord
from swarm.run_config import RunConfig

RUN = RunConfig(model="x", target_batch_size=40)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class OneRecord:
    """A node that knows of one other peer."""

    peer_id = "us"

    async def records(self, run_id: str) -> dict[str, PeerRecord]:
        record = PeerRecord(
            peer_id="them", config=RUN.digest, schema="schema", round=1, samples=8, digest="d", waiting_samples=8, time=time.time()
        )
        return {"them": record}


@pytest.fixture
def known():
    clock = Clock()
    neighbours = Neighbours(OneRecord(), RUN, "schema", clock)
    asyncio.run(neighbours.read())
    return neighbours, clock


def counted(neighbours: Neighbours, *callers: str) -> bool:
    return bool(neighbours.counted_upon(callers))


def test_a_peer_is_counted_upon_until_it_stayed_away_from_several_attempts(known):
    neighbours, _ = known
    for _ in range(PATIENT_ATTEMPTS):
        assert counted(neighbours)
        neighbours.missed(["them"])
    assert not counted(neighbours) and neighbours.others()


def test_the_pause_grows_with_every_absence_and_ends_when_the_peer_comes(known):
    neighbours, clock = known
    for _ in range(PATIENT_ATTEMPTS):
        neighbours.missed(["them"])
    pauses = []
    for _ in range(6):
        began = clock.now
        while not counted(neighbours):
            clock.now += 1
        pauses.append(clock.now - began)
        neighbours.missed(["them"])
    assert pauses == [10, 20, 40, 80, 120, 120]
    neighbours.came(["them"])
    assert counted(neighbours)


def test_who_calls_is_counted_upon_sooner_but_not_whenever_it_likes(known):
    neighbours, clock = known
    for _ in range(PATIENT_ATTEMPTS):
        neighbours.missed(["them"])
    clock.now += 1
    assert counted(neighbours, "them") and not counted(neighbours)
    for _ in range(4):
        neighbours.missed(["them"])
    clock.now += 15
    assert not counted(neighbours, "them")
    clock.now += 1
    assert counted(neighbours, "them")
