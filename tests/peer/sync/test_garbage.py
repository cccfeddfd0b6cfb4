"""Whatever a stranger says on a stream, or answers on one, is the stranger's fault: no handler and no asker fails in a way of its own."""

import asyncio
import contextlib
import logging
import math
import random
import struct

import msgpack

from peer.sync.engine.net.link import measure_link
from peer.sync.engine.net.messages import read_header
from peer.sync.engine.net.streams import PeerLost, Streams
from peer.sync.engine.state import BadState, Header
from peer.sync.engine.transfer.donors import ask_head
from peer.sync.engine.transfer.download import Download, ask_manifest
from peer.sync.engine.transfer.kind import ask_kinds
from peer.sync.engine.transfer.state_fetch import WholeState
from tests.peer.sync.replicas import Liar, Peer, make_run
from tests.peer.sync.swarm_tools import ANYTHING, until

FRAME = struct.Struct("<II")
WORDS = (
    ["parent", "samples", "number", "norm", "reduces", "digest", "chunk", "mean", "group", "more", "pieces", "error", "members", "reducers", "attempt", "coming", "ready_seconds", "busy", "behind", "reason", "leader", "wait", "header", "square_norm", "num_bytes", "square", "schema", "sizes", "run", "round", "parents", "included", "ancestors", "peer"]
)
MESSAGES, QUESTIONS = 25, 10
"""On each stream; of each kind, which take 3 s together."""


class Garbage:
    """Messages drawn from `seed`: words of ours, and values that are of the right kind now and then. known: values to try among them."""

    def __init__(self, seed: int, *known: object):
        self.rng, self.known = random.Random(seed), known

    def value(self, depth: int = 0) -> object:
        rng = self.rng
        plain = (
            None, True, False, 0, 1, -1, 7, 1 << 53, (1 << 64) - 1, -(1 << 63), 0.0, 0.5, -1.0, 1e308, math.nan, math.inf, "", "1", "nan", "x" * 200,
            "\u2028\n\x00", "\U0010ffff" * 40, b"", b"\xff\xfe", msgpack.Timestamp(0, 0), msgpack.ExtType(5, b"x"), *self.known,
        )  # fmt: skip
        if depth > 3 or rng.random() < 0.6:
            return rng.choice(plain)
        if rng.random() < 0.5:
            return [self.value(depth + 1) for _ in range(rng.randrange(4))]
        return self.mapping(depth + 1)

    def mapping(self, depth: int = 0) -> dict:
        return {self.rng.choice(WORDS): self.value(depth) for _ in range(self.rng.randrange(6))}

    def header(self) -> bytes:
        """A packed message's header; some are no msgpack, or no mapping, or nested to the depth that msgpack takes, and beyond."""
        kind, word = self.rng.randrange(12), msgpack.packb(self.rng.choice(WORDS))
        if kind == 0:
            return self.rng.randbytes(self.rng.randrange(40))
        if kind == 1:
            return msgpack.packb({self.rng.choice([0, b"parent", 1.5]): self.value()})
        if kind == 2:
            return b"\x81" + word + b"\x91" * self.rng.choice([17, 300, 1000, 1022, 1100]) + b"\x01"
        if kind == 3:
            return msgpack.packb(self.value())
        return msgpack.packb(self.mapping())

    def message(self) -> bytes:
        header = self.header()
        payload = self.rng.randbytes(self.rng.choice([0, 0, 0, 5, 3000]))
        lengths = (len(header), len(payload)) if self.rng.random() < 0.95 else (self.rng.randrange(1 << 32), self.rng.randrange(1 << 32))
        return FRAME.pack(*lengths) + header + payload


def served(node) -> list[str]:
    """The names of all streams that others can open at `node`."""
    return sorted(node.p2p._client.control.handlers)


async def send(streams: Streams, peer: str, name: str, garbage: Garbage) -> None:
    """Say a few things, and hear what is answered, if anything."""
    with contextlib.suppress(PeerLost), contextlib.closing(await streams.open(peer, name)) as channel:
        for _ in range(garbage.rng.choice([1, 1, 1, 3])):
            with contextlib.suppress(OSError):
                await channel._pipe.send(garbage.message(), until=math.inf)
            await channel.receive(ANYTHING, max_payload=1 << 20, seconds=0.05)


