"""Strangers that make states up, or hand them out so that nobody gets one."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np
from blake3 import blake3

from scripts.attacks.band import Band
from scripts.attacks.wire import CERTIFICATE, CHUNKS, HEAD, Frames, Gone, Record, Stranger, newest
from swarm.digest import ELDER_CHARACTERS, canonical_json

_CHUNK_BYTES, _PIECE_BYTES = 4 << 20, 256 << 10
_MOST = 2**53
_LOOK_SECONDS = 0.7
_SOON_SECONDS = 0.1
"""Between two looks of who must be early: a state is fetched by then whose third signer comes a second later."""
_ENTRY_BYTES = 53
"""What a peer's number costs in a header."""


@dataclass(frozen=True)
class Made:
    """A state as it travels: a header, the tensors' bytes, and the digest that names both."""

    header: Record
    data: bytes

    @property
    def chunks(self) -> list[bytes]:
        return [self.data[at : at + _CHUNK_BYTES] for at in range(0, len(self.data), _CHUNK_BYTES)]

    @property
    def proof(self) -> bytes:
        return b"".join(blake3(chunk).digest() for chunk in self.chunks)

    @property
    def digest(self) -> str:
        return blake3(canonical_json(self.header) + self.proof).hexdigest()


async def fetch_header(stranger: Stranger, holders: Sequence[str], digest: str) -> tuple[Record, int]:
    """The header of a state, and how many bytes its tensors have; asked for as any newcomer would. Raises Gone."""
    for holder in holders:
        with contextlib.suppress(Gone):
            frames = await stranger.open(holder, CHUNKS)
            with contextlib.closing(frames):
                await frames.send({"digest": digest})
                answer, proof = await frames.receive()
                *_, last = [0, *range(0, len(proof), 32)]
                size = last // 32 * _CHUNK_BYTES + await _chunk_bytes(frames, last // 32)
                await frames.send({"chunk": None})
                return answer["header"], size
    raise Gone("nobody gives that state any more")


async def _chunk_bytes(frames: Frames, index: int) -> int:
    """How long a chunk is: ask for it, and count what comes in two seconds."""
    await frames.send({"chunk": index})
    count = 0
    with contextlib.suppress(Gone):
        while count < _CHUNK_BYTES:
            _, piece = await frames.receive(2)
            count += len(piece)
            if len(piece) < _PIECE_BYTES:
                break
    return count


def child_of(header: Record, digest: str, *members: Record) -> Record:
    """The header of a round that only `members` took part in; everything adds up."""
    final = {name: header[name] for name in ("round", "samples", "members")}
    ancestors = [{**final, "digest": digest, "parent": header["parents"][0]}, *header["ancestors"]] if header["round"] else []
    return {
        **header,
        "round": header["round"] + 1,
        "samples": header["samples"] + sum(member["samples"] for member in members),
        "parents": [digest, *header["parents"]][:8],
        "included": header["included"] | {member["peer"]: member["number"] for member in members},
        "members": list(members),
        "ancestors": ancestors[:8],
    }


Edit = Callable[[Band, Record, str], Record]
"""What becomes of the honest header: (band, header, its digest) -> a forged one."""


def _member(band: Band, header: Record, samples: int) -> Record:
    """Ourselves, or somebody who is in the state, with its next number."""
    peers = [band.strangers[0].peer_id, *header["included"]]
    peer = band.rng.choice(peers)
    return {"peer": peer, "number": header["included"].get(peer, 0) + band.rng.randint(1, 9), "samples": samples}


def _many_samples(band: Band, header: Record, digest: str) -> Record:
    left = _MOST - header["samples"]
    return child_of(header, digest, _member(band, header, band.rng.choice([left, band.rng.randrange(2**40, left)])))


def _few_samples(band: Band, header: Record, digest: str) -> Record:
    return child_of(header, digest, _member(band, header, band.rng.choice([1, band.rng.randint(1, 2 * band.target)])))


def _burnt_number(band: Band, header: Record, digest: str) -> Record:
    child = _few_samples(band, header, digest)
    victims = [peer for peer in header["included"] if peer != child["members"][0]["peer"]]
    return {**child, "included": {**child["included"], **{victim: _MOST - band.rng.randint(1, 1000) for victim in victims}}}


