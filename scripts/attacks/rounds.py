"""Strangers that take part in rounds: they contribute, reduce or lead, and do it wrong or not at all.

Each stands in the records on the state that the honest peers are on, comes when called, and so is expected; what it does then is a row.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from torch import Tensor

from peer.sync.engine.codec import Part, Wire
from peer.sync.engine.round.groups import share_out
from scripts.attacks.band import Band
from scripts.attacks.wire import CALL, JOIN, KIND, REDUCE, Frames, Gone, Record, Stranger, newest
from swarm.digest import digest_json
from swarm.slices import tree_digest
from swarm.statements import input_statement

_LOOK_SECONDS = 0.4
_MOST_REDIRECTS = 4


class Guest:
    """One identity that is in the records like a peer that trains, and answers calls. comes: to whom, and how, its answer to a call."""

    def __init__(self, band: Band, stranger: Stranger, *, comes: Callable[["Guest", str, str], Record], **record: Any):
        self.band, self.stranger, self._comes, self._record = band, stranger, comes, record
        self.wire: Wire | None = None
        self.honest: dict[str, Record] = {}
        self.called = asyncio.Event()
        self.onto = ""
        """The state that somebody averages onto now."""
        self.memory: dict[int, Tensor] = {}
        """Of an attack, by part."""

    async def settle_in(self) -> None:
        await self.stranger.serve(CALL, self._answer_call)
        await self._look()
        self.wire = await learn_wire(self.band, self.stranger, list(self.honest))

    async def be_seen(self) -> None:
        """A record on everybody's newest state, renewed all the time."""
        while True:
            with contextlib.suppress(Gone):
                await self._look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self) -> None:
        self.honest = await self.band.honest()
        record = self.band.waiting(newest(self.honest), maddrs=await self.stranger.addresses())
        await self.stranger.publish(self.band.run_id, {**record, **self._record})

    async def _answer_call(self, frames: Frames) -> None:
        request, _ = await frames.receive()
        self.onto = request["head"]["digest"]
        here = {"head": request["head"], "behind": False, "reason": "", "busy": False}
        answer = {"coming": True, "ready_seconds": self.band.rng.uniform(0, 0.3), **here, **self._comes(self, frames.peer, self.onto)}
        await frames.send(answer)
        if answer["coming"]:
            self.called.set()

    def ranks_before(self, peer: str, parent: str) -> bool:
        """Whether it is for us to lead, and not for `peer`: known to everybody beforehand."""
        return digest_json([parent, self.stranger.peer_id]) < digest_json([parent, peer])

    async def join(self, request: Record) -> Record:
        """The group that an honest leader announces. Raises Gone."""
        tried = sorted(self.honest, key=lambda peer: digest_json([request["parent"], peer]))
        for peer in tried:
            with contextlib.suppress(Gone):
                return await self._join(peer, request)
        raise Gone("nobody leads us")

    async def _join(self, leader: str, request: Record) -> Record:
        for _ in range(_MOST_REDIRECTS):
            frames = await self.stranger.open(leader, JOIN)
            with contextlib.closing(frames):
                await frames.send(request)
                answer, _ = await frames.receive(15)
                while "wait" in answer:
                    answer, _ = await frames.receive(15)
            if "leader" not in answer:
                return answer
            leader = answer["leader"]
        raise Gone("sent on too often")


async def learn_wire(band: Band, stranger: Stranger, honest: list[str]) -> Wire:
    """How vectors travel in this run, as any of the peers tells who asks."""
    while True:
        with contextlib.suppress(Gone):
            kind = await stranger.ask(band.rng.choice(honest), KIND)
            return Wire(band.config.wire, *kind["sizes"])


def group_id(parent: str, group: Record) -> str:
    members, norms = [member[:3] for member in group["members"]], [member[3] for member in group["members"]]
    receipts = [bool(receipt) for receipt in group["receipts"]]
    return digest_json([parent, members, group["reducers"], group["draws"], group["attempt"], norms, receipts])


# ------------------------------------------------------------------ contributors


class Outlet:
    """What goes to one reducer, part by part. With the last part comes our signature of them all, without which a run for members takes none."""

    def __init__(self, guest: Guest, frames: Frames, group: str, parts: list[Part]):
        self._guest, self._frames, self._group, self._parts = guest, frames, group, parts
        self._hashes: list[bytes] = []
        self.receive = frames.receive

    async def send(self, data: bytes) -> None:
        part = self._parts[len(self._hashes)]
        self._hashes.append(part.layout.part_hash(memoryview(data)))
        await self._frames.send(self._signed() if part is self._parts[-1] else {}, data)

    def _signed(self) -> Record:
        key = self._guest.stranger.key
        statement = input_statement(self._guest.band.config.digest, self._group, self._frames.peer, tree_digest(self._hashes))
        return {"signature": key.sign(statement), "key": key.public}


Contributes = Callable[[Guest, Outlet, list[Part]], Awaitable[None]]


