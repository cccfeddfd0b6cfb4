"""Messages between peers: a small msgpack header and a payload, over one libp2p stream of the swarm's p2pd.

The transport authenticates the other end. Every read has a limit in bytes and a deadline; hivemind's own framing believes any length.
"""

import asyncio
import collections
import contextlib
import logging
import struct
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Protocol

import msgpack
from pydantic import TypeAdapter

from peer.sync.engine.net.bucket import Bucket
from peer.sync.engine.net.messages import MOST_CULPRITS, BadMessage, M, Message, Refusal, read
from peer.sync.engine.state import MAX_HEADER_BYTES
from swarm.members import MEMBERSHIP, Members, said
from swarm.pipe import Pipe
from swarm.tasks import within
from swarm.unpacking import unpack

log = logging.getLogger(__name__)

_FRAME = struct.Struct("<II")
MAX_MESSAGE_BYTES = MAX_HEADER_BYTES + (4 << 10)
"""A state's header, and what is said beside it."""
_MAX_MEMBERSHIP_BYTES = 512
"""It has 150; a peer that is not let in yet gets no more of our memory."""
CONNECT_SECONDS = 10.0
_END_SECONDS = 5.0
_TAKE_SECONDS = 30.0
"""In which the other end takes the last that was sent to it; on a slow link some MB may be on their way."""
_STREAMS_PER_PEER = 16
"""An honest peer needs half a dozen at once; more are refused, so that a thousand idle ones cost nobody memory."""


class PeerLost(Exception):
    """The other end is gone, silent, or does not keep to the protocol; the reason is for the log.

    culprits: the peers that it is owed to, as whoever raises it saw or, if `hearsay`, was told; void: see `Refusal`. The other end of a
    stream that it ends is told as much.
    """

    void = False

    def __init__(self, reason: str = "", culprits: Collection[str] = (), *, hearsay: bool = False):
        super().__init__(reason)
        self.culprits, self.hearsay = tuple(culprits), hearsay


class Refused(PeerLost):
    """The other end answers, but does not want to; it said why."""


class Malformed(PeerLost):
    """What came is no message of ours, which no fault of a link makes it: the transport checks every byte."""


class Broken(PeerLost):
    """The stream ended without a word: who opened it may open another, which fails at once when the other end is gone."""


class Channel:
    """One stream to `peer`. Everything that goes wrong with it is a PeerLost. upload: what all streams together may send; None: all they can.

    place: where it comes from, as `swarm.places` names it. of_round: whether a round waits for what it carries.
    """

    def __init__(self, peer: str, pipe: Pipe, upload: Bucket | None = None, place: str = "", *, of_round: bool = False):
        self.peer, self._pipe, self._upload, self.place, self._of_round = peer, pipe, upload, place, of_round
        self._now = asyncio.get_running_loop().time
        self.sent = self.received = 0
        """Bytes of messages so far, headers included."""

    async def send(self, message: Message | dict[str, Any], payload: bytes | memoryview = b"", *, seconds: float) -> None:
        """Send one message; waits while the other end is slow. Raises PeerLost."""
        packed = msgpack.packb(message if isinstance(message, dict) else message.wire())
        head = _FRAME.pack(len(packed), len(payload)) + packed
        until = self._now() + seconds
        try:
            if self._upload:
                await self._upload.take(len(head) + len(payload), seconds=seconds, of_round=self._of_round)
            await self._pipe.send(head, payload, until=until)
        except OSError as error:
            raise PeerLost(f"{self.peer[-6:]} does not accept data: {_name(error)}") from None
        self.sent += len(head) + len(payload)
        if payload:
            await asyncio.sleep(0)  # others have their turn, however fast the other end is

    async def receive(
        self, kind: type[M] | TypeAdapter[M], *, max_payload: int = 0, seconds: float, max_bytes: int = MAX_MESSAGE_BYTES
    ) -> tuple[M, bytes]:
        """The next message, which is to be of that kind. Raises PeerLost when it is late, too long, malformed or a refusal."""
        until = self._now() + seconds
        message, payload_bytes = await self._receive_message(kind, max_payload, until, max_bytes)
        return message, bytes(await self._take(payload_bytes, until)) if payload_bytes else b""

    async def receive_into(self, kind: type[M] | TypeAdapter[M], room: memoryview, *, seconds: float) -> tuple[M, int]:
        """The next message, whose payload comes into the begin of `room`, and the payload's length. Raises PeerLost as `receive` does."""
        until = self._now() + seconds
        message, payload_bytes = await self._receive_message(kind, len(room), until)
        await self._fill(room[:payload_bytes], until)
        await asyncio.sleep(0)
        return message, payload_bytes

    async def _receive_message(
        self, kind: type[M] | TypeAdapter[M], max_payload: int, until: float, max_bytes: int = MAX_MESSAGE_BYTES
    ) -> tuple[M, int]:
        header_bytes, payload_bytes = _FRAME.unpack(await self._take(_FRAME.size, until))
        if header_bytes > max_bytes or payload_bytes > max_payload:
            raise Malformed(f"{self.peer[-6:]} announced {header_bytes} + {payload_bytes} bytes, at most {max_payload} are allowed")
        try:
            values = unpack(await self._take(header_bytes, until))
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise Malformed(f"{self.peer[-6:]} sent no message of ours", [self.peer]) from None
        try:
            if "error" not in values:
                return read(kind, values), payload_bytes
            refusal = read(Refusal, values)
        except BadMessage as error:
            raise Malformed(f"{self.peer[-6:]} sent a malformed message: {error}", [self.peer]) from None
        refused = Refused(f"{self.peer[-6:]}: {refusal.error}", refusal.culprits, hearsay=refusal.hearsay)
        refused.void = refusal.void
        raise refused

    async def _take(self, count: int, until: float) -> bytearray:
        data = bytearray(count)
        await self._fill(memoryview(data), until)
        return data

    async def _fill(self, room: memoryview, until: float) -> None:
        try:
            await self._pipe.take(room, until)
        except TimeoutError as error:
            raise PeerLost(f"{self.peer[-6:]} does not answer: {_name(error)}") from None
        except (OSError, EOFError) as error:
            raise Broken(f"{self.peer[-6:]} does not answer: {_name(error)}") from None
        self.received += len(room)

    async def end(self, reason: str, culprits: Collection[str] = (), *, hearsay: bool = False, void: bool = False) -> None:
        """Tell the other end why this one goes, and to whom that is owed."""
        refusal = Refusal(error=reason, culprits=tuple(culprits)[:MOST_CULPRITS], hearsay=hearsay, void=void)
        with contextlib.suppress(PeerLost):
            await self.send(refusal, seconds=_END_SECONDS)
            await self.hung_up(_END_SECONDS)

    async def hung_up(self, seconds: float) -> None:
        """Let the other end hang up first, which it does when it has what it wants; if it does not, the stream is closed all the same.

        p2pd resets a stream that is closed here, often before what was sent last has arrived (seen once in 150 averages).
        """
        with contextlib.suppress(OSError):
            await self._pipe.hung_up(self._now() + seconds)

    def close(self) -> None:
        self._pipe.close()


