"""The swarm's state: anchor, outer optimizer tensors and header; bit-identical on every synced peer, and named by its digest.

Immutable: an outer step makes a new one. `samples` is hashed into it and only grows, which is what settles every fork.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from torch import Tensor

from peer.contracts import Member, Settlement
from peer.sync.engine.vectors import SharedBuffer
from swarm.digest import canonical_json

CHUNK_BYTES = 4 << 20
HASH_BYTES = 32
ANCESTORS_KEPT = 8


class BadState(ValueError):
    """A header or state that came over a network is malformed, or not the one its digest promises."""


@dataclass(frozen=True)
class Header:
    """What the digest covers besides the tensors.

    run, schema: digests of the configuration and of `params`' names, shapes and dtypes. included: peer -> number of its last
    contribution in this state. members: whose work the last round averaged. ancestors: settlements of the last ancestors, newest
    first, so that whoever holds a state can report what is in it. mean: digest of the average that the last round applied, so that
    whoever holds the parent can repeat it (replay.py); empty where it cannot be had.
    """

    run: str
    schema: str
    round: int = 0
    samples: int = 0
    parents: tuple[str, ...] = ()
    included: Mapping[str, int] = dataclasses.field(default_factory=dict)
    members: tuple[Member, ...] = ()
    ancestors: tuple[Settlement, ...] = ()
    mean: str = ""

    def child(self, digest: str, members: Iterable[Member], mean: str = "") -> "Header":
        """The header of the round that averages `members` onto this state, whose digest is `digest`."""
        members = tuple(sorted(members, key=lambda member: member.peer))
        ancestors = (self.settlement(digest), *self.ancestors) if self.round else ()
        return dataclasses.replace(
            self,
            round=self.round + 1,
            samples=self.samples + sum(member.samples for member in members),
            parents=(digest, *self.parents)[:ANCESTORS_KEPT],
            included={**self.included, **{member.peer: member.number for member in members}},
            members=members,
            ancestors=ancestors[:ANCESTORS_KEPT],
            mean=mean,
        )

    def settlement(self, digest: str) -> Settlement:
        """What to report of this state, whose digest is `digest`, once it is settled."""
        return Settlement(digest, self.parents[0], self.round, self.samples, self.members)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "Header":
        """Raises BadState."""
        try:
            header = cls(
                run=_text(values["run"]),
                schema=_text(values["schema"]),
                round=_count(values["round"]),
                samples=_count(values["samples"]),
                parents=tuple(_text(parent) for parent in values["parents"][:ANCESTORS_KEPT]),
                included={_text(peer): _count(number) for peer, number in values["included"].items()},
                members=_members(values["members"]),
                ancestors=tuple(
                    Settlement(_text(a["digest"]), _text(a["parent"]), _count(a["round"]), _count(a["samples"]), _members(a["members"]))
                    for a in values["ancestors"][:ANCESTORS_KEPT]
                ),
                mean=_text(values["mean"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BadState(f"header: {error!r}") from None
        header._check()
        return header

    def _check(self) -> None:
        """Raise BadState when it contradicts itself: an honest header counts every sample of its members once."""
        if not self.round:
            if self.samples or self.parents or self.members or self.included or self.mean:
                raise BadState("header: a round 0 with a past")
            return
        before = self.ancestors[0].samples if self.ancestors else 0
        if not self.parents or not self.members or self.samples != before + sum(member.samples for member in self.members):
            raise BadState(f"header: {self.samples} samples in round {self.round} are not those of its members and of its parent")
        if (self.ancestors and self.ancestors[0].digest != self.parents[0]) or (not self.ancestors and self.round > 1):
            raise BadState("header: the parent is not its first ancestor")
        if any(self.included.get(member.peer) != member.number or not member.samples for member in self.members):
            raise BadState("header: a member is not included")


class State:
    """A header and the tensors it stands for, in one shared buffer: the anchor, then the outer optimizer's tensors."""

    def __init__(self, header: Header, buffer: SharedBuffer, chunk_hashes: tuple[bytes, ...] | None = None):
        self.header, self.buffer = header, buffer
        self.chunk_hashes = chunk_hashes or tuple(hash_chunks(buffer.bytes()))
        self.digest = state_digest(header, self.chunk_hashes)

    def vectors(self, size: int) -> list[Tensor]:
        """[anchor, *outer tensors], each (size,) float32, views of the buffer."""
        return list(self.buffer.floats().split(size))

    def chunk(self, index: int) -> memoryview:
        """The bytes of one chunk; the last one may be short."""
        return memoryview(self.buffer.bytes()[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES].numpy())


