import asyncio
import contextlib

import pytest

from swarm.tasks import end_tasks, set_within, within


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


def test_what_comes_in_time_is_returned_and_what_does_not_is_cancelled():
    async def scene() -> None:
        ended = []

        async def late() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("late")

        assert await within(5, asyncio.sleep(0, "it")) == "it"
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, late())
        assert ended == ["late"]

    asyncio.run(scene())


def test_an_error_comes_as_it_is_and_a_cancellation_is_none_of_the_deadline():
    async def scene() -> None:
        async def fails() -> None:
            raise KeyError("it")

        with pytest.raises(KeyError):
            await within(5, fails())
        waiting = asyncio.create_task(within(60, asyncio.sleep(60)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(scene())


def test_an_event_is_waited_for_until_somebody_or_the_time_sets_it():
    async def scene() -> None:
        event = asyncio.Event()
        await set_within(0.01, event)
        assert event.is_set()
        event.clear()
        waiting = asyncio.create_task(set_within(60, event))
        await asyncio.sleep(0)
        event.set()
        await asyncio.wait_for(waiting, 5)
        event.clear()
        waiting = asyncio.create_task(set_within(0.02, event))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0.05)
        assert not event.is_set()  # who waits no more sets nothing

    asyncio.run(scene())
