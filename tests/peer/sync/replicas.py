"""Whole peers but for the training process, which a recorder stands for.

Each replica has a real node; its trainer freezes what it is told to, with vectors drawn from the test's seed.
"""

import asyncio
import dataclasses
import json
import logging
import time

import torch

from peer.contracts import Member
from peer.sync.engine.buffers import IN_MEMORY, Buffers
from peer.sync.engine.codec import Wire
from peer.sync.engine.replica import Replica
from peer.sync.engine.state import State, next_state
from peer.sync.engine.trainer.local_work import REBASED_ANCESTORS
from peer.sync.engine.trainer.messages import Done, Extended, Failed, Final, Freeze, Message, News, Nothing, Progress, Rebase, Train
from peer.sync.engine.trainer.trainer import Contribution
from peer.sync.engine.transfer.disk import StateStore
from peer.sync.parameters import Parameters
from swarm.records import PeerRecord
from swarm.run_config import RunConfig
from tests.peer.sync.swarm_tools import state_of

log = logging.getLogger(__name__)
SIZE = 1000


class Peer:
    """A replica and its recorded trainer, which has `rate` samples more at every look while it trains."""

    def __init__(
        self,
        nodes,
        node,
        run: RunConfig,
        *,
        state: State | None = None,
        rate: int = 4,
        strategy=None,
        size: int = SIZE,
        number: int = 0,
        resumes: bool = False,
        buffers: Buffers = IN_MEMORY,
        **options,
    ):
        """resumes: from the states in its folder; buffers: make its memory."""
        self.folder = nodes.folder / node.peer_id
        self.node, self.run, self.rate = node, run, rate
        self.id = node.peer_id
        self.size = size
        self.base = state or state_of(torch.zeros(size), run=run.digest)
        self.at, self.open, self.frozen, self.number = "", 0, None, number
        self.began_with, self.trained, self.dropped, self.counted = number, 0, 0, {}
        self.may_train, self.offers, self.failures = True, [], []
        self.final_rounds, self.lands, self.texts, self.finished = [], [], [], False
        self.extensions = []
        self.store = StateStore(self.folder / "state", bans=options["members"].bans if "members" in options else None, buffers=buffers)
        kept = run.digest, self.base.header.schema, self.base.buffer.num_bytes, run.target_batch_size
        self.replica = Replica(
            run=run,
            state=(resumes and self.store.load(*kept)) or self.base,
            wire=Wire(run.wire, size),
            strategy=strategy or Parameters(),
            node=node,
            store=self.store,
            rounds_path=self.folder / "rounds.jsonl",
            line=self,
            **{"clock": nodes.clock, "wall": nodes.wall, "rng": nodes.rng, **options},
        )
        self.generator = torch.Generator().manual_seed(int(digest_seed(node.peer_id)))
        self.tasks: list[asyncio.Task] = []

    # what the replica says
    def send(self, message: Message):
        match message:
            case Freeze():
                self.freeze()
            case Train():
                self.may_train = True
            case Rebase():
                self.rebase(self.replica.state.value)
            case Final():
                self.final_rounds.append(message.committed_round)
            case News(text):
                self.texts.append(text)
            case Extended(extension):
                self.extensions.append(extension)
            case Done():
                self.finished, self.rate = True, 0
            case Failed():
                self.failures.append(message.error)
            case _:
                raise AssertionError(message)

    def freeze(self):
        if self.frozen is None and self.open:
            self.number += 1
            encoded = Wire(self.run.wire, self.size).encode(torch.randn(self.size, generator=self.generator))
            self.frozen = (self.number, self.open, encoded)
            self.offers.append((self.number, bytes(encoded.numpy())))
            self.open, self.may_train = 0, False
            self.offer()
        elif self.frozen is None:
            self.replica.trainer.hear(Nothing())
        else:  # it does not know: tell it once more, as the product does
            self.offer()

    def offer(self):
        number, samples, encoded = self.frozen
        self.replica.trainer.offered(Contribution(Member(self.id, number, samples), encoded, self.at))

    def rebase(self, state):
        """What LocalWork.rebase does, as far as the books go."""
        self.lands.append(state)
        own = state.header.included.get(self.id, 0)
        for number in [number for number in self.counted if number > own]:  # in a state that lost
            self.dropped += self.counted.pop(number)
        if self.frozen is not None:
            number, samples, _ = self.frozen
            if own >= number:
                self.counted[number], self.frozen = samples, None
            elif not (self.at == state.digest or self.at in state.header.parents[:REBASED_ANCESTORS]):
                self.dropped, self.frozen = self.dropped + samples, None
        self.at, self.may_train = state.digest, False
        if self.frozen is not None:
            self.offer()

    # what a trainer does
    async def work(self):
        while True:
            if self.at and (self.frozen is None or self.may_train) and self.waiting < 2 * self.run.target_batch_size:
                self.open += self.rate
                self.trained += self.rate
            self.replica.trainer.hear(Progress(self.waiting, 10.0 * self.rate, 0.1, stands_on=self.at))
            await asyncio.sleep(0.1)

    @property
    def waiting(self):
        return self.open + (self.frozen[1] if self.frozen else 0)

    @property
    def head(self) -> State:
        return self.replica.state.value

    async def start(self, nodes):
        await self.replica.start()
        self.tasks = [asyncio.create_task(self.replica.live()), asyncio.create_task(self.work())]
        self.tasks[0].add_done_callback(self._ended)
        nodes.ends_with_the_test(*self.tasks)
        return self

    def _ended(self, living: asyncio.Task) -> None:
        if not living.cancelled() and living.exception() is not None:
            self.failures.append(living.exception())
            log.error("%s lives no more: %r", self.id[-6:], living.exception(), exc_info=living.exception())

    async def stop(self):
        self.replica.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.node.close()

    def rounds(self) -> list[dict]:
        path = self.folder / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def digest_seed(text: str) -> int:
    return sum(text.encode())


