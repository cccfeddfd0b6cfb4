"""Who is in a hurry: how often a round begins before its samples are there."""

import asyncio

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine.round import span
from peer.sync.engine.state import Head, State, next_state
from peer.sync.engine.trainer.messages import Progress
from swarm.end import End
from tests.peer.sync.replicas import SIZE, Liar, Peer, make_run, peers
from tests.peer.sync.swarm_tools import until

SECONDS = 600.0
TARGET = 120


async def call_after_each_step(liar: Peer) -> None:
    """It says to all others, ten times a second, that it is ready to average onto the state that it has."""
    while True:
        await asyncio.sleep(0.1)
        calls = liar.replica.rounds.matchmaker._calls
        await asyncio.gather(*(calls._call(record.peer_id, "") for record in liar.replica.neighbours.others()))


@pytest.mark.parametrize("liars", [1, 2])
def test_those_that_call_after_each_step_make_few_rounds_small(virtual, liars):
    """Before, every round: 36 samples of 120 on average."""

    async def scenario(nodes):
        found = await peers(nodes, 5, make_run(target_batch_size=TARGET))
        await until(lambda: all(len(peer.replica.met) == 4 for peer in found), SECONDS)
        hurry = [asyncio.create_task(call_after_each_step(peer)) for peer in found[:liars]]
        at = max(peer.head.header.round for peer in found)
        await until(lambda: min(peer.head.header.round for peer in found[liars:]) >= at + 40, SECONDS)
        for task in hurry:
            task.cancel()
        lines = {line["digest"]: line for peer in found for line in peer.rounds()}
        made = [sum(samples for *_, samples in line["members"]) for line in lines.values() if at < line["round"] <= at + 40]
        # As much as half of it may be missing to the nearest step of each: an estimate, for others' records are a second old.
        assert sum(samples < 0.4 * TARGET for samples in made) <= len(made) / 3 and sum(made) / len(made) > TARGET / 2

    virtual(scenario)


def after(state: State, samples: int) -> State:
    return next_state(state, [[torch.ones(SIZE)]], [Member("ann", state.header.round + 1, samples)])


def test_a_round_is_early_with_less_than_half_and_four_rounds_later_forgotten(virtual):
    async def scenario(nodes):
        run = make_run(target_batch_size=TARGET)
        state, end = Peer(nodes, await nodes.node(), run).base, End(run)
        said = []
        for samples in (60, 59, 120, 120, 120, 120):
            state = after(state, samples)
            said.append(span.began_early(run, end, state.header))
        assert said == [False, True, True, True, True, False]

    virtual(scenario)


def test_after_an_early_round_nobody_is_called_before_half_is_here_and_no_promise_counts_beyond_what_its_owner_brings(virtual):
    async def scenario(nodes):
        run = make_run(target_batch_size=TARGET)
        one, other = Peer(nodes, await nodes.node(), run, rate=0), Liar(await nodes.node(), run)
        await one.replica.start()
        due = one.replica.next_round
        early = next_state(one.base, [[torch.ones(SIZE)]], [Member(one.id, 1, 10), Member(other.node.peer_id, 1, 4)])
        for state, too_early in ((one.base, False), (early, True)):
            if state is early:
                one.replica._adopt(state, "averaged")
            await other.say(digest=state.digest, round=state.header.round, samples=state.header.samples, waiting_samples=TARGET)
            await one.replica.neighbours.read()
            assert due.is_full(Progress(10, 0.0, 0.0)) is not too_early
            assert due.is_too_early(Progress(10, 0.0, 0.0)) is too_early
            one.replica.trainer.hear(Progress(10, 0.0, 1.0, stands_on=state.digest))
            one.replica.rounds.matchmaker._calls._heard(other.node.peer_id, Head.of(state), True)
            assert due.is_called() is not too_early
            due.take_callers()
        assert not due.is_too_early(Progress(52, 0.0, 0.0)) and due.is_too_early(Progress(51, 0.0, 0.0)), "8 of the other's count"

    virtual(scenario)
