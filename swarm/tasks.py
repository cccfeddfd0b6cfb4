"""Ending asyncio tasks for certain."""

import asyncio

_AGAIN_SECONDS = 0.5


async def end_tasks(*tasks: asyncio.Task) -> None:
    """Cancel tasks and wait until all have ended, whatever they raise.

    Before Python 3.12 `asyncio.wait_for` swallows a cancellation that arrives as its future completes, and a loop that waits in it
    goes on for ever (seen: a peer that kept averaging while it was being closed). So whoever is left is asked again.
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_AGAIN_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)
