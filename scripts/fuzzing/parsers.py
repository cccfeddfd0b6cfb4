"""Every parser of what strangers send, with examples that were really said to it.

Each takes bytes. It reads them, or raises one of its refusals; anything else is a fault of ours.
"""

import asyncio
import contextlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgpack
import torch
from pydantic import ValidationError

from datasetserver.answers import Refused
from datasetserver.gate import errors_as_json
from datasetserver.openapi import Endpoint
from datasetserver.service import SERVICE
from peer.contracts import Member
from peer.sync.engine.codec import WIRES, Wire
from peer.sync.engine.net.messages import Announcement, BadMessage, Join, read, read_header
from peer.sync.engine.net.streams import MAX_MESSAGE_BYTES, Channel, PeerLost
from peer.sync.engine.round.groups import Standing, Ticket, group_of, ticket_of
from peer.sync.engine.state import BadState, Head
from scripts.fuzzing.mutate import MSGPACK_NAMES, MSGPACK_VALUES, NAMES, VALUES, mutated, spliced, torn
from scripts.fuzzing.recording import Recording
from simulation.server import _ROUTES, _Request, _unguarded
from swarm import protocol
from swarm.errors import UserError
from swarm.receipts import Receipts
from swarm.records import BadRecord, PeerRecord, RunRecord
from swarm.run_config import RunConfig
from swarm.unpacking import unpack

_ELEMENTS = 3_000
"""Of the vector whose parts are decoded: blocks of 128 and 64, the last ones not whole."""
_MOST_SAMPLES = 4_096


class Fault(Exception):
    """A parser took what it must not take."""


class _Unreadable(Exception):
    """No msgpack, or no JSON: there is nothing to parse."""


@dataclass(frozen=True)
class Parser:
    """make: an example, mutated or not, as bytes; parse: the parser; refusals: what it may raise."""

    name: str
    make: Callable[[random.Random], bytes]
    parse: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]


def parsers(recording: Recording, loop: asyncio.AbstractEventLoop) -> Iterator[Parser]:
    """All of them. recording: where their examples are from; loop: runs those that are coroutines."""
    yield from _streams(recording, loop)
    yield from _records(recording)
    yield from _payloads()
    yield from _http(recording, loop)


# ---------------------------------------------------------------- what is mutated


def _packed(examples: Sequence[bytes]) -> Callable[[random.Random], bytes]:
    def dump(values: Any) -> bytes:
        with contextlib.suppress(OverflowError):  # an int beyond 64 bits, which msgpack cannot say
            return msgpack.packb(values)
        return b""

    return _told(examples, msgpack.unpackb, dump, MSGPACK_VALUES, MSGPACK_NAMES)


def _written(examples: Sequence[bytes]) -> Callable[[random.Random], bytes]:
    return _told(examples, json.loads, lambda values: json.dumps(values).encode(), VALUES, NAMES)


def _told(
    examples: Sequence[bytes], load: Callable[[bytes], Any], dump: Callable[[Any], bytes], foreign: Sequence[Any], names: Sequence[Any]
) -> Callable[[random.Random], bytes]:
    if not examples:
        raise UserError("In the world of this seed something is never said that a parser is for.", fix="Take another --seed.")

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return torn(rng.choice(examples), rng)
        values = load(rng.choice(examples))
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 5])):
            values = mutated(values, rng, foreign=foreign, names=names)
        if rng.random() < 0.2:
            values = spliced(values, load(rng.choice(examples)), rng)
        return dump(values)

    return make


def _unpacked(data: bytes) -> Any:
    """As a channel does with a message's values."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise _Unreadable("too long")
    try:
        return unpack(data)
    except ValueError as error:
        raise _Unreadable(str(error)) from None


def _loaded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:  # no UTF-8 either
        raise _Unreadable(str(error)) from None


_OF_MESSAGES = (_Unreadable, BadMessage)

# ---------------------------------------------------------------- streams


class _Said:
    """A pipe on which these bytes came, and after them nothing."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    async def take(self, room: memoryview, until: float) -> None:
        if self._at + len(room) > len(self._data):
            raise TimeoutError
        room[:] = self._data[self._at : self._at + len(room)]
        self._at += len(room)


