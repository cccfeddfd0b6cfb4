"""The swarm's state: anchor, outer optimizer tensors and header; bit-identical on every synced peer, and named by its digest.

Immutable: an outer step makes a new one. `samples` is hashed into it and only grows, which is what ends every fork.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
from blake3 import blake3
from torch import Tensor

from peer.contracts import CommittedRound, Member
from peer.sync.engine.vectors import SharedBuffer
from swarm.digest import ELDER_CHARACTERS, canonical_json

CHUNK_BYTES = 4 << 20
HASH_BYTES = 32
ANCESTORS_KEPT = 8
ELDERS_KEPT = 504
"""Older ancestors, by the first characters of their digests: with the others 512 rounds, 6 KB. A newcomer that took over round 27 and met
two peers that had come back at round 10 went back to it: to tell an ancestor from a branch by eight names is not enough."""
MAX_HEADER_BYTES = 256 << 10
"""Of a header, packed. Some 370 members in every round fit with all their ancestors. The limits of a stream's messages and of those to
the trainer follow from this one: a header above the one and below the other ended every process that took it over."""
MOST_MEMBERS = 512
"""Of a round. Twice this many, with the contributions of as many, are 180 KiB: the next header always fits."""
MOST_COUNT = 1 << 53
_MOST_BYTES_OF_A_PEER, _MOST_BYTES_BESIDE_PEERS = 112, 16 << 10
"""Of a packed header: an id of 64 characters with number and samples by name are 105 bytes; all elders, parents and other texts 8 KB."""
_SAMPLES, _NUMBER = operator.attrgetter("samples"), operator.attrgetter("number")
"""Of a member. A header names up to 4,600 members, and a generator takes three times as long."""
_FREE_NUMBERS, _NUMBERS_PER_ROUND = 10_000, 100
"""A forged number may not be so high that the one whose it is can never count beyond it."""


class BadState(ValueError):
    """A header or state that came over a network is malformed, or not the one its digest promises."""


@dataclass(frozen=True)
class Header:
    """What the digest covers besides the tensors.

    run, schema: digests of the configuration and of `params`' names, shapes and dtypes. included: peer -> number of its last
    contribution in this state. members: whose work the last round averaged. ancestors: rounds of the last ancestors, newest
    first, so that whoever holds a state can report what is in it. mean: digest of the average that the last round applied, so that
    whoever holds the parent can repeat it (replay.py); empty where it cannot be had. elders: the ancestors before `parents`, newest first,
    ELDER_CHARACTERS of each digest. group: the name of the group that made it, in a run for members: a proof that one of its reducers gave a
    wrong mean names it (`swarm/wrong_states.py`); '' elsewhere.
    """

    run: str
    schema: str
    round: int = 0
    samples: int = 0
    parents: tuple[str, ...] = ()
    included: Mapping[str, int] = dataclasses.field(default_factory=dict)
    members: tuple[Member, ...] = ()
    ancestors: tuple[CommittedRound, ...] = ()
    mean: str = ""
    elders: str = ""
    group: str = ""

    def child(self, digest: str, members: Iterable[Member], mean: str = "", group: str = "") -> "Header":
        """The header of the round that averages `members` onto this state, whose digest is `digest`. Raises BadState if nobody would take it."""
        members = tuple(sorted(members, key=lambda member: member.peer))
        ancestors = (self.committed_round(digest), *self.ancestors) if self.round else ()
        parents = (digest, *self.parents)
        child = dataclasses.replace(
            self,
            round=self.round + 1,
            samples=self.samples + sum(member.samples for member in members),
            parents=parents[:ANCESTORS_KEPT],
            included={**self.included, **{member.peer: member.number for member in members}},
            members=members,
            ancestors=ancestors[:ANCESTORS_KEPT],
            mean=mean,
            group=group,
            elders=_elders(parents[ANCESTORS_KEPT:], self.elders),
        )
        if len(members) > MOST_MEMBERS or child.samples > MOST_COUNT:
            raise BadState(f"{len(members)} members and {child.samples} samples are more than a state may have")
        return _fitted(child)

    def past(self) -> Iterator[str]:
        """The ancestors that it names, the parent first: digests, and ELDER_CHARACTERS of those before ANCESTORS_KEPT."""
        yield from self.parents
        for at in range(0, len(self.elders), ELDER_CHARACTERS):
            yield self.elders[at : at + ELDER_CHARACTERS]

    @property
    def num_bytes(self) -> int:
        """Packed, as it travels."""
        return len(msgpack.packb(self.to_json()))

    @property
    def is_too_large(self) -> bool:
        """Whether it has more than MAX_HEADER_BYTES. It is not packed where so few peers cannot make it that large."""
        named = len(self.included) + len(self.members) + sum(len(ancestor.members) for ancestor in self.ancestors)
        return _MOST_BYTES_BESIDE_PEERS + named * _MOST_BYTES_OF_A_PEER > MAX_HEADER_BYTES and self.num_bytes > MAX_HEADER_BYTES

    def committed_round(self, digest: str) -> CommittedRound:
        """What to report of this state, whose digest is `digest`, once it is final."""
        return CommittedRound(digest, self.parents[0], self.round, self.samples, self.members)

    def to_json(self) -> dict[str, Any]:
        return dict(self._plain)

    @functools.cached_property
    def _plain(self) -> dict[str, Any]:
        """Made once: a state is hashed, stored, handed out and given to the trainer, and each wants its header so."""
        # `dataclasses.asdict` copies each of some hundred members field by field: a tenth of a small swarm's CPU time.
        members, ancestors = _plain(self.members), [{**vars(a), "members": _plain(a.members)} for a in self.ancestors]
        values = {**vars(self), "included": dict(self.included), "members": members, "ancestors": ancestors}
        for name in ("elders", "group"):  # a state on disk from before there were any keeps its digest
            if not values[name]:
                del values[name]
        return values

    @functools.cached_property
    def json(self) -> bytes:
        """Canonical, in one line: what the digest is of, and what a state's file and its mean's begin with.

        Seven of the eight ancestors were the parent's as well, and are most of it: with 200 members in each round, 140 of 160 KB.
        """
        others = canonical_json({name: value for name, value in self._plain.items() if name != "ancestors"})
        return b'{"ancestors":[' + b",".join(map(_json, self.ancestors)) + b"]," + others[1:]

    def check(self) -> None:
        """Raise BadState when it contradicts itself: an honest header counts every sample of its members once."""
        if not self.round:
            if self.samples or self.parents or self.members or self.included or self.mean or self.elders or self.group:
                raise BadState("header: a round 0 with a past")
            return
        if not self.parents or len(self.parents) - len(self.ancestors) != (len(self.parents) == self.round):
            raise BadState(f"header: {len(self.parents)} parents and {len(self.ancestors)} ancestors in round {self.round}")
        if len(self.elders) % ELDER_CHARACTERS or len(self.parents) + len(self.elders) // ELDER_CHARACTERS > self.round:
            raise BadState(f"header: {len(self.elders)} characters of elders in round {self.round}")
        if [state.digest for state in self.ancestors] != [*self.parents][: len(self.ancestors)]:
            raise BadState("header: the parents are not its ancestors")
        for state, before in itertools.zip_longest((self.committed_round(""), *self.ancestors), self.ancestors):
            self._check_step(state, before)
        if any(self.included.get(member.peer) != member.number for member in self.members):
            raise BadState("header: a member is not included")

    def _check_step(self, state: CommittedRound, before: CommittedRound | None) -> None:
        """Raise BadState unless `state` counts every sample of its members once, on top of `before`; None: the first one, or not told."""
        brought = list(map(_SAMPLES, state.members))
        if not brought or not all(brought) or not all(map(_NUMBER, state.members)):
            raise BadState(f"header: round {state.round} has no members, or one without samples")
        if before is None and state.round > 1:
            return
        rounds, samples = (before.round, before.samples) if before is not None else (0, 0)
        if state.round != rounds + 1 or state.samples != samples + sum(brought):
            raise BadState(f"header: {state.samples} samples in round {state.round} are not those of its members and of its parent")
        if before is not None and state.parent != before.digest:
            raise BadState("header: the parent is not its first ancestor")

    def check_bounds(self, target: int) -> None:
        """Raise BadState when it is beyond what an honest swarm does whose rounds have `target` samples.

        A member brings at most twice the target: its training pauses there. Its numbers go up by one a contribution, of which a round
        takes one; others are lost when a branch loses or a process dies.
        """
        for members in (self.members, *(ancestor.members for ancestor in self.ancestors)):
            for member in members:
                if member.samples > 2 * target:
                    raise BadState(f"header: {member.samples} samples of one member, at most {2 * target} are allowed")
        if not self.round <= self.samples <= self.round * MOST_MEMBERS * 2 * target:
            raise BadState(f"header: {self.samples} samples in {self.round} rounds")
        highest = max(self.included.values(), default=0)
        if highest > highest_number(self.round):
            raise BadState(f"header: contribution number {highest} in round {self.round}")


def highest_number(round: int) -> int:
    """The highest number of a contribution that a state of `round` may hold."""
    return _FREE_NUMBERS + _NUMBERS_PER_ROUND * round


def _fitted(header: Header) -> Header:
    """`header` within MAX_HEADER_BYTES. It is hashed: what is left out, every peer leaves out.

    First the contributions of peers that were in none of the rounds named here. A peer that was away for longer gives up what it made
    before (`local_work.follows`), so nobody can bring one of these twice. Then the oldest ancestors, down to the parent; the list of
    parents, which decides who gives up, gets as short as theirs.
    """
    if not header.is_too_large:
        return header
    recent = {member.peer for members in (header.members, *(a.members for a in header.ancestors)) for member in members}
    header = dataclasses.replace(header, included={peer: number for peer, number in header.included.items() if peer in recent})
    while header.num_bytes > MAX_HEADER_BYTES and len(header.ancestors) > 1:
        ancestors = header.ancestors[:-1]
        parents, older = header.parents[: len(ancestors)], header.parents[len(ancestors) :]
        header = dataclasses.replace(header, ancestors=ancestors, parents=parents, elders=_elders(older, header.elders))
    return header


def _elders(newest: Iterable[str], others: str) -> str:
    return ("".join(digest[:ELDER_CHARACTERS] for digest in newest) + others)[: ELDERS_KEPT * ELDER_CHARACTERS]


class State:
    """A header and the tensors it stands for, in one shared buffer: the anchor, then the outer optimizer's tensors."""

    def __init__(self, header: Header, buffer: SharedBuffer, chunk_hashes: tuple[bytes, ...] | None = None):
        self.header, self.buffer = header, buffer
        self.chunk_hashes = chunk_hashes or tuple(hash_chunks(buffer.bytes()))
        self.digest = state_digest(header, self.chunk_hashes)

    @functools.cached_property
    def head(self) -> "Head":
        """Made once: each caller is told it."""
        return Head(self.digest, self.header.samples, self.header.parents)

    def vectors(self, size: int) -> list[Tensor]:
        """[anchor, *outer tensors], each (size,) float32, views of the buffer."""
        return list(self.buffer.floats().split(size))

    def chunk(self, index: int) -> memoryview:
        """The bytes of one chunk; the last one may be short."""
        return memoryview(self.buffer.bytes()[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES].numpy())