def make_run(**options) -> RunConfig:
    return RunConfig(**{"model": "x", "target_batch_size": 40, "total_samples": 0, "wire": "fp16", **options})


async def peers(nodes, count, run, **options) -> list[Peer]:
    return [await Peer(nodes, await nodes.node(), run, **options).start(nodes) for _ in range(count)]


def branch(run: RunConfig, samples: int, change: float) -> State:
    base = state_of(torch.zeros(SIZE), run=run.digest)
    return next_state(base, [[torch.full((SIZE,), change)]], [Member("gone", 1, samples)])


def check_invariants(*members: Peer) -> None:
    """Whatever happened: the promises of sync.md."""
    by_group, per_state = {}, {}
    for peer in members:
        assert not peer.failures
        assert bool(torch.isfinite(peer.head.buffer.floats()).all())
        for number in {number for number, _ in peer.offers}:
            assert len({data for n, data in peer.offers if n == number}) == 1, "the bytes of a contribution changed"
        for line in peer.rounds():
            group = (line["parent"], json.dumps(line["members"]))
            assert by_group.setdefault(group, line["digest"]) == line["digest"], "two states for one parent and group"
            assert len({peer_id for peer_id, _, _ in line["members"]}) == len(line["members"])
            per_state[line["digest"]] = line
    for peer in members:
        counted, digest = set(), peer.head.digest
        while digest in per_state and per_state[digest]["round"]:
            for member in per_state[digest]["members"]:
                assert (member[0], member[1]) not in counted, "a contribution is in a state twice"
                counted.add((member[0], member[1]))
            digest = per_state[digest]["parent"]
        reported = {s.digest: s for s in peer.final_rounds}
        assert len(reported) == len(peer.final_rounds), "a state was reported twice"


def final_samples(peer: Peer) -> int:
    return sum(member.samples for s in peer.final_rounds for member in s.members)


class Liar:
    """A live peer with a valid signature, whose records say what the test wants."""

    def __init__(self, node, run):
        self.node, self.run = node, run

    async def say(self, **claims):
        record = PeerRecord(
            peer_id=self.node.peer_id, config=self.run.digest, schema="schema", round=1, samples=0, digest="0" * 64, time=time.time()
        )
        await self.node.publish(self.run.run_id, dataclasses.replace(record, **claims))

    async def keep_saying(self, nodes, claims):
        async def forever():
            while True:
                await self.say(**claims())
                await asyncio.sleep(0.5)

        task = asyncio.create_task(forever())
        nodes.ends_with_the_test(task)
        return task
