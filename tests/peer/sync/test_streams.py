"""Messages between peers: whatever the other end does, it costs a reason for the log and nothing else."""

import asyncio
import contextlib
import contextvars
import errno
import math
import struct

import msgpack
import pytest

from peer.sync.engine.net import streams as streams_module
from peer.sync.engine.net.streams import Channel, PeerLost, Refused, Streams
from swarm import dht
from swarm.pipe import Pipe
from tests.peer.sync.swarm_tools import ANYTHING, open_descriptors, until

FRAME = struct.Struct("<II")
CALLS = contextvars.ContextVar("calls", default=False)
"""Whether code runs for the one who opens a stream."""
STRANGER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def talk(swarm, sends, **limits):
    """What `receive` makes of the raw bytes that a server writes, and of what it does after them."""
    outcome = {}

    async def scenario(nodes):
        (server, server_streams), (_, client) = await nodes.streams(2)

        async def answer(channel: Channel) -> None:
            await sends(channel)

        await server_streams.serve("test.1", answer)
        channel = await client.open(server.peer_id, "test.1")
        try:
            outcome["message"] = await channel.receive(ANYTHING, **{"seconds": 60, **limits})
        except PeerLost as error:
            outcome["error"] = error
        channel.close()

    swarm(scenario)
    return outcome


def raw(data: bytes):
    async def sends(channel: Channel) -> None:
        await channel._pipe.send(data, until=math.inf)
        await asyncio.sleep(0.2)
        channel.close()

    return sends


def test_a_message_arrives_whole(swarm):
    async def sends(channel):
        await channel.send({"a": [1, "b"]}, b"x" * 1_000_000, seconds=60)

    assert talk(swarm, sends, max_payload=1_000_000)["message"] == ({"a": [1, "b"]}, b"x" * 1_000_000)


def test_a_message_comes_into_the_room_made_for_it_and_may_be_shorter(swarm):
    async def scenario(nodes):
        (server, server_streams), (_, client) = await nodes.streams(2)

        async def sends(channel):
            for size in (1_000_000, 999_999, 1_000_001):
                await channel.send({"size": size}, b"x" * size, seconds=60)

        await server_streams.serve("test.1", sends)
        with contextlib.closing(await client.open(server.peer_id, "test.1")) as channel:
            for size in (1_000_000, 999_999):
                room = bytearray(1_000_000)
                assert await channel.receive_into(ANYTHING, memoryview(room), seconds=60) == ({"size": size}, size)
                assert room == b"x" * size + bytes(1_000_000 - size)
            with pytest.raises(PeerLost, match="1000001 bytes, at most 1000000"):
                await channel.receive_into(ANYTHING, memoryview(bytearray(1_000_000)), seconds=60)

    swarm(scenario)


def test_a_message_whose_sending_was_cancelled_is_not_torn(swarm):
    async def sends(channel):
        large = asyncio.create_task(channel.send({"a": 1}, b"x" * 50_000_000, seconds=60))
        await until(lambda: channel._pipe._waiting)  # more than sockets hold
        large.cancel()
        await asyncio.wait([large])
        raise PeerLost("changed my mind")

    async def scenario(nodes):
        (server, server_streams), (_, client) = await nodes.streams(2)
        await server_streams.serve("test.1", sends)
        with contextlib.closing(await client.open(server.peer_id, "test.1")) as channel:
            assert await channel.receive(ANYTHING, max_payload=50_000_000, seconds=60) == ({"a": 1}, b"x" * 50_000_000)
            with pytest.raises(Refused, match="changed my mind"):
                await channel.receive(ANYTHING, seconds=60)

    swarm(scenario)


def test_who_waits_for_a_message_hears_of_it_when_the_stream_is_closed_here(swarm):
    async def scenario(nodes):
        (server, server_streams), (_, client) = await nodes.streams(2)
        await server_streams.serve("test.1", lambda channel: asyncio.Event().wait())
        channel = await client.open(server.peer_id, "test.1")
        waiting = asyncio.create_task(channel.receive(ANYTHING, seconds=1000))
        await until(lambda: channel._pipe._waiting)
        channel.close()
        with pytest.raises(PeerLost, match="closed here"):
            await asyncio.wait_for(waiting, 60)

    swarm(scenario)


BAD = {
    "a payload longer than allowed": (FRAME.pack(1, 11) + b"\x80" + b"x" * 11, "11 bytes, at most 10"),
    "a tebibyte promised": (FRAME.pack(2**32 - 1, 2**32 - 1), "at most 10"),
    "garbage for a header": (FRAME.pack(3, 0) + b"\xc1\xc1\xc1", "no message"),
    "a header that is no mapping": (FRAME.pack(1, 0) + b"\x01", "no message"),
    "a deeply nested header": (FRAME.pack(3000, 0) + b"\x91" * 3000, "no message"),
    "half a message": (FRAME.pack(100, 0) + b"\x80", "does not answer"),
    "nothing at all": (b"", "does not answer"),
}