def first_state(run: str, schema: str, anchor: Tensor, slots: int, into: SharedBuffer | None = None) -> State:
    """Round 0, a function of the run alone: the base model, and `slots` outer tensors of zeros.

    into: zeros to take as its memory; `anchor` may lie at their front already, so that it is nowhere else.
    """
    buffer = into or SharedBuffer(anchor.numel() * 4 * (1 + slots))
    buffer.floats()[: anchor.numel()].copy_(anchor)
    return State(Header(run=run, schema=schema), buffer)


def next_state(
    state: State, pieces: Iterable[Sequence[Tensor]], members: Iterable[Member], mean: str = "", into: SharedBuffer | None = None, group: str = ""
) -> State:
    """The state after one round: new tensors, and a header that names the parent and the mean that led from it to here.

    pieces: the vectors [anchor, *outer tensors] in consecutive slices, each written as soon as it comes. into: the memory to take, which
    may be that of `state` where it is needed no more; group: see `Header`. Raises BadState when the header is one that nobody would take.
    """
    buffer, at = into or SharedBuffer(state.buffer.num_bytes), 0
    hashing = _Hashing(buffer.bytes())
    for piece in pieces:
        end, targets = at + piece[0].numel(), buffer.floats().view(len(piece), -1)
        for target, vector in zip(targets, piece, strict=True):
            written = target[at:end].copy_(vector)
            hashing.written(written.storage_offset() * written.itemsize, written.nbytes)
        at = end
    assert end == targets.shape[1], "the pieces are not the whole vectors"
    return State(state.header.child(state.digest, members, mean, group), buffer, tuple(hashing.hashes))


