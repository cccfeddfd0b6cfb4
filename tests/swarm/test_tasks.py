import asyncio
import contextlib

import pytest

from swarm.tasks import end_tasks


def test_a_loop_that_swallows_one_cancellation_ends_all_the_same():
    async def scenario():
        woken = asyncio.Event()

        async def forever():
            while True:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(woken.wait(), 60)
                woken.clear()

        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        woken.set()
        await asyncio.sleep(0)  # the event has been heard, wait_for does not know it yet
        await end_tasks(task)
        assert task.cancelled()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_what_a_task_raises_while_ending_stays_with_the_task():
    async def scenario():
        async def stubborn():
            try:
                await asyncio.sleep(60)
            finally:
                raise ValueError("on the way out")

        tasks = [asyncio.create_task(stubborn()), asyncio.create_task(asyncio.sleep(0))]
        await asyncio.sleep(0)
        await end_tasks(*tasks)
        with pytest.raises(ValueError):
            tasks[0].result()

    asyncio.run(asyncio.wait_for(scenario(), 20))
