"""Every family's LoRA in a round: two trainers of the program learn from pictures of their own, and average by the engine's own code.

The round goes over the simulator's network; with real processes it is `python -m benchmarks.family_swarms`.
"""

import asyncio
import dataclasses
import itertools

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine.codec import Wire
from peer.sync.engine.net.streams import Streams
from peer.sync.engine.outer import advance
from peer.sync.engine.round.averaging import Averager
from peer.sync.engine.round.groups import Group
from peer.sync.engine.state import first_state
from peer.sync.engine.trainer.local_work import Anchor, LocalWork
from peer.sync.engine.vectors import Schema, flatten
from peer.sync.parameters import strategy
from tests import tiny
from tests.peer.test_alone import RUN, start  # noqa: F401

AVERAGED = [*tiny.ONE_OF_EACH]
SAMPLES = 8


class Learner:
    """A trainer of the program, which trains alone from state 0 on."""

    def __init__(self, recorded, run):
        self.recorded, self.params = recorded, recorded.trainer.params
        schema = Schema.of(self.params)
        self.wire, self.strategy = Wire.of("int8", schema), strategy(run)
        self.first = first_state(run.digest, schema.digest, flatten(self.params, torch.empty(schema.size)), self.strategy.slots)
        self.work = LocalWork(self.params, _anchor(self.first), self.strategy, self.wire)

    def learn(self):
        """What it contributes, encoded."""
        self.recorded.run()
        self.work.open_samples = SAMPLES
        return self.work.freeze(1).encoded.bytes()

    def commit(self, members, mean):
        state = advance(self.first, members, mean.encoded, mean.square_norm, self.strategy, self.wire)
        assert self.work.rebase(_anchor(state), 1) == [] and self.work.waiting_samples == 0
        return state


def _anchor(state):
    return Anchor(state.digest, state.header, state.buffer)


def averaged(virtual, learners, contributions):
    """The state that each commits after one round of all."""

    async def round(nodes):
        peers = [await nodes.node() for _ in learners]
        averagers = [Averager(node.peer_id, Streams(node), learner.wire) for node, learner in zip(peers, learners, strict=True)]
        for averager in averagers:
            await averager.start()
        members = tuple(sorted((Member(node.peer_id, 1, SAMPLES) for node in peers), key=lambda member: member.peer))
        group = Group(learners[0].first.digest, members, tuple(member.peer for member in members), "first")
        means = (averager.average(group, mine) for averager, mine in zip(averagers, contributions, strict=True))
        return members, await asyncio.gather(*means)

    members, means = virtual(round)
    return [learner.commit(members, mean) for learner, mean in zip(learners, means, strict=True)]


@pytest.mark.parametrize("family", AVERAGED)
def test_two_peers_average_a_familys_lora_to_equal_digests(start, virtual, tiny_family, tmp_path, family):  # noqa: F811
    options = {"method": "lora", "rank": 2, "model": str(tiny_family(family))}
    run = dataclasses.replace(RUN, learning_rate=1e-2, lr_warmup_samples=0, total_samples=SAMPLES, **options)
    folders = [tiny.write_pictures(tmp_path / f"pictures {side}", SAMPLES, side) for side in (16, 24)]
    learners = [Learner(start(folder.name, run=run, train_data_dir=str(folder)), run) for folder in folders]
    assert len({learner.first.digest for learner in learners}) == 1
    contributions = [learner.learn() for learner in learners]
    states = averaged(virtual, learners, contributions)
    assert states[0].digest == states[1].digest != learners[0].first.digest

    size = learners[0].wire.size
    before, after = learners[0].first.vectors(size)[0], states[0].vectors(size)[0]
    one, other = (learner.wire.decode(mine) for learner, mine in zip(learners, contributions, strict=True))
    assert not torch.equal(one, other) and (after - before - (one + other) / 2).norm() < 0.02 * (one + other).norm()
    # int8 kept a rest of what each learned, which is not in the state yet.
    held = [flatten(learner.params, torch.empty(size)) for learner in learners]
    assert all((mine - after).norm() < 0.02 * one.norm() for mine in held)


def test_peers_that_hold_the_base_in_other_bits_are_of_one_run_and_average_to_equal_digests(start, virtual, tiny_family):  # noqa: F811
    """On the same pictures, so that only what --base_precision rounds makes them learn other things."""
    options = {"method": "lora", "rank": 2, "model": str(tiny_family("flux"))}
    run = dataclasses.replace(RUN, learning_rate=1e-2, lr_warmup_samples=0, total_samples=SAMPLES, **options)
    learners = [Learner(start(precision, run=run, base_precision=precision), run) for precision in ("auto", "int8", "nf4")]
    assert len({learner.first.digest for learner in learners}) == 1, "of one run, with the same weights to begin with"
    contributions = [learner.learn() for learner in learners]
    learned = [learner.wire.decode(mine) for learner, mine in zip(learners, contributions, strict=True)]
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(learned, 2))
    states = averaged(virtual, learners, contributions)
    assert len({state.digest for state in states}) == 1 and states[0].digest != learners[0].first.digest