class _Hashing:
    """Hashes each chunk of `data`, a uint8 vector, as soon as all of its bytes are written: later the disk may have to be asked for them."""

    def __init__(self, data: Tensor):
        self._data, self._missing = data, [chunk.numel() for chunk in data.split(CHUNK_BYTES)]
        self.hashes = [b""] * len(self._missing)

    def written(self, begin: int, num_bytes: int) -> None:
        """`num_bytes` from `begin` on are here; each byte once."""
        end = begin + num_bytes
        for index in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            start = index * CHUNK_BYTES
            self._missing[index] -= min(end, start + CHUNK_BYTES) - max(begin, start)
            if not self._missing[index]:
                (self.hashes[index],) = hash_chunks(self._data[start : start + CHUNK_BYTES])


def hash_chunks(data: Tensor) -> Iterable[bytes]:
    """BLAKE3 of each CHUNK_BYTES of a uint8 vector."""
    for offset in range(0, data.numel(), CHUNK_BYTES):
        yield blake3(memoryview(data[offset : offset + CHUNK_BYTES].numpy())).digest()


def state_digest(header: Header, chunk_hashes: Iterable[bytes]) -> str:
    hasher = blake3(header.json)
    for chunk_hash in chunk_hashes:
        hasher.update(chunk_hash)
    return hasher.hexdigest()


