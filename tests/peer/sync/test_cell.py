"""The bell: who waits goes on when it finds what it waits for, and is not woken for anything else."""

import asyncio
import random

import pytest

from peer.sync.engine.cell import Bell, Cell
from simulation.loop import VirtualLoop
from swarm.tasks import end_tasks


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_waiter_is_asked_at_each_ring_and_goes_on_when_it_has_found_something():
    async def scene():
        bell, found, asked = Bell(), [], []
        waiting = asyncio.create_task(bell.until(lambda: asked.append(1) or found, seconds=60))
        await _turns()
        bell.ring()
        bell.ring()
        await _turns()
        assert len(asked) == 2 and not waiting.done()  # when it began, and once for two rings in one turn
        found.append("it")
        bell.ring()
        assert await asyncio.wait_for(waiting, 5) == ["it"]

    asyncio.run(scene())


def test_rings_that_concern_another_waiter_wake_only_that_one():
    async def scene():
        bell, clock = Bell(), asyncio.get_running_loop().time
        one, other = Cell("", bell, clock), Cell("", bell, clock)
        first, second = (asyncio.create_task(bell.until(lambda cell=cell: cell.value, seconds=60)) for cell in (one, other))
        await _turns()
        other.set("here")
        assert await asyncio.wait_for(second, 5) == "here" and not first.done()
        one.set("too")
        assert await asyncio.wait_for(first, 5) == "too"

    asyncio.run(scene())


def test_what_time_alone_brings_is_found_without_a_ring():
    async def scene():
        loop = asyncio.get_running_loop()
        due = loop.time() + 0.05
        assert await asyncio.wait_for(Bell().until(lambda: loop.time() >= due, seconds=0.01), 5)

    asyncio.run(scene())


def test_many_who_wait_are_each_asked_after_their_own_seconds_by_one_timer():
    loop, bell, asked = VirtualLoop(random.Random(0)), Bell(), {seconds: [] for seconds in (4.0, 1.0, 2.5)}

    def timers() -> int:
        return sum(handle[2] == bell._ask_due for handle in loop._timers)

    async def scene():
        waiting = [asyncio.ensure_future(bell.until(lambda at=at: at.append(loop.time()), seconds)) for seconds, at in asked.items()]
        await asyncio.sleep(0.5)
        assert timers() == 1
        await bell.rung(0.2)  # sooner than all of them, and gone when it has been woken
        assert loop.time() == pytest.approx(0.7)
        await asyncio.sleep(7.4)
        await end_tasks(*waiting)
        assert timers() == 0, "nobody waits any more"
        assert await bell.until(lambda: loop.time() > 20, 3.0) is True, "and who comes then is asked in time"

    loop.run_until_complete(scene())
    loop.close()
    assert asked == {4.0: [0, 4, 8], 1.0: [*range(9)], 2.5: [0, 2.5, 5, 7.5]}


def test_an_error_of_a_question_reaches_whoever_asks_it_and_nobody_else():
    async def scene():
        bell, broken = Bell(), []

        def ready() -> bool:
            if broken:
                raise ValueError("broken")
            return False

        waiting, other = asyncio.create_task(bell.until(ready, seconds=60)), asyncio.create_task(bell.rung(60))
        await _turns()
        broken.append(True)
        bell.ring()
        with pytest.raises(ValueError, match="broken"):
            await asyncio.wait_for(waiting, 5)
        await asyncio.wait_for(other, 5)

    asyncio.run(scene())


def test_a_ring_or_the_time_ends_a_wait_and_a_cancelled_one_is_forgotten():
    async def scene():
        bell = Bell()
        await bell.rung(0.01)
        waiting = asyncio.create_task(bell.rung(60))
        await _turns()
        waiting.cancel()
        await asyncio.wait([waiting])
        bell.ring()  # nobody is left to be told
        again = asyncio.create_task(bell.rung(60))
        await _turns()
        bell.ring()
        await asyncio.wait_for(again, 5)

    asyncio.run(scene())