def _streams(recording: Recording, loop: asyncio.AbstractEventLoop) -> Iterator[Parser]:
    said = recording.messages
    for name, examples in sorted(said.items()):
        kind = examples[0][0]
        yield Parser(
            f"message {name}", _packed([wire for _, wire in examples]), lambda data, kind=kind: read(kind, _unpacked(data)), _OF_MESSAGES
        )
    kinds = [(kind, wire) for examples in said.values() for kind, wire in examples]
    awaited = [kinds[0][0]]

    def frame(rng: random.Random) -> bytes:
        kind, wire = rng.choice(kinds)
        awaited[0] = kind if rng.random() < 0.8 else rng.choice(kinds)[0]
        whole = len(wire).to_bytes(4, "little") + rng.choice([0, 0, 9]).to_bytes(4, "little") + wire + bytes(9)
        return torn(whole, rng)

    async def received(data: bytes) -> object:
        return await Channel("QmStranger", _Said(data)).receive(awaited[0], max_payload=1 << 10, seconds=5.0)

    def receive(data: bytes) -> object:
        return loop.run_until_complete(received(data))

    yield Parser("frames", frame, receive, (PeerLost,))
    headers = [
        json.dumps(read(kind, msgpack.unpackb(wire)).header.to_json()).encode()
        for kind, wire in said["StateOffer"] + said.get("MeanOffer", [])
    ]
    yield Parser("headers", _written(headers), _header, (_Unreadable, BadState))
    receipts = Receipts.of(recording.world.run)
    joins = _packed([wire for _, wire in said["Join"]])
    yield Parser("tickets", joins, lambda data: _ticket(data, receipts), (*_OF_MESSAGES, PeerLost))
    announced = [wire for _, wire in said["answer to join"] if "members" in msgpack.unpackb(wire)]
    yield Parser("announcements", _packed(announced), lambda data: _announcement(data, receipts), (*_OF_MESSAGES, PeerLost))


def _header(data: bytes) -> None:
    """Whatever is taken for a header is the same one when it is written and read again."""
    header = read_header(_loaded(data))
    if read_header(_loaded(json.dumps(header.to_json()).encode())) != header:
        raise Fault("a header that is another one when it is written and read")


def _ticket(data: bytes, receipts: Receipts) -> None:
    ticket = ticket_of(read(Join, _unpacked(data)), "QmStranger", _MOST_SAMPLES, receipts)
    if not 0 <= ticket.member.samples <= _MOST_SAMPLES or (ticket.assists and not ticket.reduces):
        raise Fault(f"a ticket out of bounds: {ticket}")


def _announcement(data: bytes, receipts: Receipts) -> None:
    """As its first member reads it."""
    said = read(Announcement, _unpacked(data))
    peers = [peer for peer, *_ in said.members]
    *me, norm = next(iter(said.members), ("QmMe", 1, 1, 0.0))
    draw = dict(zip(said.reducers, said.draws, strict=False)).get(me[0], "")
    ticket = Ticket("p", Member(*me), True, norm=norm, receipt=next(iter(said.receipts), ""), draw=draw)
    group = group_of(said, ticket, next(iter(said.reducers), "QmLeader"), Standing(Head("p", 0), True, 0.0), _MOST_SAMPLES, receipts)
    if peers != sorted(set(peers)) or group.samples > _MOST_SAMPLES * len(peers) or ticket.member not in group.members:
        raise Fault(f"a group that is none: {group}")


# ---------------------------------------------------------------- records and payloads


def _records(recording: Recording) -> Iterator[Parser]:
    peers, runs = recording.records["peer"], recording.records["run"]
    owner = peers[0][0]
    yield Parser(
        "peer records",
        _packed([data for who, data in peers if who == owner]),
        lambda data: PeerRecord.unpack(data, owner=owner),
        (BadRecord,),
    )

    def run(data: bytes) -> None:
        RunConfig.from_mapping(RunRecord.unpack(data).run, where="a stranger's record")

    yield Parser("run records", _packed([data for _, data in runs]), run, (BadRecord, UserError))