def mishaps_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith(("peer.", "swarm.")) and record.exc_info]


def test_garbage_on_every_stream_is_a_lost_peer_and_no_fault_of_ours(swarm, seed, caplog):
    async def scenario(nodes):
        run = make_run()
        peer = await Peer(nodes, await nodes.node(), run).start(nodes)
        ((stranger, streams),) = await nodes.streams(1)
        liar = Liar(stranger, run)
        await liar.keep_saying(nodes, lambda: {"digest": peer.head.digest, "samples": peer.head.header.samples, "waiting_samples": 8})
        await until(lambda: peer.replica.neighbours.others())
        names = served(peer.node)
        assert len(names) >= 7, names
        garbage = Garbage(seed, peer.head.digest, peer.id, stranger.peer_id, "0" * 64)
        for name in names:
            for _ in range(MESSAGES):
                await send(streams, peer.id, name, garbage)
        assert not peer.replica._streams.mishaps and not mishaps_in(caplog)
        assert not peer.failures and not peer.tasks[0].done()
        with contextlib.closing(await streams.open(peer.id, names[0])):
            pass  # it still takes streams

    with caplog.at_level(logging.INFO):
        swarm(scenario)


def test_garbage_for_an_answer_is_a_lost_peer_whatever_was_asked(swarm, seed, caplog):
    async def scenario(nodes):
        run = make_run()
        peer = await Peer(nodes, await nodes.node(), run).start(nodes)
        ((stranger, streams),) = await nodes.streams(1)
        garbage = Garbage(seed, peer.head.digest, peer.id, stranger.peer_id, "0" * 64)

        async def answer(channel) -> None:
            for _ in range(garbage.rng.choice([1, 1, 4])):
                with contextlib.suppress(OSError):
                    await channel._pipe.send(garbage.message(), until=math.inf)
            await channel.hung_up(0.2)

        for name in served(peer.node):
            await streams.serve(name, answer)
        ahead = {"digest": "0" * 64, "samples": 9, "round": 1}  # takes turns: it is asked for its state, and called to a round
        beside = {"waiting_samples": 8, "samples_per_second": 10.0}
        liar, claims = Liar(stranger, run), [beside | {"digest": peer.head.digest}, ahead]
        await liar.keep_saying(nodes, lambda: garbage.rng.choice(claims) | {"samples": peer.head.header.samples + 9})
        await until(lambda: peer.replica.neighbours.others())
        asking = Streams(peer.node)
        for _ in range(QUESTIONS):
            await ask_head(asking, stranger.peer_id)
            await ask_kinds(asking, [stranger.peer_id])
            await ask_manifest(asking, [stranger.peer_id], "0" * 64)
            await peer.replica.rounds.matchmaker._calls._call(stranger.peer_id, peer.head.digest)
            with contextlib.suppress(PeerLost):
                await measure_link(asking, stranger.peer_id, seconds=0.1)
            with contextlib.suppress(PeerLost, BadState):
                await Download(WholeState("0" * 64, peer.head), {stranger.peer_id}).run(asking)
        assert not peer.failures and not peer.tasks[0].done() and not mishaps_in(caplog)

    with caplog.at_level(logging.INFO):
        swarm(scenario)


def test_a_header_that_is_garbage_is_a_bad_state(seed):
    garbage = Garbage(seed)
    whole = Header(run="r", schema="s").to_json()
    for _ in range(3000):
        values = garbage.value()
        if garbage.rng.random() < 0.9:
            values = whole | {garbage.rng.choice(list(whole)): garbage.value() for _ in range(garbage.rng.randrange(1, 4))}
        with contextlib.suppress(BadState):
            assert read_header(values).num_bytes


def test_a_fault_of_a_handler_is_counted(swarm):
    async def scenario(nodes):
        (server, serving), (_, streams) = await nodes.streams(2)

        async def faulty(channel) -> None:
            await asyncio.sleep(0)
            raise ZeroDivisionError

        await serving.serve("test.1", faulty)
        with contextlib.closing(await streams.open(server.peer_id, "test.1")) as channel, contextlib.suppress(PeerLost):
            await channel.receive(ANYTHING, seconds=60)
        assert serving.mishaps == {"test.1": 1}

    swarm(scenario)
