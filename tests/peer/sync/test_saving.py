"""States written to disk behind the rounds' back: a real store in a folder."""

import asyncio
import threading

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine.round.finality import FINAL_SECONDS
from peer.sync.engine.state import State, next_state
from peer.sync.engine.transfer.disk import StateStore
from peer.sync.engine.transfer.saving import Saver
from swarm.errors import UserError
from swarm.tasks import end_tasks
from tests.peer.sync.swarm_tools import state_of, until


class SlowStore(StateStore):
    """Begins to write when the test lets it."""

    begun = 0

    def __init__(self, folder):
        super().__init__(folder)
        self.free = threading.Event()

    def save(self, state):
        self.begun += 1
        self.free.wait(60)
        return super().save(state)


def a_state() -> State:
    return next_state(state_of(torch.zeros(10)), [[torch.ones(10)]], [Member("a", 1, 8)])


def test_leaving_while_a_state_is_written_waits_for_that_and_writes_no_second_time(tmp_path):
    async def scenario():
        store, state = SlowStore(tmp_path), a_state()
        saver = Saver(store, state_of(torch.zeros(10)), lambda state: None, lambda error: None)
        forever = asyncio.create_task(saver.save_forever())
        saver.want(state)
        await until(lambda: store.begun)
        await end_tasks(forever)
        leaving = asyncio.create_task(saver.save(state))
        await asyncio.sleep(0)
        store.free.set()
        await asyncio.wait_for(leaving, 60)
        assert store.begun == 1 and saver.is_on_disk(state.digest)
        assert store.load("run", "schema", state.buffer.num_bytes, 64).digest == state.digest

    asyncio.run(scenario())


def test_of_many_quick_rounds_each_is_remembered_until_it_is_final(tmp_path):
    """Seen in the code: of rounds of three seconds none was ever on the disk for the two minutes that make one final without company."""

    async def scenario():
        now, state, digests = [0.0], a_state(), []
        saver = Saver(StateStore(tmp_path), state_of(torch.zeros(10)), lambda state: None, lambda error: None, clock=lambda: now[0])
        for number in range(2, 302):
            state = next_state(state, [[torch.ones(10)]], [Member("a", number, 8)])
            await saver.save(state)
            digests.append(state.digest)
            now[0] += 3.0
        assert sum(saver.is_on_disk(digest, FINAL_SECONDS) for digest in digests) > 100
        assert sum(saver.is_on_disk(digest) for digest in digests) <= 202

    asyncio.run(scenario())


def test_a_state_that_another_branch_has_pushed_off_the_disk_is_written_again(tmp_path):
    """A peer fetched a state, then one of another branch, then the first again, and reported that one from memory."""

    async def scenario():
        first = a_state()
        store, saver = StateStore(tmp_path), Saver(StateStore(tmp_path), first, lambda state: None, lambda error: None)
        mine, other = (next_state(first, [[torch.full((10,), samples)]], [Member("a", 2, samples)]) for samples in (16, 8))
        for state in (first, mine, other, mine):  # who has more samples than the newest is of a branch that lost
            await saver.save(state)
            with store.open(state.digest):
                assert saver.is_on_disk(state.digest)
        assert not saver.is_on_disk(other.digest)

    asyncio.run(scenario())


def test_while_another_branch_is_written_the_one_before_is_taken_for_gone(tmp_path):
    """Found by the simulator (seed 12000132): the store had deleted a state, and who came back to it within that second reported it."""

    async def scenario():
        first, store = a_state(), SlowStore(tmp_path)
        mine, other = (next_state(first, [[torch.full((10,), samples)]], [Member("a", 2, samples)]) for samples in (16, 8))
        saver = Saver(store, first, lambda state: None, lambda error: None)
        store.free.set()
        await saver.save(mine)
        store.free.clear()
        writing = asyncio.create_task(saver.save(other))
        await until(lambda: store.begun == 2)
        assert not saver.is_on_disk(mine.digest)
        store.free.set()
        await asyncio.wait_for(writing, 60)
        assert saver.is_on_disk(other.digest) and not saver.is_on_disk(mine.digest)

    asyncio.run(scenario())


def test_a_state_that_was_handed_over_is_written_if_it_is_not_there_yet(tmp_path):
    async def scenario():
        store, state = StateStore(tmp_path), a_state()
        saver = Saver(store, state, lambda state: None, lambda error: None)
        assert not saver.is_on_disk(state.digest), "nobody has written it here"
        forever = asyncio.create_task(saver.save_forever())
        await until(lambda: saver.is_on_disk(state.digest))
        await end_tasks(forever)
        assert store.load("run", "schema", state.buffer.num_bytes, 64).digest == state.digest
        assert Saver(store, state, lambda state: None, lambda error: None).is_on_disk(state.digest)

    asyncio.run(scenario())


def test_a_state_is_not_written_before_its_time_and_then_the_newest_one(tmp_path):
    async def scenario():
        store, first, allowed, asked = SlowStore(tmp_path), a_state(), asyncio.Event(), []

        def may_begin() -> bool:
            asked.append(allowed.is_set())
            return allowed.is_set()

        store.free.set()
        saver = Saver(store, state_of(torch.zeros(10)), lambda state: None, lambda error: None, may_begin)
        forever = asyncio.create_task(saver.save_forever())
        saver.want(first)
        await until(lambda: len(asked) >= 2)
        assert not store.begun
        saver.want(second := next_state(first, [[torch.zeros(10)]], [Member("a", 2, 8)]))
        allowed.set()
        await until(lambda: saver.is_on_disk(second.digest))
        assert store.begun == 1 and not saver.is_on_disk(first.digest)
        await end_tasks(forever)

    asyncio.run(scenario())


def test_what_lasts_no_longer_than_a_state_is_made_durable_before_it(tmp_path):
    store, state = StateStore(tmp_path), a_state()

    async def scenario():
        found = []
        saver = Saver(store, state_of(torch.zeros(10)), lambda state: None, print, before=lambda: found.extend(tmp_path.glob("*.state")))
        await saver.save(state)
        assert not found and list(tmp_path.glob("*.state"))

    asyncio.run(scenario())


def test_a_state_that_the_disk_refused_is_tried_again_when_wanted_again(tmp_path):
    async def scenario():
        folder, errors = tmp_path / "state", []
        saver, state = Saver(StateStore(folder), state_of(torch.zeros(10)), lambda state: None, errors.append), a_state()
        folder.rmdir()
        with pytest.raises(UserError, match="Cannot save"):
            await saver.save(state)
        folder.mkdir()
        await saver.save(state)
        assert saver.is_on_disk(state.digest) and len(list(folder.iterdir())) == 1

    asyncio.run(scenario())