def _payloads() -> Iterator[Parser]:
    vector = torch.linspace(-3.0, 3.0, _ELEMENTS)
    for name in WIRES:
        wire = Wire(name, _ELEMENTS - 500, 500)
        encoded = bytes(wire.encode(vector).numpy())

        def decoded(data: bytes, wire: Wire = wire) -> None:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            if not bool(wire.decode(tensor).isfinite().all()):
                raise Fault("a payload that decodes to what is not finite")

        yield Parser(f"payload {name}", lambda rng, encoded=encoded: _overwritten(encoded, rng), decoded, (ValueError,))


def _overwritten(data: bytes, rng: random.Random) -> bytes:
    """As long as before, mostly: another length is refused at once."""
    if rng.random() < 0.1:
        return torn(data, rng)
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 4, 64])):
        size = rng.choice([1, 2, 4])
        place = rng.randrange(len(changed) - size)
        changed[place : place + size] = rng.choice([rng.randbytes(size), b"\xff" * size, b"\x80\x7f\xc0\x7f"[-size:], bytes(size)])
    return bytes(changed)


# ---------------------------------------------------------------- HTTP


class _Ledger:
    """Commits at once. The rules, the book and SQLite are the server's own."""

    def __init__(self, writer: Any):
        self.writer = writer

    async def call(self, operation: Callable) -> Any:
        (outcome,) = self.writer.commit([operation])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _http(recording: Recording, loop: asyncio.AbstractEventLoop) -> Iterator[Parser]:
    service = recording.world.server._service
    service.ledger = _Ledger(service.ledger.writer)
    service.signatures = SimpleNamespace(check=lambda *said: None)  # as of peers that sign whatever it is: what is behind that is tried
    for endpoint, pattern in _ROUTES:
        examples = [
            example
            for said in recording.requests.values()
            for example in said
            if example[0] == endpoint.method and pattern.fullmatch(example[1])
        ]
        if not examples:
            continue
        if endpoint.asks is not None:

            def ask(data: bytes, endpoint: Endpoint = endpoint, pattern: re.Pattern = pattern) -> None:
                path, _, body = data.partition(b"\n")
                request = _Request(endpoint.method, path.decode(), {}, body, "203.0.113.9")
                request.match_info, request.app = pattern.fullmatch(request.path).groupdict(), {SERVICE: service}
                answer = loop.run_until_complete(errors_as_json(request, endpoint.handler, _unguarded, endpoint))
                if answer.status >= 500:
                    raise Fault(f"answered {answer.status}: {bytes(answer.body)[:300]!r}")
                if answer.status >= 400:
                    raise Refused(answer.status, "refused", "", "")

            yield Parser(f"{endpoint.method} {endpoint.path}", _asked(examples), ask, (Refused,))
        if not isinstance(endpoint.answers, str) and (answers := [answer for *_, answer in examples if not _is_error(answer)]):
            yield Parser(
                f"answer to {endpoint.method} {endpoint.path}", _written(answers), endpoint.answers.model_validate_json, (ValidationError,)
            )
    founding = protocol.FoundRequest(run=recording.world.run.to_mapping()).model_dump_json().encode()
    yield Parser("founding", _written([founding]), _founding, (ValidationError, UserError))
    refusal = protocol.ErrorAnswer(error=protocol.ErrorBody(code="lease_lost", message="It is over.", fix="Ask for another."))
    refusals = [answer for said in recording.requests.values() for *_, answer in said if _is_error(answer)]
    refusals.append(refusal.model_dump_json().encode())  # nobody may have been refused anything
    yield Parser("errors of HTTP", _written(refusals), protocol.ErrorAnswer.model_validate_json, (ValidationError,))


def _founding(data: bytes) -> None:
    RunConfig.from_mapping(protocol.FoundRequest.model_validate_json(data).run, where="a stranger's request")


def _is_error(answer: bytes) -> bool:
    return answer.startswith(b'{"error"')


def _asked(examples: Sequence[tuple[str, str, bytes, bytes]]) -> Callable[[random.Random], bytes]:
    """The path, a line's end, and the body."""
    write = _written([body for *_, body, _ in examples])
    return lambda rng: rng.choice(examples)[1].encode() + b"\n" + write(rng)