def _at_random(guest: Guest) -> Record:
    """Up to two rounds' samples, and a norm that is less than what `_garbage` sends, or more."""
    return {"samples": guest.band.rng.randint(1, 2 * guest.band.target), "norm": guest.band.rng.choice([1.0, 1e12])}


async def contribute(band: Band, sends: Contributes | None, states: Callable[[Guest], Record] = _at_random) -> None:
    """Join every round as a member that nobody can dial, so that no rank ever makes us lead. sends: None: never goes to the reducers;
    states: the samples and the norm of what we bring."""
    (stranger,) = await band.come()
    guest = Guest(band, stranger, comes=lambda guest, peer, parent: {}, client_mode=True)
    await guest.settle_in()
    seen = asyncio.create_task(guest.be_seen())
    band.arrived()
    try:
        number = band.rng.randrange(1, 5_000)  # a higher one comes into no state
        while True:
            await guest.called.wait()
            guest.called.clear()
            number += band.rng.randint(1, 5)
            with contextlib.suppress(Gone):
                request = {"parent": guest.onto, "number": number, "reduces": False, **states(guest)}
                group = await guest.join(request)
                if sends:
                    await _to_reducers(guest, request["parent"], group, sends)
    finally:
        seen.cancel()


async def _to_reducers(guest: Guest, parent: str, group: Record, sends: Contributes) -> None:
    shares = share_out(parent, group["reducers"], guest.wire.parts)
    parts = {peer: [guest.wire.parts[index] for index in share] for peer, share in shares.items()}
    await asyncio.gather(*[_to_reducer(guest, peer, group_id(parent, group), mine, sends) for peer, mine in parts.items()])


async def _to_reducer(guest: Guest, reducer: str, name: str, parts: list[Part], sends: Contributes) -> None:
    if not parts:
        return
    with contextlib.suppress(Gone):
        frames = await guest.stranger.open(reducer, REDUCE)
        with contextlib.closing(frames):
            await frames.send({"group": name})
            await sends(guest, Outlet(guest, frames, name, parts), parts)


def random_values(seed: int, part: Part) -> Tensor:
    """(elements,) in [-1, 1)."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.rand(part.end - part.start, generator=numbers) * 2 - 1


def as_bytes(encoded: Tensor) -> bytes:
    return bytes(encoded.numpy())


def decoded(part: Part, data: bytes) -> Tensor:
    return part.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8))


async def _garbage(guest: Guest, reducer: Outlet, parts: list[Part]) -> None:
    """The means of the round before, turned round and made ten times as long; at first, and now and then, all that the wire can hold."""
    means: dict[int, Tensor] = guest.memory
    for part in parts:
        values = random_values(guest.band.rng.randrange(2**60), part) * 10.0 ** guest.band.rng.uniform(1, 4.7)
        if part.start in means and guest.band.rng.random() < 0.5:
            values = means[part.start] * -10
        await reducer.send(as_bytes(part.encode(values)))
    for part in parts:
        _, data = await reducer.receive(40)
        means[part.start] = decoded(part, data)


def _more_than_it_did(guest: Guest) -> Record:
    rng = guest.band.rng
    return {"samples": 2 * guest.band.target, "norm": 0.0, "receipt": rng.choice(["", rng.randbytes(64).hex()])}


async def _zeros(guest: Guest, reducer: Outlet, parts: list[Part]) -> None:
    for part in parts:
        await reducer.send(as_bytes(part.encode(torch.zeros(part.end - part.start))))
    for _ in parts:
        await reducer.receive(40)


async def _not_finite(guest: Guest, reducer: Outlet, parts: list[Part]) -> None:
    for part in parts:
        await reducer.send(b"\xff" * part.num_bytes)  # a NaN in every format of ours that has one
    await reducer.receive(60)


async def _nothing(guest: Guest, reducer: Outlet, parts: list[Part]) -> None:
    await reducer.receive(120)


async def sign_flip(band: Band) -> None:
    await contribute(band, _garbage)


async def over_claimed(band: Band) -> None:
    await contribute(band, _zeros, _more_than_it_did)


async def nan(band: Band) -> None:
    await contribute(band, _not_finite)


async def absent(band: Band) -> None:
    await contribute(band, None)


async def silent(band: Band) -> None:
    await contribute(band, _nothing)


async def wrong_tickets(band: Band) -> None:
    """Come to whoever leads with what is no contribution."""
    (stranger,) = await band.come()
    guest = Guest(band, stranger, comes=lambda guest, peer, parent: {"coming": False}, waiting_samples=0)
    await guest.settle_in()
    seen = asyncio.create_task(guest.be_seen())
    band.arrived()
    try:
        while True:
            peers = sorted(guest.honest)
            await asyncio.gather(*(_bring(guest, band.rng.choice(peers), band.rng.uniform(0, _LOOK_SECONDS)) for _ in peers))
    finally:
        seen.cancel()


async def _bring(guest: Guest, peer: str, after: float) -> None:
    rng, most = guest.band.rng, 2 * guest.band.target
    await asyncio.sleep(after)
    if peer not in guest.honest:  # it has gone meanwhile
        return
    ticket = {"parent": guest.honest[peer]["digest"], "number": rng.randrange(1, 5_000), "samples": most, "norm": 1.0, "reduces": False}
    wrong = rng.choice([{"samples": 0}, {"norm": -1.0}, {"samples": most + rng.randint(1, 2**40)}, {"number": 0}, {"number": 2**40}, {"reduces": True}, {"parent": "f" * 64}, {}])
    with contextlib.suppress(Gone):
        frames = await guest.stranger.open(peer, JOIN)
        with contextlib.closing(frames):
            await frames.send({**ticket, **wrong})
            while "wait" in (await frames.receive(15))[0]:
                pass


# ------------------------------------------------------------------ reducers

Mean = tuple[bytes, float]
"""A part's encoded mean, and its sum of squares."""