def mean_digest(square_norm: float, chunk_hashes: Iterable[bytes]) -> str:
    """What a state's header says of the mean that made it: the hashes of its encoded bytes, and its sum of squares."""
    return blake3(canonical_json({"square_norm": float(square_norm).hex()}) + b"".join(chunk_hashes)).hexdigest()


@dataclass(frozen=True)
class Head:
    """As much of a state as is told before anybody fetches it. parents: its last ancestors, the parent first; () where nobody said."""

    digest: str
    samples: int
    parents: tuple[str, ...] = ()

    @classmethod
    def of(cls, state: State) -> "Head":
        return state.head


def better(theirs: Head, ours: Head) -> bool:
    """Whether `theirs` is the right state of the two, for everyone alike: the one with more samples; else the smaller digest.

    A round always adds samples, so a descendant beats its ancestor, whatever anybody says about who descends from whom.
    """
    return theirs.digest != ours.digest and (theirs.samples, ours.digest) > (ours.samples, theirs.digest)


@functools.lru_cache(maxsize=4 * ANCESTORS_KEPT)
def _json(ancestor: CommittedRound) -> bytes:
    return canonical_json({**vars(ancestor), "members": _plain(ancestor.members)})


def _plain(members: Iterable[Member]) -> list[dict[str, Any]]:
    return [dict(vars(member)) for member in members]
