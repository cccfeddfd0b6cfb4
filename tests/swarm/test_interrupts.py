import asyncio
import os
import signal
import time

import pytest

from swarm.interrupts import interruptible


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_loop_in_order_and_handlers_are_put_back(number):
    before, ended = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)), []

    async def busy():
        try:
            os.kill(os.getpid(), number)
            for _ in range(1000):  # not at this line or the next, but where it waits
                time.sleep(0.0001)
            ended.append("busy to its end")
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    with pytest.raises(KeyboardInterrupt), interruptible():
        asyncio.run(busy())
    assert ended == ["busy to its end", "cleaned up"] and before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_without_a_loop_it_is_raised_there_and_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(100)
    finally:
        signal.signal(signal.SIGINT, before)