Handler = Callable[[Channel], Awaitable[None]]


class Dialler(Protocol):
    """What streams need of a node: `swarm.dht.SwarmNode`, or one of the simulator's."""

    peer_id: str

    async def dial(self, peer: str, name: str) -> Pipe:
        """A new stream to what `peer` serves under `name`. Raises any Exception when there is none."""
        ...

    async def listen(self, name: str, handle: Callable[[str, str, Pipe], Awaitable[None]]) -> None:
        """Run `handle` (peer, place, pipe) for each stream that is opened to us under `name`."""
        ...


class Streams:
    """Opens and serves streams by name on a node. members: the peers to answer; None: all.

    In a run for members a stream begins with the membership of the peer that opens it.
    """

    def __init__(self, node: Dialler, upload: Bucket | None = None, members: Members | None = None):
        self._node, self.peer_id, self._upload, self._members = node, node.peer_id, upload, members
        self._serving: dict[asyncio.Task, str] = {}  # and whom; asyncio itself holds a task only weakly
        self._of_rounds: set[str] = set()
        self.mishaps: collections.Counter[str] = collections.Counter()
        """Handlers, by the name of their streams, that ended in an error which is nobody's PeerLost: faults of ours."""

    async def open(self, peer: str, name: str) -> Channel:
        """Raises PeerLost when `peer` cannot be reached in time."""
        try:
            channel = Channel(peer, await within(CONNECT_SECONDS, self._node.dial(peer, name)), self._upload, of_round=name in self._of_rounds)
        except Exception as error:  # hivemind raises its own kinds, and p2pd's death shows as several of asyncio's
            raise PeerLost(f"{peer[-6:]} cannot be reached: {_name(error)}") from None
        if self._members is not None and self._members.needed:
            try:
                await channel.send(said(self._members.own) or {}, seconds=CONNECT_SECONDS)
            except BaseException:
                channel.close()
                raise
        return channel

    async def serve(self, name: str, handler: Handler, *, of_round: bool = False) -> None:
        """Answer streams called `name`; a handler's PeerLost ends its stream, telling the other end why. of_round: these streams, ours to others
        as well, carry what a round waits for."""
        if of_round:
            self._of_rounds.add(name)

        async def handle(peer: str, place: str, pipe: Pipe) -> None:
            channel = Channel(peer, pipe, self._upload, place, of_round=of_round)
            self._serving[task := asyncio.current_task()] = channel.peer
            try:
                if list(self._serving.values()).count(channel.peer) > _STREAMS_PER_PEER:
                    raise PeerLost("too many streams at once")
                await self._let_in(channel)
                await handler(channel)
                await channel.hung_up(_TAKE_SECONDS)
            except PeerLost as error:
                log.debug("%s: %s", name, error)
                await channel.end(str(error), error.culprits, hearsay=error.hearsay, void=error.void)
            except Exception as error:
                self.mishaps[name] += 1
                log.warning("%s from %s failed: %r", name, channel.peer[-6:], error, exc_info=True)
                await channel.end("internal error")
            finally:
                channel.close()
                del self._serving[task]

        await self._node.listen(name, handle)

    async def _let_in(self, channel: Channel) -> None:
        """Read the caller's membership, if the run is for members. Raises PeerLost when it is banned or no member."""
        if self._members is None:
            return
        if self._members.needed and not self._members.bans.reason(channel.peer):
            with contextlib.suppress(Malformed):  # a program that knows no memberships begins with its question
                shown, _ = await channel.receive(MEMBERSHIP, seconds=CONNECT_SECONDS, max_bytes=_MAX_MEMBERSHIP_BYTES)
                self._members.hear(channel.peer, shown)
        if reason := self._members.refusal(channel.peer):
            raise PeerLost(reason)


def _name(error: BaseException) -> str:
    return str(error) or type(error).__name__
