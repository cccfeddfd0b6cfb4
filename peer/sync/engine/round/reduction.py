"""Our share of a round: parts come in from all members, and each average is made once.

Memory: `PARTS_OF_A_SENDER` (averaging.py) encoded parts of each sender, and two parts in float32; one of each sender where they are centered.
"""

import asyncio
import contextlib
import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peer.sync.engine.codec import PART_ELEMENTS, Part, Wire, rough_square, square_norm
from peer.sync.engine.net.streams import Channel, PeerLost
from peer.sync.engine.round.centering import centre, products
from peer.sync.engine.round.clipping import UNCLIPPED, Clipping, ReceivedMeans, StatedNorms
from peer.sync.engine.round.excerpts import Excerpts
from peer.sync.engine.round.groups import Group
from peer.sync.engine.round.share_seals import Given, SealedShare, ShareSeals
from swarm.statements import Input, inputs_digest
from swarm.tasks import within
from swarm.weights import even_shares
from swarm.wrong_means import MOST_SENDERS

PART_SECONDS = 30.0
COME_SECONDS = 15.0
"""Every member has dialled every reducer by then, or it died after the group was closed and nobody need wait longer."""
SLOWEST_BYTES_PER_SECOND = 125_000


@dataclass(frozen=True)
class Strangers:
    """Who in a group has less time than the others: `seconds` for its first word, and for each part, as far as its link may be
    as slow as documented."""

    peers: frozenset[str] = frozenset()
    seconds: float = PART_SECONDS

    def for_part(self, wire: Wire, reducers: int) -> float:
        largest = max((part.num_bytes for part in wire.parts), default=0)
        return min(self.seconds + largest * reducers / SLOWEST_BYTES_PER_SECOND, PART_SECONDS)


@dataclass
class Traffic:
    """Bytes that this peer sent and received, headers included, and the seconds from the group to the whole average.

    `up` still grows while slower members take the last of our averages.
    """

    up: int = 0
    down: int = 0
    seconds: float = 0.0


@dataclass
class Run:
    """One average on its way: what goes in, and what has come of it so far."""

    group: Group
    mine: Tensor | None
    result: Tensor
    squares: list[float]
    """Of each part of the mean."""
    strangers: Strangers = field(default_factory=Strangers)
    received: ReceivedMeans = field(default_factory=lambda: ReceivedMeans(math.inf))
    missing: dict[str, int] = field(default_factory=dict)
    """Reducer -> how many means it still owes us."""
    last_mean: dict[str, float] = field(default_factory=dict)
    """Reducer -> when it gave us its last one, by the loop's clock."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with each of them, so that nobody sits out the deadline of one that has come."""
    traffic: Traffic = field(default_factory=Traffic)
    shares: dict[str, SealedShare] = field(default_factory=dict)
    """Reducer -> what it signed for us; in a run for members."""
    sent: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    """Reducer -> the hashes of the parts that we sent for its share, ours included; likewise."""
    void: bool = False
    """Whether a reducer has told us that nobody has the whole mean, nor ever will."""

    @functools.cached_property
    def _scratch(self) -> Tensor:
        """Kept for all means: fresh memory for each would be page faults."""
        return torch.empty(PART_ELEMENTS)

    def got_mean(self, reducer: str, index: int, part: Part, told: float) -> None:
        """One part of the mean is in `result`. told: its sum of squares, as its reducer says. Raises PeerLost."""
        values = decode(reducer, part, part.bytes_of(self.result), self._scratch)
        self.received.add(reducer, told, rough_square(values))
        self.squares[index] = told
        self.last_mean[reducer] = asyncio.get_running_loop().time()
        self.missing[reducer] -= 1
        if not self.missing[reducer]:
            del self.missing[reducer]
        self.news.set()

    def count(self, channel: Channel) -> None:
        self.traffic.up += channel.sent
        self.traffic.down += channel.received


