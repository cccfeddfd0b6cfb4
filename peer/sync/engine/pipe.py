"""One connection to p2pd as a bare socket: bytes go straight from and to the memory where they are wanted.

asyncio's reader and writer copy them three times on the way: a sixth of an average's CPU time.
"""

import asyncio
import collections
import socket


class Pipe:
    """Takes a connection over from asyncio's reader and writer. One task at a time may take, and one may send.

    until: by the loop's clock. Raises TimeoutError then, EOFError when the other end has hung up, another OSError when the connection broke.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket = writer.get_extra_info("socket").dup()
        self._begun = memoryview(bytes(reader._buffer))
        writer.transport.abort()  # closes its own descriptor, and leaves the connection to ours
        self._unsent: collections.deque[memoryview] = collections.deque()
        self._waiting: dict[str, asyncio.Future] = {}

    async def take(self, into: memoryview, until: float) -> None:
        """Fill `into`. A take that was cancelled or came too late has lost what had come of it."""
        while into:
            count = await self._some(into, until)
            if not count:
                raise EOFError("it hung up")
            into = into[count:]

    async def send(self, *pieces: bytes | memoryview, until: float) -> None:
        """Hand them on; waits while the other end is slow. What a cancelled one left goes out with the next: no message is torn."""
        self._unsent += [memoryview(piece) for piece in pieces if len(piece)]
        while self._unsent:
            try:
                self._sent(self._socket.sendmsg(self._unsent))
            except BlockingIOError:
                await self._ready("writer", until)

    async def hung_up(self, until: float) -> None:
        """Wait until the other end hangs up; whatever it still says is lost."""
        waste = memoryview(bytearray(1 << 16))
        while await self._some(waste, until):
            if self._loop.time() >= until:
                raise TimeoutError("it says more and more")
            await asyncio.sleep(0)

    def close(self) -> None:
        for side in list(self._waiting):
            self._forget(side)
        self._unsent.clear()
        self._socket.close()

    async def _some(self, into: memoryview, until: float) -> int:
        if self._begun:
            count = min(len(into), len(self._begun))
            into[:count], self._begun = self._begun[:count], self._begun[count:]
            return count
        while True:
            try:
                return self._socket.recv_into(into)
            except BlockingIOError:
                await self._ready("reader", until)

    def _sent(self, count: int) -> None:
        while count:
            piece = self._unsent.popleft()
            if count < len(piece):
                self._unsent.appendleft(piece[count:])
            count -= min(count, len(piece))

    async def _ready(self, side: str, until: float) -> None:
        """Wait until the socket can be read or written. Not `loop.sock_*`: their deadline would take a task each time."""
        ready = self._waiting[side] = self._loop.create_future()
        late = self._loop.call_at(until, _settle, ready, TimeoutError("its time is over"))
        watch = self._loop.add_reader if side == "reader" else self._loop.add_writer
        watch(self._socket, _settle, ready)
        try:
            await ready
        finally:
            late.cancel()
            if self._waiting.get(side) is ready:  # else we were cancelled, and the next one waits already
                self._forget(side)

    def _forget(self, side: str) -> None:
        forget = self._loop.remove_reader if side == "reader" else self._loop.remove_writer
        forget(self._socket)
        _settle(self._waiting.pop(side), ConnectionAbortedError("closed here"))


def _settle(future: asyncio.Future, error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # nobody need be waiting for it
