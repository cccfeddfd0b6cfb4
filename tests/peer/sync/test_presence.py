"""How often a peer looks at the others, and what it says of itself."""

import asyncio
import logging

from peer.sync.engine.cell import Phase
from peer.sync.engine.net.presence import Presence, read_seconds
from peer.sync.engine.round.status import seen_as
from swarm.records import PHASES
from swarm.run_config import RunConfig


def test_few_are_looked_at_every_second_and_many_as_seldom_as_the_round_allows():
    assert [read_seconds(5.0, others) for others in (0, 20, 60, 100, 1000)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert [read_seconds(0.5, others) for others in (0, 60)] == [0.5, 0.5]


def test_a_record_calls_every_phase_by_a_word_that_others_accept():
    phases = list(Phase)
    said = [seen_as(phase, assists=False, paused=False) for phase in phases]
    assert said == ["joining", "train", "catching_up", "averaging", "averaging", "averaging", "done", "leaving"]
    assert {seen_as(phase, assists=True, paused=False) for phase in phases} == {"assist", "leaving"}
    assert seen_as(Phase.TRAIN, assists=False, paused=True) == "paused" and seen_as(Phase.FETCH, assists=False, paused=True) == "catching_up"
    assert {seen_as(phase, assists=assists, paused=paused) for phase in phases for assists in (0, 1) for paused in (0, 1)} <= set(PHASES)


def test_why_nobody_sees_this_peer_is_in_the_log_once_and_again_after_some_minutes(caplog):
    class Deaf:
        async def maddrs(self):
            raise ConnectionError("p2pd does not answer")

    presence = Presence(RunConfig(), Deaf(), None, None, None)

    async def publish(times):
        for _ in range(times):
            await presence.publish()

    with caplog.at_level(logging.WARNING, logger="peer.sync.engine.net.presence"):
        asyncio.run(publish(59))
        assert caplog.messages == ["could not publish this peer's record: ConnectionError('p2pd does not answer')"]
        asyncio.run(publish(1))
        assert len(caplog.messages) == 2