class Reducer:
    """Assists: brings no samples, reduces its share, and gives means of its own. lies: (part, what a member sent) -> a mean.

    to_all: whether all members of a group are told the same.
    """

    enters_as = Guest

    def __init__(self, band: Band, lies: Callable[[Part, bytes], Mean], *, to_all: bool = True):
        self.band, self._lies, self._to_all = band, lies, to_all
        self._shares: dict[str, tuple[list[Part], set[str]]] = {}
        self._told: dict[tuple[str, int], Mean] = {}

    async def run(self) -> None:
        (stranger,) = await self.band.come()
        guest = self.enters_as(self.band, stranger, comes=self._comes, waiting_samples=0, samples_per_second=0.0, phase="assist")
        await stranger.serve(REDUCE, self._reduce)
        await guest.settle_in()
        seen = asyncio.create_task(guest.be_seen())
        self.band.arrived()
        try:
            while True:
                await guest.called.wait()
                guest.called.clear()
                with contextlib.suppress(Gone):
                    await self._take_part(guest)
        finally:
            seen.cancel()

    @staticmethod
    def _comes(guest: Guest, peer: str, parent: str) -> Record:
        # Where it would have to lead, it is elsewhere: an honest leader's group is all that it needs.
        return {"coming": not all(guest.ranks_before(other, parent) for other in guest.honest)}

    async def _take_part(self, guest: Guest) -> None:
        parent = guest.onto
        group = await guest.join({"parent": parent, "number": 0, "samples": 0, "norm": 0.0, "reduces": True})
        share = share_out(parent, group["reducers"], guest.wire.parts)[guest.stranger.peer_id]
        senders = {member[0] for member in group["members"]}
        self._shares[group_id(parent, group)] = [guest.wire.parts[index] for index in share], senders

    async def _reduce(self, frames: Frames) -> None:
        group = (await frames.receive(15))[0].get("group")
        for _ in range(100):  # the leader's word may come after a member's
            if group in self._shares:
                break
            await asyncio.sleep(0.1)
        parts, senders = self._shares.get(group, ([], set()))
        for part in parts:
            _, sent = await frames.receive(40) if frames.peer in senders else ({}, b"")
            data, square = self._lie(group, part, sent)
            await frames.send({"square": square}, data)

    def _lie(self, group: str, part: Part, sent: bytes) -> Mean:
        if not self._to_all:
            return self._lies(part, sent)
        name = (group, part.start)
        if name not in self._told:
            self._told[name] = self._lies(part, sent)
        return self._told[name]


def _random_mean(band: Band, part: Part) -> Mean:
    data = as_bytes(part.encode(random_values(band.rng.randrange(2**60), part) * 10.0 ** band.rng.uniform(0, 4.7)))
    return data, float(torch.linalg.vector_norm(decoded(part, data), dtype=torch.float64)) ** 2


async def wrong_means(band: Band) -> None:
    await Reducer(band, lambda part, sent: _random_mean(band, part)).run()


async def split_means(band: Band) -> None:
    await Reducer(band, lambda part, sent: _random_mean(band, part), to_all=False).run()


async def huge_norm(band: Band) -> None:
    await Reducer(band, lambda part, sent: (sent or bytes(part.num_bytes), 10.0 ** band.rng.uniform(280, 301))).run()


# ------------------------------------------------------------------ leaders


async def _lead_nobody(band: Band, identities: int) -> None:
    """Promise to lead wherever one of us ranks first, keep those waiting who come, and never close a group."""
    guests = [
        Guest(band, stranger, comes=lambda guest, peer, parent: {"busy": guest.ranks_before(peer, parent)})
        for stranger in await band.come(identities)
    ]
    for guest in guests:
        await guest.stranger.serve(JOIN, _keep_waiting)
        await guest.settle_in()
    seen = [asyncio.create_task(guest.be_seen()) for guest in guests]
    band.arrived()
    try:
        await asyncio.gather(*seen)
    finally:
        for task in seen:
            task.cancel()


async def _keep_waiting(frames: Frames) -> None:
    await frames.receive()
    while True:
        await frames.send({"wait": True})
        await asyncio.sleep(3)


async def stalling_leader(band: Band) -> None:
    await _lead_nobody(band, 1)


async def stalling_leaders(band: Band) -> None:
    await _lead_nobody(band, 3)
