"""Messages between the training process and its sidecar: msgpack over a Unix socket, memory handed over as file descriptors."""

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Callable

import msgpack

from peer.sync.engine.state import MAX_HEADER_BYTES
from peer.sync.engine.trainer.messages import Message, pack, unpack
from peer.sync.engine.vectors import SharedBuffer

_MAX_MESSAGE_BYTES = MAX_HEADER_BYTES + (64 << 10)
"""A state's header, and the opening words of a sidecar beside it. Linux gives a socket room for 416 KiB unless it is told otherwise."""
_MAX_DESCRIPTORS = 4
SEND_SECONDS = 30.0


class PortClosed(Exception):
    """The other process is gone."""


class Port:
    """One end; keeps the borders of messages (SOCK_SEQPACKET)."""

    def __init__(self, sock: socket.socket):
        self.socket = sock

    @classmethod
    def pair(cls) -> tuple["Port", "Port"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _MAX_MESSAGE_BYTES)
        return cls(ours), cls(theirs)

    def send(self, message: Message, seconds: float = SEND_SECONDS) -> None:
        """Raises PortClosed, also when the other process takes nothing for `seconds`."""
        kind, values, buffers = pack(message)
        data = msgpack.packb([kind, values])
        assert len(data) <= _MAX_MESSAGE_BYTES, f"{kind}: {len(data)} bytes"
        if not self._ready(select.POLLOUT, seconds):
            raise PortClosed(f"the other process has taken nothing for {seconds:.0f} s")
        try:
            socket.send_fds(self.socket, [data], [buffer.fd for buffer in buffers])
        except OSError as error:
            raise PortClosed(str(error)) from None

    def receive(self, seconds: float) -> Message | None:
        """The next message, or None when none came in time. Raises PortClosed."""
        if not self._ready(select.POLLIN, seconds):
            return None
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        except OSError as error:
            raise PortClosed(str(error)) from None
        if not data:
            raise PortClosed("the other process has ended")
        kind, values = msgpack.unpackb(data)
        return unpack(kind, values, [SharedBuffer(fd=descriptor) for descriptor in descriptors])

    def _ready(self, event: int, seconds: float) -> bool:
        if self.socket.fileno() < 0:
            raise PortClosed("this end is closed")
        poll = select.poll()  # select() knows no descriptor above 1023
        poll.register(self.socket, event)
        return bool(poll.poll(max(seconds, 0) * 1000))

    def watch(self, changed: Callable[[], None]) -> None:
        """From now on the running loop calls `changed` whenever there is a message, or the other process is gone."""
        asyncio.get_running_loop().add_reader(self.socket, changed)

    def unwatch(self) -> None:
        asyncio.get_running_loop().remove_reader(self.socket)

    def has_room(self) -> bool:
        return self._ready(select.POLLOUT, 0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


def inherited(descriptor: int) -> Port:
    """The port that a parent left open for us."""
    os.set_inheritable(descriptor, False)
    return Port(socket.socket(fileno=descriptor))