def _long_header(band: Band, header: Record, digest: str) -> Record:
    child, wanted = _few_samples(band, header, digest), band.rng.randint(120_000, 250_000)
    included = dict(child["included"])
    for _ in range((wanted - len(msgpack.packb(child))) // _ENTRY_BYTES):
        included["Qm" + band.rng.randbytes(22).hex().replace("0", "g")] = 1 + band.rng.getrandbits(20)
    return {**child, "included": included}


class Shelf:
    """Forged states, given by all identities of a band; seconds_a_byte: 0 gives at once."""

    def __init__(self, band: Band, seconds_a_byte: float = 0.0):
        self._band, self._slowly = band, seconds_a_byte
        self._states: dict[str, Made] = {}
        self.head: Made | None = None
        self.evidence: Record = {"line": ""}
        """What an honest peer shows for the state before: anybody can show it again."""

    async def open(self) -> None:
        for stranger in self._band.strangers:
            await stranger.serve(CHUNKS, self._give)
            await stranger.serve(HEAD, self._tell)
            await stranger.serve(CERTIFICATE, self._show)

    def put(self, state: Made) -> str:
        digest = state.digest
        self.head = self._states[digest] = state
        self._band.say(event="forged", digest=digest, samples=state.header["samples"])
        return digest

    async def _tell(self, frames: Frames) -> None:
        if self.head:
            header = self.head.header
            await frames.send({"digest": self.head.digest, "samples": header["samples"], "parents": header["parents"]})

    async def _show(self, frames: Frames) -> None:
        """That the newest forgery comes after all that was certified."""
        if self.head:
            await frames.send({**self.evidence, "line": self.head.digest[:ELDER_CHARACTERS] + self.evidence["line"]})

    async def _give(self, frames: Frames) -> None:
        request, _ = await frames.receive()
        state = self._states.get(request.get("digest"))
        if state is None or request.get("mean"):
            return await frames.send({"error": "not here"})
        await frames.send({"header": state.header}, state.proof)
        while True:
            request, _ = await frames.receive(300)
            if request.get("chunk") is None:
                return
            chunk = state.chunks[request["chunk"]]
            for at in range(0, len(chunk), _PIECE_BYTES):
                if self._slowly:
                    await frames.send_slowly({}, chunk[at : at + _PIECE_BYTES], self._slowly)
                else:
                    await frames.send({}, chunk[at : at + _PIECE_BYTES])


class Forger:
    """Puts a forged descendant of the newest honest state on the shelf, again and again. decades: of its values, from 1 on."""

    def __init__(self, band: Band, shelf: Shelf, edit: Edit, decades: float = 30):
        self._band, self._shelf, self._edit, self._decades, self._size = band, shelf, edit, decades, 0
        self._noise = np.random.default_rng(band.rng.randrange(2**32))

    async def forge(self) -> Record:
        """A record that promises the new forgery. Raises Gone."""
        honest = await self._band.honest()
        head = await self._band.head()
        holders = [peer for peer, record in honest.items() if record["digest"] == head["digest"]]
        header, size = await fetch_header(self._band.strangers[0], holders, head["digest"])
        self._size = size or self._size
        self._shelf.evidence = await self._evidence_of(holders)
        forged = self._edit(self._band, header, head["digest"])
        # Finite, and as far from anything learned as float32 goes.
        scale = 10.0 ** self._band.rng.uniform(0, self._decades)
        digest = self._shelf.put(Made(forged, (self._noise.standard_normal(self._size // 4) * scale).astype("<f4").tobytes()))
        told = {"digest": digest, "samples": forged["samples"], "round": forged["round"], "parents": forged["parents"]}
        return self._band.waiting(head, **told, waiting_samples=0)

    async def _evidence_of(self, holders: Sequence[str]) -> Record:
        """What one of these shows to who asks; nothing in an open run, where nobody is asked."""
        if self._band.run["run"].get("members_of"):
            for holder in holders:
                with contextlib.suppress(Gone):
                    return await self._band.strangers[0].ask(holder, CERTIFICATE)
        return {"line": ""}


async def _sign_forgeries(band: Band, edit: Edit, *, identities: int = 1, again_seconds: float, slowly: float = 0.0) -> None:
    """Sign and give a forgery, and after a while a newer one."""
    await band.come(identities)
    shelf = Shelf(band, slowly)
    await shelf.open()
    forger, record, until = Forger(band, shelf, edit), None, 0.0
    band.arrived()
    clock = asyncio.get_running_loop().time
    while True:
        if record is None or clock() >= until:
            with contextlib.suppress(Gone):
                record, until = await forger.forge(), clock() + again_seconds
        if record:
            for stranger in band.strangers:
                await stranger.publish(band.run_id, {**record, "maddrs": await stranger.addresses()})
        await asyncio.sleep(_LOOK_SECONDS)


async def made_up_state(band: Band) -> None:
    await _sign_forgeries(band, _many_samples, again_seconds=20)


async def one_more_sample(band: Band) -> None:
    await _sign_forgeries(band, _few_samples, again_seconds=0)


async def burnt_number(band: Band) -> None:
    await _sign_forgeries(band, _burnt_number, again_seconds=0)


async def long_header(band: Band) -> None:
    await _sign_forgeries(band, _long_header, again_seconds=0)


async def drip_donor(band: Band) -> None:
    await _drip(band, 3)


async def drip_alone(band: Band) -> None:
    await _drip(band, 1)


async def _drip(band: Band, identities: int) -> None:
    await _sign_forgeries(band, _many_samples, identities=identities, again_seconds=60, slowly=band.rng.uniform(1, 4))


async def false_copies(band: Band) -> None:
    """Three identities stand on everybody's newest state, and give it and its mean as they are but for one place."""
    stranger, *_ = await band.come(3)
    copies: dict[tuple[str, bool], _Copy] = {}

    async def give(frames: Frames) -> None:
        request, _ = await frames.receive()
        copy = copies.get((request.get("digest"), bool(request.get("mean"))))
        if copy is None:
            return await frames.send({"error": "not here"})
        await copy.give(frames, band.rng.choice(["header", "hash", "byte", "length"]))

    for each in band.strangers:
        await each.serve(CHUNKS, give)
    band.arrived()
    while True:
        with contextlib.suppress(Gone):
            honest = await band.honest()
            head = newest(honest)
            holders = [peer for peer, record in honest.items() if record["digest"] == head["digest"]]
            for mean in (False, True):
                if (head["digest"], mean) not in copies:
                    copies[head["digest"], mean] = await _Copy.taken(stranger, band.rng.choice(holders), {"digest": head["digest"], "mean": mean})
            for each in band.strangers:
                await each.publish(band.run_id, band.waiting(head, waiting_samples=0, maddrs=await each.addresses()))
        await asyncio.sleep(_SOON_SECONDS)


@dataclass(frozen=True)
class _Copy:
    """A state or a mean as another peer gives it: its offer with the hashes, and each chunk in pieces."""

    offer: Record
    proof: bytes
    chunks: list[list[bytes]]

    @classmethod
    async def taken(cls, stranger: Stranger, holder: str, request: Record) -> "_Copy":
        """Raises Gone."""
        frames = await stranger.open(holder, CHUNKS)
        with contextlib.closing(frames):
            await frames.send(request)
            offer, proof = await frames.receive()
            chunks = -(-offer["num_bytes"] // _CHUNK_BYTES) if request["mean"] else len(proof) // 32
            copy = cls(offer, proof, [await _chunk(frames, index) for index in range(chunks)])
            await frames.send({"chunk": None})
            return copy

    async def give(self, frames: Frames, lie: str) -> None:
        header = {**self.offer["header"], "samples": -1} if lie == "header" else self.offer["header"]
        await frames.send({**self.offer, "header": header}, bytes(len(self.proof)) if lie == "hash" else self.proof)
        while (index := (await frames.receive(300))[0].get("chunk")) is not None:
            for piece in self.chunks[index]:
                await frames.send({}, {"byte": bytes([piece[0] ^ 1]) + piece[1:], "length": piece[1:]}.get(lie, piece))


async def _chunk(frames: Frames, index: int) -> list[bytes]:
    await frames.send({"chunk": index})
    pieces = [(await frames.receive())[1]]
    while len(pieces[-1]) == _PIECE_BYTES and len(pieces) < _CHUNK_BYTES // _PIECE_BYTES:
        pieces.append((await frames.receive())[1])
    return pieces


async def export_votes(band: Band) -> None:
    """One that gives the state, and six keys that sign it too."""
    (stranger,) = await band.come()
    shelf = Shelf(band)
    await shelf.open()
    band.keys = band.draw_keys(6)
    forger, record = Forger(band, shelf, _few_samples), None
    while record is None:
        with contextlib.suppress(Gone):  # the state that it looked at may be old by now
            record = await forger.forge()
    while (await band.head())["samples"] <= record["samples"]:
        await asyncio.sleep(_LOOK_SECONDS)  # those who train shall not want it: only who counts signatures
    await _vote(band, stranger, record)
    band.arrived()
    while True:
        await _vote(band, stranger, record)
        await asyncio.sleep(4)


async def _vote(band: Band, stranger: Stranger, record: Record) -> None:
    for key in (stranger.key, *band.keys):
        await stranger.publish(band.run_id, {**record, "maddrs": await stranger.addresses()}, key)


async def slot_hog(band: Band) -> None:
    """Four identities download from everybody for ever: a chunk now and then, slowly, and never the last."""
    await band.come(4)
    band.arrived()
    hogs: dict[tuple[str, str], asyncio.Task] = {}
    while True:
        for peer in await band.honest():
            for stranger in band.strangers:
                if (stranger.peer_id, peer) not in hogs or hogs[stranger.peer_id, peer].done():
                    hogs[stranger.peer_id, peer] = asyncio.create_task(_hog(band, stranger, peer))
        await asyncio.sleep(0.3)


async def _hog(band: Band, stranger: Stranger, peer: str) -> None:
    with contextlib.suppress(Gone):
        head = await stranger.ask(peer, HEAD)
        frames = await stranger.open(peer, CHUNKS)
        with contextlib.closing(frames):
            await frames.send({"digest": head["digest"]})
            await frames.receive()
            while True:
                await frames.send({"chunk": band.rng.choice([0, 0, 0, 1 << 20])})
                await asyncio.sleep(band.rng.uniform(2, 30))
                await frames.swallow()
    await asyncio.sleep(0.2)
