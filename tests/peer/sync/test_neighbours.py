"""Who is waited for: somebody who stayed away often is left out for a while, which grows, and ends sooner when he calls. And who has a double."""

import asyncio
import math
import random
import time
from types import SimpleNamespace

import pytest

from peer.sync.engine.net import neighbours
from peer.sync.engine.net.neighbours import PATIENT_ATTEMPTS, UNREAD_PATIENCE_SECONDS, Neighbours
from peer.sync.engine.net.presence import Presence
from swarm.errors import UserError
from swarm.records import RECORD_LIFE_SECONDS, PeerRecord
from swarm.run_config import RunConfig
from swarm.version import VERSION
from tests.clock import Clock
from tests.peer.sync.replicas import Peer, make_run
from tests.peer.sync.swarm_tools import until

RUN = RunConfig(model="x", target_batch_size=40)


def record_of(peer: str, at: float) -> PeerRecord:
    return PeerRecord(peer_id=peer, config=RUN.digest, schema="schema", round=1, samples=8, digest="d", waiting_samples=8, time=at)


class OneRecord:
    """A node that knows of one other peer."""

    peer_id, unread = "us", frozenset()

    async def records(self, run_id: str) -> dict[str, PeerRecord]:
        return {"them": record_of("them", time.time())}


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


def test_who_reads_records_of_its_own_that_it_never_wrote_has_a_double(known):
    """Seen in the code: of two peers with one identity each takes the other's contributions for its own, and its own work for done."""
    neighbours, clock = known
    ours = record_of("us", 5000.0)
    neighbours.say(ours)

    def reads(record: PeerRecord) -> bool:
        async def records(run_id: str) -> dict[str, PeerRecord]:
            return {"us": record}

        neighbours._node.records = records
        asyncio.run(neighbours.read())
        return neighbours.doubled

    assert not reads(record_of("us", 4000.0)) and not reads(record_of("us", 4001.0))  # of the process before this one
    clock.now += 25.0
    assert not reads(ours)
    assert not reads(record_of("us", 6000.0)) and not reads(ours)  # a process that was stopped, and left when it was let go
    assert not reads(record_of("us", 6000.0))
    assert reads(record_of("us", 6001.0))


def test_who_reads_no_news_gives_out_the_list_that_it_gave_out_before(known):
    """What others make of it, they keep for as long as it is the same one."""
    neighbours, clock = known
    records = {"them": record_of("them", 1.0), "you": record_of("you", 1.0)}

    async def read(run_id: str) -> dict[str, PeerRecord]:
        return records

    def others_after(seconds: float):
        clock.now += seconds
        asyncio.run(neighbours.read())
        return neighbours.others()

    neighbours._node.records = read
    before = others_after(1.0)
    assert others_after(1.0) is before and neighbours.knows("you")
    records = records | {"you": record_of("you", 2.0)}
    renewed = others_after(1.0)
    assert renewed is not before and renewed[1].time == 2.0
    records = {"them": records["them"]}
    assert others_after(RECORD_LIFE_SECONDS - 1) is renewed and [record.peer_id for record in others_after(2.0)] == ["them"]


def test_who_stands_on_what_the_host_discarded_is_none_of_the_others_and_is_known_to_start_again(known):
    neighbours, _ = known
    before = {record.peer_id for record in neighbours.others()}
    assert before and not neighbours.starting_again
    neighbours.members.bans.discards = lambda digest, parents: True
    asyncio.run(neighbours.read())
    assert not neighbours.others() and neighbours.starting_again == before
    del neighbours.members.bans.discards
    asyncio.run(neighbours.read())
    assert {record.peer_id for record in neighbours.others()} == before and not neighbours.starting_again


def only_ourselves(neighbours: Neighbours, clock: Clock) -> None:
    """The others' records are gone, and ours comes back."""

    async def records(run_id: str) -> dict[str, PeerRecord]:
        return {"us": record_of("us", 5000.0)}

    clock.now += 2 * RECORD_LIFE_SECONDS
    neighbours._node.records = records
    asyncio.run(neighbours.read())


def test_who_sees_only_records_that_it_cannot_read_is_not_alone_and_says_so(known, caplog):
    neighbours, clock = known
    only_ourselves(neighbours, clock)
    assert neighbours.alone()
    neighbours._node.unread = frozenset({"newer", "newest"})
    assert not neighbours.alone() and not neighbours.alone()
    assert caplog.text.count(f"2 live peers of this run sign records that this program ({VERSION}) cannot read") == 1
    neighbours._node.unread = frozenset()
    assert neighbours.alone()


def test_junk_under_the_runs_key_keeps_a_peer_from_going_on_alone_for_ten_minutes_once(known):
    neighbours, clock = known
    only_ourselves(neighbours, clock)
    rng, held = random.Random(19), 0.0
    for _ in range(400):  # whenever the stranger likes, under as many names as it likes
        neighbours._node.unread = frozenset(f"{rng.getrandbits(64):x}" for _ in range(rng.randrange(4)))
        seconds = rng.uniform(1, 30)
        held += seconds * (not neighbours.alone())
        clock.now += seconds
        asyncio.run(neighbours.read())
    assert 0 < held <= UNREAD_PATIENCE_SECONDS + 30
    neighbours._node.unread = frozenset({"another"})
    assert neighbours.alone()


def test_a_newcomer_gives_way_to_its_double_and_who_was_there_first_is_told(known, caplog):
    neighbours, clock = known
    newcomer, first = (
        Presence(RUN, neighbours._node, neighbours, status=None, bell=None, clock=clock)
        for _ in range(2)
    )
    with pytest.raises(UserError, match=r"has this one's identity \(us\)[^.]*\. Delete identity\.key in this --output_dir"):
        newcomer._refuse_our_double()
    clock.now += 121.0
    first._refuse_our_double()
    first._refuse_our_double()
    assert caplog.text.count("It will give way") == 1


@pytest.mark.slow
def test_of_two_with_one_identity_the_newcomer_gives_way_and_the_other_goes_on(swarm, monkeypatch, caplog):
    """As when a machine is cloned on which a peer had run."""
    monkeypatch.setattr(neighbours, "_PREDECESSOR_SECONDS", 3.0)

    async def scenario(nodes):
        run = make_run()
        one, two = [await Peer(nodes, await nodes.node(own=own), run).start(nodes) for own in (False, True)]
        await until(lambda: min(len(one.rounds()), len(two.rounds())) >= 2)
        two.replica._presence._began = -math.inf  # no newcomer, however fast this goes
        elsewhere = SimpleNamespace(**{**vars(nodes), "folder": nodes.folder / "elsewhere"}, ends_with_the_test=nodes.ends_with_the_test)
        copy = Peer(elsewhere, await nodes.node(double=two.node), run)
        copy.replica.neighbours._started = math.inf  # it does not look yet: else it might be gone before the other has noticed
        await copy.start(elsewhere)
        assert copy.id == two.id
        await until(lambda: "It will give way" in caplog.text)
        copy.replica.neighbours._started = -math.inf
        await until(lambda: copy.failures)
        assert isinstance(copy.failures[0], UserError) and "has this one's identity" in copy.failures[0].message
        await copy.stop()
        at = two.head.header.round
        await until(lambda: any(line["how"] == "averaged" and line["round"] > at + 1 for line in two.rounds()))
        assert not one.failures and not two.failures

    swarm(scenario)
