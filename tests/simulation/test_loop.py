"""Virtual time: an order that no address decides, processes that stop and die, and threads in lock step."""

import asyncio
import gc
import random
from types import SimpleNamespace

import pytest

from simulation.loop import OWNER, Deadlock, VirtualLoop
from simulation.machine import Process
from simulation.threads import LockStepThread
from simulation.world import set_modules_aside


class Owner:
    def __init__(self):
        self.stopped = self.dead = False
        self.held = []

    def job(self, call):
        return call(), 0.5, lambda: None


@pytest.fixture
def loop():
    loop = VirtualLoop(random.Random(1))
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()


def test_an_hour_passes_at_once(loop):
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.time() == pytest.approx(3600, abs=1e-3)


def test_of_two_timers_for_one_moment_the_first_goes_first(loop):
    seen = []
    for name in "abcde":
        loop.call_at(1.0, seen.append, name)
    loop.run_until_complete(asyncio.sleep(2))
    assert seen == list("abcde")


def test_sets_of_tasks_come_in_the_order_in_which_they_were_made(loop):
    async def scene():
        done, _ = await asyncio.wait([asyncio.create_task(asyncio.sleep(0, name)) for name in "abcdefgh"])
        return [task.result() for task in done]

    assert loop.run_until_complete(scene()) == list("abcdefgh")


def test_nothing_left_to_happen_is_an_error(loop):
    with pytest.raises(Deadlock):
        loop.run_until_complete(loop.create_future())


def test_a_job_runs_at_once_and_its_result_comes_later(loop):
    ran = []

    async def scene():
        OWNER.set(Owner())
        job = asyncio.get_running_loop().run_in_executor(None, lambda: ran.append(loop.time()) or 7)
        assert ran == [0.0] and not job.done()
        return await job

    assert loop.run_until_complete(scene()) == 7 and loop.time() == pytest.approx(0.5, abs=1e-3)


def test_a_job_gives_its_error_to_whoever_waits(loop):
    async def scene():
        OWNER.set(Owner())
        with pytest.raises(ZeroDivisionError):
            await asyncio.get_running_loop().run_in_executor(None, lambda: 1 / 0)

    loop.run_until_complete(scene())


def test_what_a_killed_process_was_in_the_middle_of_is_not_unwound_by_the_collector(loop):
    set_modules_aside()  # of a whole suite the collector would look for seconds
    process, seen = Process(SimpleNamespace(world=SimpleNamespace(loop=loop)), "sidecar"), []
    loop.set_exception_handler(lambda loop, context: seen.append(context["message"]))

    async def waits():
        try:
            await loop.create_future()
        finally:
            seen.append("unwound")

    async def begins_what_it_does_not_hold():
        asyncio.create_task(waits())  # noqa: RUF006

    loop.call_soon(process.spawn, begins_what_it_does_not_hold())
    loop.run_until_complete(asyncio.sleep(1))
    process.die()
    gc.collect()
    assert not seen


def test_a_stopped_process_goes_on_where_it_was_and_a_dead_one_never(loop):
    owner, seen = Owner(), []

    async def ticks():
        OWNER.set(owner)
        while True:
            await asyncio.sleep(1)
            seen.append(round(loop.time()))

    async def scene():
        task = asyncio.create_task(ticks())
        await asyncio.sleep(2.6)
        owner.stopped = True
        await asyncio.sleep(5)
        owner.stopped = False
        loop.go_on(owner)
        await asyncio.sleep(1.9)
        owner.dead = True
        await asyncio.sleep(10)
        assert not task.done()

    loop.run_until_complete(scene())
    assert seen == [1, 2, 8, 9]


def test_a_thread_blocks_in_virtual_time_and_is_woken(loop):
    seen = []

    def work():
        thread.block(10)
        seen.append(round(loop.time(), 3))
        thread.block(100)
        seen.append(round(loop.time(), 3))

    thread = LockStepThread(loop, work, seen.append)
    thread.start()
    loop.call_later(30, lambda: thread.wake())
    loop.run_until_complete(asyncio.sleep(200))
    assert seen == [10.0, 30.0] and thread.ended


def test_a_killed_thread_unwinds_where_it_blocks_and_a_failing_one_says_so(loop):
    seen, errors = [], []

    def work():
        try:
            thread.block(1000)
        finally:
            seen.append("unwound")

    def fails():
        raise ValueError("broken")

    thread = LockStepThread(loop, work, errors.append)
    thread.start()
    LockStepThread(loop, fails, errors.append).start()
    loop.run_until_complete(asyncio.sleep(5))
    thread.kill()
    assert seen == ["unwound"] and [str(error) for error in errors] == ["broken"]


def test_a_generator_that_nobody_ended_makes_no_task_when_it_is_collected():
    """Seen in a campaign: an answer that was read half way was unwound in the middle of another world."""
    set_modules_aside()
    loop, unwound = VirtualLoop(random.Random(1)), []

    async def half_way():
        async def pieces():
            try:
                yield 1
                yield 2
            finally:
                unwound.append(True)

        generator = pieces()
        assert await generator.__anext__() == 1
        del generator
        gc.collect()
        await asyncio.sleep(1)
        return len(asyncio.all_tasks())

    try:
        assert loop.run_until_complete(half_way()) == 1 and not unwound
    finally:
        loop.close()