class Reduction:
    """Our share within one group: parts come in from all members, each average is made once when its last part is there."""

    def __init__(
        self, run: Run, parts: Sequence[Part], indices: Sequence[int], wire: Wire, clipping: Clipping = UNCLIPPED,
        excerpts: Excerpts | None = None,
    ):  # fmt: skip
        self.run, self.parts, self._indices, self._excerpts = run, parts, indices, excerpts
        self._strangers = run.strangers.peers
        self._strangers_come_seconds = min(run.strangers.seconds, COME_SECONDS)
        self._strangers_part_seconds = run.strangers.for_part(wire, len(run.group.reducers))
        members = run.group.weighed
        self.senders = {member.peer for member in members}
        self._takers = self.senders | set(run.group.reducers)
        self._came: set[str] = set()
        self._all_came = asyncio.Event()
        self._factors = dict(zip((member.peer for member in members), clipping.factors(members, run.group.norms), strict=True))
        self._samples = {member.peer: member.samples for member in members}
        self._all_samples = sum(self._samples.values())
        self._shares = even_shares([self._samples[peer] for peer in sorted(self.senders)]) if clipping.centered else None
        self._stated = StatedNorms(members, run.group.norms) if clipping.times and run.group.norms else None
        # Kept for all parts: fresh memory for each would be page faults.
        self._scratch = torch.empty(2 if self._shares is None else 1 + len(self.senders), PART_ELEMENTS)
        self._received: list[dict[str, Tensor]] = [{} for _ in parts]
        self._means = [asyncio.get_running_loop().create_future() for _ in parts]
        self.inputs: dict[str, Input] = {}
        """Sender -> what it signed; in a run for members."""
        self._signature: asyncio.Future[tuple[str, str, str]] | None = None

    def came(self, peer: str) -> None:
        """`peer` wants to send its parts and take the averages, which it may do once. Raises PeerLost."""
        if peer not in self._takers:
            raise PeerLost("not a member of this group")
        if peer in self._came:
            raise PeerLost("sending already")
        self._came.add(peer)
        if self._came >= self.senders:
            self._all_came.set()

    async def fail_unless_all_come(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for seconds, awaited in ((self._strangers_come_seconds, self._strangers), (COME_SECONDS, self.senders)):
            with contextlib.suppress(asyncio.TimeoutError):
                return await within(began + seconds - loop.time(), self._all_came.wait())
            if absent := sorted((self.senders & awaited) - self._came):
                return self.fail(PeerLost(f"{names(absent)} did not come", absent))

    def add(self, peer: str, index: int, data: Tensor) -> None:
        """One encoded part of one member, of the right length."""
        if self._means[index].done():
            return
        if self._excerpts is not None:
            self._excerpts.keep(peer, index, data)
        self._received[index][peer] = data
        if len(self._received[index]) == len(self.senders):
            try:
                self._means[index].set_result(self._average(index))
            except PeerLost as error:
                self.fail(error)
            except ValueError as error:
                self.fail(PeerLost(f"the average has {error}"))
            self._received[index] = {}

    async def mean(self, index: int) -> tuple[Tensor, float]:
        """The encoded average of one part, and its sum of squares. Raises PeerLost when it cannot be had any more."""
        future, loop = self._means[index], asyncio.get_running_loop()
        began = loop.time()
        for seconds, awaited in ((self._strangers_part_seconds, self._strangers), (PART_SECONDS, self.senders)):
            if not future.done():
                await asyncio.wait([future], timeout=began + seconds - loop.time())
            # Of peers that we have met, a part may take longer, and a stranger's may be held up by nothing but that.
            missing = sorted(self.senders - self._received[index].keys())
            if not future.done() and awaited.issuperset(missing):
                self.fail(PeerLost(f"{names(missing)} sent no part for {seconds:g} s", missing))
        return future.result()

    @property
    def signed_inputs(self) -> tuple[Input, ...]:
        """By the order of their senders."""
        return tuple(self.inputs[peer] for peer in sorted(self.inputs))

    @property
    def shown_inputs(self) -> tuple[Input, ...]:
        """Those that go with our mean: none in a group that is too large to be checked."""
        return self.signed_inputs if len(self.senders) <= MOST_SENDERS else ()

    async def signature(self, seals: ShareSeals) -> tuple[str, str, str]:
        """Ours for the whole mean of our share, which is there, our key, and the digest of what it was made of; made once."""
        if self._signature is None:
            means = [(part, *mean.result()) for part, mean in zip(self.parts, self._means, strict=True)]
            inputs = inputs_digest(self.signed_inputs)

            def sign() -> tuple[str, str, str]:  # in a thread: a share of 860 MB takes a second to hash
                return *seals.sign(self.run.group.id, Given(means).digest(inputs)), inputs

            self._signature = asyncio.get_running_loop().run_in_executor(None, sign)
        return await asyncio.shield(self._signature)

    async def whole(self) -> None:
        """Wait until all parts are averaged, or none will be any more."""
        await asyncio.wait(self._means)

    def late(self) -> set[str]:
        """Those for whom all others wait: whose part is missing in the first that is not made. Of later parts, who waits for these misses some, too."""
        open_parts = (received for received, mean in zip(self._received, self._means, strict=True) if not mean.done())
        return self.senders.difference(next(open_parts, self.senders))

    @property
    def void(self) -> bool:
        """Whether a part of our share was given up before it was made. It never will be, so nobody has the whole mean, nor ever will."""
        return any(mean.done() and mean.exception() is not None for mean in self._means)

    def fail(self, lost: PeerLost) -> None:
        """Give up what is not made: whoever takes it is told `lost`."""
        for future in self._means:
            if not future.done():
                lost.void = True
                future.set_exception(lost)
                future.exception()  # nobody need be waiting for it
        self._received = [{} for _ in self.parts]

    def _average(self, index: int) -> tuple[Tensor, float]:
        part = self.parts[index]
        total, *others = self._scratch[:, : part.end - part.start]
        (self._sum if self._shares is None else self._center)(index, total, others)
        encoded = part.bytes_of(self.run.result)
        if len(self.senders) == 1:  # as the one makes it that goes on alone with it: encoded anew, a block may get another scale
            encoded.copy_(*self._received[index].values())
        else:
            part.encode(total, encoded)
        # Decoding checks it: finite values may add up to more than a float holds.
        square = self.run.squares[self._indices[index]] = square_norm(part.decode(encoded, others[0]))
        return encoded, square

    def _sum(self, index: int, total: Tensor, others: Sequence[Tensor]) -> None:
        for count, peer in enumerate(sorted(self.senders)):
            into = self._read(index, peer, others[0] if count else total).mul_(
                self._samples[peer] / self._all_samples * self._factors[peer]
            )
            if count:
                total.add_(into)

    def _center(self, index: int, total: Tensor, others: Sequence[Tensor]) -> None:
        for peer, values in zip(sorted(self.senders), others, strict=True):
            self._read(index, peer, values).mul_(self._factors[peer])
        vectors = self._scratch[1:, : len(total)]
        torch.mv(vectors.T, centre(self._shares, products(vectors)).float(), out=total)

    def _read(self, index: int, peer: str, room: Tensor) -> Tensor:
        values = decode(peer, self.parts[index], self._received[index][peer], room)
        if self._stated is not None:
            self._stated.spend(peer, rough_square(values))
        return values


def decode(sender: str, part: Part, data: Tensor, room: Tensor) -> Tensor:
    """What `sender` sent, at the beginning of `room`. Raises PeerLost, which names it, for values that are not finite."""
    try:
        return part.decode(data, room[: part.end - part.start])
    except ValueError as error:
        raise PeerLost(f"{sender[-6:]} sent {error}", [sender]) from None


def names(peers: Collection[str]) -> str:
    return ", ".join(peer[-6:] for peer in peers)