def first_state(run: str, schema: str, anchor: Tensor, slots: int) -> State:
    """Round 0, a function of the run alone: the base model, and `slots` outer tensors of zeros."""
    buffer = SharedBuffer(anchor.numel() * 4 * (1 + slots))
    buffer.floats()[: anchor.numel()].copy_(anchor)
    return State(Header(run=run, schema=schema), buffer)


def next_state(
    state: State, pieces: Iterable[Sequence[Tensor]], members: Iterable[Member], mean: str = "", into: SharedBuffer | None = None
) -> State:
    """The state after one round: new tensors, and a header that names the parent and the mean that led from it to here.

    pieces: the vectors [anchor, *outer tensors] in consecutive slices, each written as soon as it comes. into: the memory to take, which
    may be that of `state` where it is needed no more.
    """
    buffer, at = into or SharedBuffer(state.buffer.num_bytes), 0
    for piece in pieces:
        end, targets = at + piece[0].numel(), buffer.floats().view(len(piece), -1)
        for target, vector in zip(targets, piece, strict=True):
            target[at:end].copy_(vector)
        at = end
    assert end == targets.shape[1], "the pieces are not the whole vectors"
    return State(state.header.child(state.digest, members, mean), buffer)


def hash_chunks(data: Tensor) -> Iterable[bytes]:
    """BLAKE3 of each CHUNK_BYTES of a uint8 vector."""
    for offset in range(0, data.numel(), CHUNK_BYTES):
        yield blake3(memoryview(data[offset : offset + CHUNK_BYTES].numpy())).digest()


def state_digest(header: Header, chunk_hashes: Iterable[bytes]) -> str:
    hasher = blake3(canonical_json(header.to_json()))
    for chunk_hash in chunk_hashes:
        hasher.update(chunk_hash)
    return hasher.hexdigest()


def mean_digest(square_norm: float, chunk_hashes: Iterable[bytes]) -> str:
    """What a state's header says of the mean that made it: the hashes of its encoded bytes, and its sum of squares."""
    return blake3(canonical_json({"square_norm": float(square_norm).hex()}) + b"".join(chunk_hashes)).hexdigest()


@dataclass(frozen=True)
class Head:
    """As much of a state as decides which of two is right."""

    digest: str
    samples: int

    @classmethod
    def of(cls, state: State) -> "Head":
        return cls(state.digest, state.header.samples)

    @classmethod
    def from_json(cls, values: Any) -> "Head":
        """Raises BadState."""
        try:
            return cls(_text(values["digest"]), _count(values["samples"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BadState(f"head: {error!r}") from None


def better(theirs: Head, ours: Head) -> bool:
    """Whether `theirs` is the right state of the two, for everyone alike: the one with more samples; else the smaller digest.

    A round always adds samples, so a descendant beats its ancestor, whatever anybody says about who descends from whom.
    """
    return theirs.digest != ours.digest and (theirs.samples, ours.digest) > (ours.samples, theirs.digest)


def _members(values: Any) -> tuple[Member, ...]:
    return tuple(Member(_text(m["peer"]), _count(m["number"]), _count(m["samples"])) for m in values)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 128:
        raise ValueError(f"text {str(value)[:40]!r}")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1 << 53:
        raise ValueError(f"count {str(value)[:40]!r}")
    return value