def test_a_bad_message_is_a_lost_peer_with_a_reason(swarm):
    async def scenario(nodes):
        (server, server_streams), (_, client) = await nodes.streams(2)
        for index, (what, (data, reason)) in enumerate(BAD.items()):
            await server_streams.serve(f"test.{index}", raw(data))
            channel = await client.open(server.peer_id, f"test.{index}")
            with pytest.raises(PeerLost) as caught:
                await channel.receive(ANYTHING, max_payload=10, seconds=60)
            channel.close()
            assert reason in str(caught.value), what

    swarm(scenario)


def test_a_silent_peer_is_lost_when_the_time_is_over(swarm):
    async def sends(channel):
        await asyncio.sleep(30)

    assert "does not answer" in str(talk(swarm, sends, seconds=0.3)["error"])


def test_a_handlers_reason_reaches_the_other_end(swarm):
    async def sends(channel):
        raise PeerLost("no room for you")

    error = talk(swarm, sends)["error"]
    assert isinstance(error, Refused) and "no room for you" in str(error)


def test_a_reason_arrives_although_the_handler_left_messages_unread(swarm):
    async def scenario(nodes):
        (server, server_streams), (_, client) = await nodes.streams(2)

        async def answer(channel):
            await channel.receive(ANYTHING, max_payload=10_000, seconds=60)
            raise PeerLost("no room for you")

        await server_streams.serve("test.1", answer)
        for _ in range(20):
            channel = await client.open(server.peer_id, "test.1")
            for _ in range(30):
                await channel.send({"chunk": 1}, bytes(10_000), seconds=60)
            with pytest.raises(Refused, match="no room for you"):
                await channel.receive(ANYTHING, seconds=60)
            channel.close()

    swarm(scenario)


def test_who_is_refused_and_goes_on_sending_is_cut_off(swarm, monkeypatch):
    monkeypatch.setattr(streams_module, "_END_SECONDS", 0.5)

    async def scenario(nodes):
        (server, server_streams), (_, client) = await nodes.streams(2)

        async def answer(channel):
            raise PeerLost("no room for you")

        await server_streams.serve("test.1", answer)
        channel = await client.open(server.peer_id, "test.1")
        with contextlib.closing(channel), pytest.raises(PeerLost, match="does not accept data"):
            while True:
                await channel.send({}, bytes(100_000), seconds=60)

    swarm(scenario)


def test_a_handlers_crash_is_told_without_its_details(swarm):
    async def sends(channel):
        raise KeyError("secret")

    assert str(talk(swarm, sends)["error"]).endswith("internal error")


def test_a_dial_that_fails_leaves_no_connection_behind(swarm):
    async def scenario(nodes):
        ((_, streams),) = await nodes.streams(1)
        before = open_descriptors()
        for _ in range(10):
            with pytest.raises(PeerLost, match="cannot be reached"):
                await streams.open(STRANGER, "test.1")
        await until(lambda: open_descriptors() <= before + 1)

    swarm(scenario)


@pytest.mark.parametrize("where", ["at the caller", "at the server"])
def test_a_process_that_may_open_no_more_files_loses_a_stream_and_nothing_else(swarm, monkeypatch, where):
    async def scenario(nodes):
        (server, server_streams), (_, client) = await nodes.streams(2)

        async def greet(channel):
            await channel.send({"hello": 1}, seconds=60)

        await server_streams.serve("test.1", greet)
        refused = []
        CALLS.set(True)

        def pipe(reader, writer):
            if not refused and CALLS.get() == (where == "at the caller"):
                refused.append(writer)
                raise OSError(errno.EMFILE, "Too many open files")
            return Pipe(reader, writer)

        monkeypatch.setattr(dht, "Pipe", pipe)
        with pytest.raises(PeerLost, match="Too many open files" if where == "at the caller" else "does not answer"):
            channel = await client.open(server.peer_id, "test.1")
            await channel.receive(ANYTHING, seconds=60)
        assert refused[0].is_closing()
        channel = await client.open(server.peer_id, "test.1")
        assert await channel.receive(ANYTHING, seconds=60) == ({"hello": 1}, b"")
        channel.close()

    swarm(scenario)


def test_one_peer_cannot_hold_many_streams(swarm):
    async def scenario(nodes):
        (server, server_streams), (_, client) = await nodes.streams(2)

        async def idle(channel):
            await asyncio.Event().wait()

        await server_streams.serve("test.1", idle)
        channels = [await client.open(server.peer_id, "test.1") for _ in range(17)]
        waits = [asyncio.create_task(channel.receive(ANYTHING, seconds=100)) for channel in channels]
        done, _ = await asyncio.wait(waits, timeout=90, return_when=asyncio.FIRST_COMPLETED)
        assert any(isinstance(task.exception(), Refused) for task in done)
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        for channel in channels:
            channel.close()

    swarm(scenario)


def test_msgpack_headers_may_not_carry_foreign_types(swarm):
    header = msgpack.packb({"a": msgpack.ExtType(5, b"x")})
    message = talk(swarm, raw(FRAME.pack(len(header), 0) + header))["message"]
    assert isinstance(message[0]["a"], msgpack.ExtType)  # harmless: fields are checked one by one where they are used


def test_a_peer_without_p2pd_reaches_nobody(swarm):
    async def scenario(nodes):
        node = await nodes.node()
        streams = Streams(node)
        await node.p2p.shutdown()
        with pytest.raises(PeerLost):
            await streams.open(STRANGER, "test.1")

    swarm(scenario)
