"""When a round is due: what the others promise for it, and what is to be expected of a trainer."""

import time

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine.state import next_state
from peer.sync.engine.trainer.messages import Progress
from tests.peer.sync.replicas import SIZE, Liar, Peer, branch, make_run


@pytest.mark.parametrize("together", [True, False])
def test_who_made_our_state_with_us_trains_on_it_before_its_record_says_so(virtual, together):
    """Seen: with rounds of half a second, and records read once a second, all rounds were twice as large as their target."""

    async def scenario(nodes):
        now, run = [time.monotonic()], make_run(target_batch_size=40)
        one, other = Peer(nodes, await nodes.node(), run, clock=lambda: now[0]), Liar(await nodes.node(), run)
        await other.say(digest=one.base.digest, round=0, samples_per_second=20.0)
        await one.replica.start()
        assert [record.peer_id for record in one.replica.neighbours.others()] == [other.node.peer_id]
        members = [Member(one.id, 1, 20), *([Member(other.node.peer_id, 1, 20)] if together else [])]
        one.replica._adopt(next_state(one.base, [[torch.ones(SIZE)]], members), "averaged")
        assert not one.replica.next_round.is_full(Progress(20, 20.0, 0.05))
        now[0] += 1.5
        assert one.replica.next_round.is_full(Progress(20, 20.0, 0.05)) is together

    virtual(scenario)


def test_a_round_is_full_at_the_end_of_a_step_that_is_nearest_to_its_target(virtual):
    """Seen: of two whose steps ended together the first began one more, for the other's last step was not in its record yet, and the
    other waited for that one in every round."""

    async def scenario(nodes):
        run = make_run(target_batch_size=40, total_samples=78)
        one, other = Peer(nodes, await nodes.node(), run), Liar(await nodes.node(), run)
        await one.replica.start()
        full, step = one.replica.next_round.is_full, 0.25  # of 10 samples
        assert not full(Progress(35, 40.0, step))  # alone it keeps nobody waiting
        await other.say(digest=one.base.digest, round=0, waiting_samples=15)
        await one.replica.neighbours.read()
        for waiting, is_full in ((19, False), (20, True)):
            assert full(Progress(waiting, 40.0, step)) is is_full
        members = [Member(one.id, 1, 20), Member(other.node.peer_id, 1, 20)]
        one.replica._adopt(next_state(one.base, [[torch.ones(SIZE)]], members), "averaged")
        await other.say(digest=one.head.digest, round=1, samples=40, waiting_samples=15)
        await one.replica.neighbours.read()
        for waiting, is_full in ((22, False), (23, True)):  # the run's last 38
            assert full(Progress(waiting, 40.0, step)) is is_full

    virtual(scenario)


def test_callers_count_until_they_are_taken_or_our_state_is_another(virtual):
    async def scenario(nodes):
        run = make_run()
        peer = Peer(nodes, await nodes.node(), run, state=branch(run, 50, 1.0), rate=0)
        due, ours = peer.replica.next_round, peer.head
        assert not due.is_called() and not due.is_called_here_or_ahead()
        due.call("QmBehind", ours.header.parents[0])
        assert not due.is_called() and not due.is_called_here_or_ahead()
        due.call("QmAhead", "a state that we do not know")
        assert not due.is_called() and due.is_called_here_or_ahead()
        due.call("QmHere", ours.digest)
        assert due.is_called()
        assert due.take_callers() == {"QmBehind", "QmAhead", "QmHere"}
        assert not due.is_called_here_or_ahead()
        following = next_state(ours, [[torch.ones(SIZE)]], [Member(peer.id, 9, 4)])
        due.call("QmHere", ours.digest)
        due.call("QmSooner", following.digest)
        peer.replica.state.set(following)
        assert due.is_called() and due.take_callers() == {"QmSooner"}

    virtual(scenario)


@pytest.mark.parametrize(
    ("progress", "age_seconds", "brings"),
    [
        (Progress(waiting=4, samples_per_second=0.0, step_seconds=1.0), 6.9, True),
        (Progress(waiting=4, samples_per_second=0.0, step_seconds=1.0), 7.1, False),  # it said nothing for two steps and 5 s
        (Progress(waiting=0, samples_per_second=8.0, step_seconds=1.0), 0.5, True),
        (Progress(waiting=0, samples_per_second=8.0, step_seconds=1.0, waits=True), 0.5, False),
        (Progress(waiting=0, samples_per_second=0.0, step_seconds=1.0), 0.5, False),
    ],
)
def test_samples_are_expected_of_a_trainer_that_steps(progress, age_seconds, brings):
    assert progress.brings_samples(age_seconds) is brings
