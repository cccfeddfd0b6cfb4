"""Who is in a hurry: how often a round may begin before its samples are there."""

import asyncio

import pytest

from peer.sync.engine.round import span
from tests.peer.sync.replicas import make_run, peers
from tests.peer.sync.swarm_tools import until

SECONDS = 600.0
TARGET = 120


async def calls_after_each_step(liar):
    """Says to all others, ten times a second, that it is ready to average onto the state that they have."""
    while True:
        await asyncio.sleep(0.1)
        calls = liar.replica.rounds.matchmaker._calls
        await asyncio.gather(*(calls._call(record.peer_id, "") for record in liar.replica.neighbours.others()))


@pytest.mark.parametrize("liars", [0, 1, 2])
def test_one_that_calls_after_each_step_makes_one_round_in_five_small(virtual, liars):
    async def scenario(nodes):
        run = make_run(target_batch_size=TARGET)
        found = await peers(nodes, 5, run)
        await until(lambda: all(len(peer.replica.met) == 4 for peer in found), SECONDS)
        tasks = [asyncio.create_task(calls_after_each_step(peer)) for peer in found[:liars]]
        at = max(peer.head.header.round for peer in found)
        await until(lambda: min(peer.head.header.round for peer in found[liars:]) >= at + 30, SECONDS)
        for task in tasks:
            task.cancel()
        header = found[-1].head.header
        made = {}
        print(at, header.round, [(each.round, sum(m.samples for m in each.members)) for each in header.ancestors], nodes.clock())

    virtual(scenario)
