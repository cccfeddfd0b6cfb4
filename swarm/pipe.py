"""One connection to p2pd as a bare socket: bytes go straight from and to the memory where they are wanted.

asyncio's reader and writer copy them three times on the way: a sixth of an average's CPU time.
"""

import asyncio
import collections
import contextlib
import socket
from collections.abc import Callable

_WASTE = memoryview(bytearray(1 << 16))
"""Where all of them put what nobody reads: a peer may open streams as fast as it likes, and each is listened to for seconds after its refusal."""


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

        def more() -> bool:
            nonlocal into
            into = into[self._some(into) :]
            return not into

        if into:
            await self._done("reader", more, until)

    async def send(self, *pieces: bytes | memoryview, until: float) -> None:
        """Hand them on; waits while the other end is slow. What a cancelled one left goes out with the next: no message is torn."""
        self._unsent += [memoryview(piece) for piece in pieces if len(piece)]

        def more() -> bool:
            if self._unsent:
                with contextlib.suppress(BlockingIOError):
                    self._sent(self._socket.sendmsg(self._unsent))
            return not self._unsent

        await self._done("writer", more, until)

    async def hung_up(self, until: float) -> None:
        """Wait until the other end hangs up; whatever it still says is lost."""
        def never() -> bool:
            self._some(_WASTE)
            return False

        with contextlib.suppress(EOFError):
            await self._done("reader", never, until)

    def close(self) -> None:
        for side in list(self._waiting):
            self._forget(side)
        self._unsent.clear()
        self._socket.close()

    def _some(self, into: memoryview) -> int:
        """Bytes that were there for `into`, which is not empty; 0: none just now. Raises EOFError."""
        if self._begun:
            count = min(len(into), len(self._begun))
            into[:count], self._begun = self._begun[:count], self._begun[count:]
            return count
        try:
            count = self._socket.recv_into(into)
        except BlockingIOError:
            return 0
        if not count:
            raise EOFError("it hung up")
        return count

    def _sent(self, count: int) -> None:
        while count:
            piece = self._unsent.popleft()
            if count < len(piece):
                self._unsent.appendleft(piece[count:])
            count -= min(count, len(piece))

    async def _done(self, side: str, more: Callable[[], bool], until: float) -> None:
        """Call `more` now, and again whenever the socket can be read or written, until it says that this was all.

        From the loop itself: a task that woke for each of the pieces in which a part comes, some 200 KiB, and `loop.sock_*` with a task
        for each deadline, took twice the interpreter's time.
        """
        if more():
            return
        done = self._waiting[side] = self._loop.create_future()

        def on_ready() -> None:
            try:
                if not done.done() and more():
                    _resolve(done)
            except (OSError, EOFError) as error:
                _resolve(done, error)

        late = self._loop.call_at(until, _resolve, done, TimeoutError("its time is over"))
        watch = self._loop.add_reader if side == "reader" else self._loop.add_writer
        watch(self._socket, on_ready)
        try:
            await done
        finally:
            late.cancel()
            if self._waiting.get(side) is done:  # else we were cancelled, and the next one waits already
                self._forget(side)

    def _forget(self, side: str) -> None:
        forget = self._loop.remove_reader if side == "reader" else self._loop.remove_writer
        forget(self._socket)
        _resolve(self._waiting.pop(side), ConnectionAbortedError("closed here"))


def _resolve(future: asyncio.Future, error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # nobody need be waiting for it
