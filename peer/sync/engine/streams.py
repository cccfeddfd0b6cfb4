"""Messages between peers: a small msgpack header and a payload, over one libp2p stream of the swarm's p2pd.

The transport authenticates the other end. Every read has a limit in bytes and a deadline; hivemind's own framing believes any length.
"""

import asyncio
import collections
import contextlib
import logging
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2

from swarm.dht import SwarmNode

log = logging.getLogger(__name__)

_FRAME = struct.Struct("<II")
_MAX_HEADER_BYTES = 256 << 10
_WRITE_BYTES = 256 << 10
_READ_AHEAD_BYTES = 512 << 10
CONNECT_SECONDS = 10.0
_END_SECONDS = 5.0
_STREAMS_PER_PEER = 16
"""An honest peer needs half a dozen at once; more are refused, so that a thousand idle ones cost nobody memory."""


class PeerLost(Exception):
    """The other end is gone, silent, or does not keep to the protocol; the reason is for the log."""


class Refused(PeerLost):
    """The other end answers, but does not want to; it said why."""


class Broken(PeerLost):
    """The stream ended without a word: who opened it may open another, which fails at once when the other end is gone."""


class Channel:
    """One stream to `peer`. Everything that goes wrong with it is a PeerLost."""

    def __init__(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.peer, self._reader, self._writer = peer, reader, writer
        # asyncio's own limit makes a reader stop twice in each part of a vector: half the speed on loopback. hivemind takes no `limit`.
        reader._limit = _READ_AHEAD_BYTES
        self.sent = self.received = 0
        """Bytes of messages so far, headers included."""

    async def send(self, header: dict[str, Any], payload: bytes | memoryview = b"", *, seconds: float) -> None:
        """Send one message; waits while the other end is slow. Raises PeerLost."""
        try:
            await asyncio.wait_for(self._send(msgpack.packb(header), memoryview(payload)), seconds)
        except (OSError, RuntimeError, asyncio.TimeoutError) as error:
            raise PeerLost(f"{self.peer[-6:]} takes nothing: {_name(error)}") from None

    async def _send(self, header: bytes, payload: memoryview) -> None:
        self._writer.write(_FRAME.pack(len(header), len(payload)) + header)
        self.sent += _FRAME.size + len(header) + len(payload)
        for offset in range(0, len(payload), _WRITE_BYTES):
            self._writer.write(payload[offset : offset + _WRITE_BYTES])
            await self._writer.drain()
        await self._writer.drain()

    async def receive(self, *, max_payload: int = 0, seconds: float) -> tuple[dict[str, Any], bytes]:
        """The next message. Raises PeerLost when it is late, too long, no message, or {"error": reason}."""
        try:
            return await asyncio.wait_for(self._receive(max_payload), seconds)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            # A TimeoutError is an OSError from Python 3.11 on.
            kind = PeerLost if isinstance(error, asyncio.TimeoutError) else Broken
            raise kind(f"{self.peer[-6:]} says nothing: {_name(error)}") from None

    async def _receive(self, max_payload: int) -> tuple[dict[str, Any], bytes]:
        header_bytes, payload_bytes = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
        if header_bytes > _MAX_HEADER_BYTES or payload_bytes > max_payload:
            raise PeerLost(f"{self.peer[-6:]} announced {header_bytes} + {payload_bytes} bytes, at most {max_payload} are allowed")
        try:
            header = msgpack.unpackb(await self._reader.readexactly(header_bytes))
        except (ValueError, msgpack.exceptions.UnpackException):
            raise PeerLost(f"{self.peer[-6:]} sent no message of ours") from None
        if not isinstance(header, dict):
            raise PeerLost(f"{self.peer[-6:]} sent no message of ours")
        if "error" in header:
            raise Refused(f"{self.peer[-6:]}: {str(header['error'])[:200]}")
        payload = await self._reader.readexactly(payload_bytes)
        self.received += _FRAME.size + header_bytes + payload_bytes
        return header, payload

    async def end(self, reason: str) -> None:
        """Tell the other end why this one goes, and let it hang up first.

        p2pd resets a stream that is closed with bytes unread, and then what was sent last may be lost on its way (seen).
        """
        with contextlib.suppress(PeerLost, OSError, asyncio.TimeoutError):
            await self.send({"error": reason}, seconds=_END_SECONDS)
            await asyncio.wait_for(self._hung_up(), _END_SECONDS)

    async def _hung_up(self) -> None:
        while await self._reader.read(_READ_AHEAD_BYTES):
            pass

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()


Handler = Callable[[Channel], Awaitable[None]]


class Streams:
    """Opens and serves streams by name on a node."""

    def __init__(self, node: SwarmNode):
        self._node, self.peer_id = node, node.peer_id
        self._serving: collections.Counter[str] = collections.Counter()

    async def open(self, peer: str, name: str) -> Channel:
        """Raises PeerLost when `peer` cannot be reached in time."""
        writer = None
        try:
            # Not `call_binary_stream_handler`: it leaves the connection to p2pd open for good whenever the dial fails (seen).
            reader, writer = await asyncio.open_unix_connection(self._node.p2p.daemon_listen_maddr["unix"])
            await asyncio.wait_for(_dial(reader, writer, peer, name), CONNECT_SECONDS)
        except BaseException as error:  # hivemind raises its own kinds, and p2pd's death shows as several of asyncio's
            if writer is not None:
                writer.close()
            if not isinstance(error, Exception):
                raise
            raise PeerLost(f"{peer[-6:]} cannot be reached: {_name(error)}") from None
        return Channel(peer, reader, writer)

    async def serve(self, name: str, handler: Handler) -> None:
        """Answer streams called `name`; a handler's PeerLost ends its stream, telling the other end why."""

        async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = Channel(info.peer_id.to_base58(), reader, writer)
            self._serving[channel.peer] += 1
            try:
                if self._serving[channel.peer] > _STREAMS_PER_PEER:
                    raise PeerLost("too many streams at once")
                await handler(channel)
            except PeerLost as error:
                log.debug("%s: %s", name, error)
                await channel.end(str(error))
            except Exception as error:
                log.warning("%s from %s failed: %r", name, channel.peer[-6:], error, exc_info=True)
                await channel.end("internal error")
            finally:
                channel.close()
                self._serving[channel.peer] -= 1
                self._serving += collections.Counter()  # forget those at zero

        await self._node.p2p.add_binary_stream_handler(name, handle)


async def _dial(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, name: str) -> None:
    """Ask p2pd to turn this connection into a stream to `peer`."""
    opening = p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer).to_bytes(), proto=[name])
    await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening))
    answer = p2pd_pb2.Response()
    await read_pbmsg_safe(reader, answer)
    raise_if_failed(answer)


def _name(error: BaseException) -> str:
    return str(error) or type(error).__name__
