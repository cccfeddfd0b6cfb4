"""How often a peer looks at the others, and what it says of itself."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from peer.sync.engine.cell import Phase
from peer.sync.engine.net.presence import Presence, read_seconds
from peer.sync.engine.round.status import seen_as
from swarm.records import PHASES, RENEW_SECONDS, HostWord, PeerRecord
from swarm.run_config import RunConfig


def test_few_are_looked_at_every_second_and_many_as_seldom_as_the_round_allows():
    assert [read_seconds(5.0, others) for others in (0, 20, 60, 100, 1000)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert [read_seconds(0.5, others) for others in (0, 60)] == [1.0, 1.0]


def test_a_record_calls_every_phase_by_a_word_that_others_accept():
    phases = list(Phase)
    said = [seen_as(phase, assists=False, paused=False) for phase in phases]
    assert said == ["joining", "train", "catching_up", "averaging", "averaging", "averaging", "done", "leaving"]
    assert {seen_as(phase, assists=True, paused=False) for phase in phases} == {"assist", "leaving"}
    assert seen_as(Phase.TRAIN, assists=False, paused=True) == "paused" and seen_as(Phase.FETCH, assists=False, paused=True) == "catching_up"
    assert {seen_as(phase, assists=assists, paused=paused) for phase in phases for assists in (0, 1) for paused in (0, 1)} <= set(PHASES)


class Saying:
    """A peer whose record says what the test wants, by a clock that the test moves. stores: whether its node's records are taken."""

    def __init__(self, target: int = 32, rate: float = 8.0):
        self.now, self.published, self.said, self.stores = 100.0, [], {"waiting_samples": 4}, True
        neighbours = SimpleNamespace(say=lambda record: None, counted_upon=list)
        status = SimpleNamespace(rate=rate, step_seconds=1.8, record=self.record)
        self.presence = Presence(RunConfig(target_batch_size=target), self, neighbours, status, None, lambda: self.now)
        self.came_by, self.addresses = [], ["/ip4/10.0.0.1/tcp/4000"]

    def record(self, maddrs=()):
        return PeerRecord(peer_id="us", config="c", schema="s", round=1, samples=8, digest="d", maddrs=maddrs, time=self.now, **self.said)

    async def maddrs(self):
        return self.addresses

    async def publish(self, run_id, record):
        self.published.append(self.now)
        return self.stores

    def looks(self, seconds: float) -> bool:
        """Whether it publishes its record when it looks again, after `seconds`."""
        before = len(self.published)
        self.now += seconds
        asyncio.run(self.presence.publish())
        return len(self.published) > before


def test_a_record_that_says_the_same_is_published_only_to_renew_it():
    saying = Saying()
    assert saying.looks(0) and not saying.looks(0.5) and not saying.looks(0.5)
    saying.said["waiting_samples"] = 6
    assert saying.looks(0.5) and not saying.looks(0.5)
    published = saying.published[-1]
    while not saying.looks(0.5):
        pass
    assert RENEW_SECONDS - 0.5 <= saying.published[-1] - published <= RENEW_SECONDS


def test_a_record_is_renewed_at_each_look_where_a_round_is_so_long_that_looks_are_as_seldom():
    saying = Saying(target=4096)
    assert saying.looks(0) and all(saying.looks(RENEW_SECONDS) for _ in range(3))


def test_a_step_that_takes_longer_than_usual_is_not_counted_as_more_than_one():
    saying = Saying()
    saying.said["samples_per_second"] = 2.0
    assert saying.looks(0) and [saying.looks(0.5) for _ in range(8)] == [False, False, False, True] * 2


@pytest.mark.parametrize("changed", ["addresses", "digest", "phase", "note"])
def test_whatever_changes_is_published_at_the_next_look(changed):
    saying = Saying()
    assert saying.looks(0)
    if changed == "addresses":
        saying.addresses = ["/ip4/10.0.0.2/tcp/4000"]
    elif changed == "digest":
        saying.record = saying.presence._status.record = lambda maddrs=(): PeerRecord(
            peer_id="us", config="c", schema="s", round=2, samples=16, digest="e", maddrs=maddrs, waiting_samples=4
        )
    else:
        saying.said[changed] = {"phase": "averaging", "note": "round 2 not averaged"}[changed]
    assert saying.looks(0.1) and not saying.looks(0.1)


def test_other_words_of_the_host_are_handed_on_with_the_next_record_and_are_no_reason_for_one():
    saying = Saying()
    assert saying.looks(0)
    saying.said["bans"] = (HostWord(about="somebody", at=1, banned=True, reason="", signature="x"),)
    assert not saying.looks(0.5)


def test_a_record_that_no_node_took_is_published_again_at_the_next_look():
    saying = Saying()
    saying.stores = False
    assert saying.looks(0) and saying.looks(0.5)
    saying.stores = True
    assert saying.looks(0.5) and not saying.looks(0.5)


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
