"""Waiting within a deadline, and ending asyncio tasks for certain."""

import asyncio
import sys
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
_AGAIN_SECONDS = 0.5


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`. Raises asyncio.TimeoutError after `seconds`.

    As `asyncio.wait_for`, which before Python 3.12 makes a task of what it waits for: a quarter of all that a peer's loop had to do.
    """
    if sys.version_info < (3, 11):
        return await asyncio.wait_for(awaitable, seconds)
    async with asyncio.timeout(seconds):
        return await awaitable


async def set_within(seconds: float, event: asyncio.Event) -> None:
    """Wait until `event` is set, by somebody else or after `seconds`. Nothing is raised, which costs a third of a deadline's cancellation."""
    late = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        late.cancel()


async def end_tasks(*tasks: asyncio.Task) -> None:
    """Cancel tasks and wait until all have ended, whatever they raise.

    Before Python 3.12 `asyncio.wait_for` swallows a cancellation that arrives as its future completes, and a loop that waits in it
    goes on for ever (seen: a peer that kept averaging while it was being closed). So whoever is left is asked again.
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_AGAIN_SECONDS)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # nobody else need hear of it
