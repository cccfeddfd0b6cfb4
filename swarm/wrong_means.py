"""Proofs that a reducer signed a mean which is not that of the inputs that it signed with it (docs/decisions/0030).

All is in the proof: what the reducer signed, the group as its name hashes it, and one slice of the mean and of each member's input. Nobody need
be asked or believed. Not promised: that a mean is wrong by less than what rounding explains is found; nor, of a centered average, that one is which
other weights within the bounds of `centres.py` make of the inputs.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from swarm.centres import is_no_centre
from swarm.digest import digest_bytes
from swarm.records import Text
from swarm.run.strategy import strategies
from swarm.run_config import RunConfig
from swarm.slices import MOST_ELEMENTS, MOST_PARTS, MOST_PATH_BYTES, MOST_SLICE_BYTES, MOST_SLICES, Format, Layout, climb, named, path_of
from swarm.statements import HasSigned, Input, Key, Signature, input_statement, inputs_digest, share_digest, statement
from swarm.weights import counted, even_shares, factors

MOST_SENDERS = 24
"""Members of a group that is checked: a proof has 8 kB for each, and fits into one message (256 KiB)."""
MOST_GROUP_BYTES = 16 << 10
_ROUNDING = 1e-4
"""Of the sum of what was added: float32 rounds each of up to 24 products and sums by 6e-8 of it."""
_TINY = 2e-36
"""Below it a block is zero for all (`codec.py`)."""
_HALF_BITS, _HALF_TINY, _HALF_MOST = 2.0**-10, 2.0**-23, 65504.0
_CODES = {"int8": 127, "int4": 7}
_SCALE_ROUNDING = 1.01
"""A scale is rounded up to eight bits: by 1 / 128 at most."""
_LARGEST = 2.0**100


def _base64(most: int) -> Any:
    return Field(strict=True, max_length=-(-most // 3) * 4, pattern=r"^[A-Za-z0-9+/]*={0,2}$")


@dataclass(frozen=True, kw_only=True)
class Slice:
    """In base64: one slice of a part, and the hashes with which it leads to the digest of its share (`slices.py`)."""

    data: Annotated[str, _base64(MOST_SLICE_BYTES)]
    path: Annotated[str, _base64(MOST_PATH_BYTES)]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which slice: `number` of part `position` of a share of `count` parts; format and elements: that part's layout."""

    position: Annotated[int, Field(strict=True, ge=0, lt=MOST_PARTS)]
    count: Annotated[int, Field(strict=True, ge=1, le=MOST_PARTS)]
    number: Annotated[int, Field(strict=True, ge=0, lt=MOST_SLICES)]
    format: Format
    elements: Annotated[int, Field(strict=True, ge=1, le=MOST_ELEMENTS)]

    @property
    def layout(self) -> Layout:
        return Layout(self.format, self.elements)

    def show(self, part: memoryview, hashes: Sequence[bytes]) -> Slice:
        """This slice. part: its part, encoded; hashes: of all parts of the share."""
        path = self.layout.path(part, self.number) + path_of(hashes, self.position)
        return Slice(data=base64.b64encode(self.layout.slice(part, self.number)).decode(), path=base64.b64encode(path).decode())

    def read(self, shown: Slice, digest: str) -> bytes:
        """Its bytes, if `shown` is this slice of the share of that digest. Raises ValueError when it is not."""
        data, path = (base64.b64decode(said, validate=True) for said in (shown.data, shown.path))
        top, left = climb(blake3(data).digest(), self.number, self.layout.slices, path)
        top, left = climb(self.layout.hash_by(top), self.position, self.count, left)
        if left or named(self.count, top) != digest:
            raise ValueError("another slice than that of the share")
        return data

    def values(self, data: bytes) -> NDArray[np.float64]:
        """Of its bytes. Raises ValueError for what is not finite, or of another length."""
        return self.layout.decode(self.number, data)


@dataclass(frozen=True, kw_only=True)
class WrongMean:
    """accused: the reducer; key, signature: its, of its share; group: what its name is the digest of, as JSON; means, squares: digests of the
    share's parts and of their sums of squares; inputs: of all members, as it signed them. place, mean, sent: one slice of the mean and of each
    input; None where the inputs alone show the lie."""

    accused: Text
    key: Key
    signature: Signature
    group: Annotated[str, Field(strict=True, max_length=MOST_GROUP_BYTES)]
    means: Text
    squares: Text
    inputs: Annotated[tuple[Input, ...], Field(max_length=MOST_SENDERS)]
    place: Place | None = None
    mean: Slice | None = None
    sent: Annotated[tuple[Slice, ...], Field(max_length=MOST_SENDERS)] = ()


_Count = Annotated[int, Field(strict=True, ge=1, le=1 << 53)]
_Norms = list[Annotated[float, Field(strict=True, ge=0, le=2.0**200, allow_inf_nan=False)]]


@dataclass(frozen=True)
class _Group:
    samples: list[int]
    peers: list[str]
    norms: list[float]
    proved: list[bool]


_GROUP: TypeAdapter[Any] = TypeAdapter(
    tuple[str, list[tuple[str, _Count, _Count]], list[str], list[str], str, _Norms, list[bool]], config=ConfigDict(strict=True)
)


def _read(text: str) -> _Group:
    """Raises ValueError."""
    _, members, _, _, _, norms, proved = _GROUP.validate_json(text)
    if len(norms) not in (0, len(members)) or len(proved) not in (0, len(members)) or not members:
        raise ValueError("norms or receipts for others than the members")
    return _Group([samples for *_, samples in members], [peer for peer, *_ in members], norms, proved)


def is_checked(run: RunConfig, members: int) -> bool:
    """Whether a wrong mean of a group of that many members can be proven at all."""
    return bool(run.members_of) and 1 <= members <= MOST_SENDERS


def proves(proof: WrongMean, run: RunConfig, signed: HasSigned) -> bool:
    """Whether the accused signed that mean with those inputs, and it is not their mean."""
    try:
        group = _read(proof.group)
        name = digest_bytes(proof.group.encode())
        share = share_digest(proof.means, proof.squares, inputs_digest(proof.inputs))
        if not is_checked(run, len(group.peers)) or not signed(proof.accused, statement(run.digest, name, share), proof.key, proof.signature):
            return False
        return _false_inputs(proof, group, name, run, signed) or _false_mean(proof, group, run)
    except (ValueError, ValidationError):
        return False


def _false_inputs(proof: WrongMean, group: _Group, name: str, run: RunConfig, signed: HasSigned) -> bool:
    """Whether it took somebody else's inputs than the members', or some that their senders did not sign: an honest reducer looks before it signs."""
    return [each.peer for each in proof.inputs] != group.peers or not all(
        signed(each.peer, input_statement(run.digest, name, proof.accused, each.digest), each.key, each.signature) for each in proof.inputs
    )


def _false_mean(proof: WrongMean, group: _Group, run: RunConfig) -> bool:
    """Raises ValueError for a slice that is not the share's."""
    place = proof.place
    if place is None or proof.mean is None or len(proof.sent) != len(group.peers):
        return False
    given = place.read(proof.mean, proof.means)
    sent = [place.read(slice, each.digest) for slice, each in zip(proof.sent, proof.inputs, strict=True)]
    counts = counted(group.samples, group.proved)
    clipped = clips(run, counts, group.norms)
    if run.averaging == "centered" and (shares := even_shares(counts)) is not None:
        return differs_from_centres(place, shares, clipped, sent, given)
    return differs(place, [count / sum(counts) * clip for count, clip in zip(counts, clipped, strict=True)], sent, given)


def clips(run: RunConfig, counts: Sequence[int], norms: Sequence[float]) -> list[float]:
    """By what each member's values are multiplied before they are averaged. counts: as how many samples each counts."""
    per_sample = not strategies()[run.sync].optimizer  # where each peer steps by itself, a norm grows with its samples
    return factors(norms, counts if per_sample else [1] * len(counts), run.clip_members)


def differs(place: Place, weights: Sequence[float], sent: Sequence[bytes], given: bytes) -> bool:
    """Whether a slice of a mean is another one than that of what was sent, by more than rounding and the wire explain.

    sent, given: bytes at `place`. Raises ValueError for values that are not finite: no honest reducer gives a mean then.
    """
    if len(sent) == 1:
        return given != sent[0]  # whatever its scales are, and whatever it weighs: a reducer copies them
    inputs, mean = [place.values(data) for data in sent], place.values(given)
    exact = sum(weight * values for weight, values in zip(weights, inputs, strict=True))
    most = sum(abs(weight * values) for weight, values in zip(weights, inputs, strict=True))
    if most.max(initial=0.0) > _LARGEST:
        return False  # what cannot be held is clamped
    if place.format == "fp16":
        exact = exact.clip(-_HALF_MOST, _HALF_MOST)
    slack = _slack(place, given, abs(exact), most)
    return slack is None or bool((abs(mean - exact) > slack)[_real(place)].any())


def differs_from_centres(place: Place, shares: Sequence[float], clips: Sequence[float], sent: Sequence[bytes], given: bytes) -> bool:
    """The same of a centered average: whether no weights that it can have make it of what was sent (`centres.py`)."""
    inputs, mean = np.stack([clip * place.values(data) for clip, data in zip(clips, sent, strict=True)]), place.values(given)
    largest = abs(inputs).max(axis=0)  # no centre is beyond it: its weights are 1 together at most
    if largest.max(initial=0.0) > _LARGEST:
        return False
    slack, real = _slack(place, given, largest, largest), _real(place)
    return slack is None or is_no_centre(shares, inputs[:, real], mean[real], slack[real])


def _real(place: Place) -> NDArray[np.bool_]:
    """Which of a slice's values are the part's."""
    return place.layout.places(place.number) < place.elements


def _slack(place: Place, given: bytes, size: NDArray[np.float64], most: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """What rounding and the wire explain of each value; None where the scales of `given` are too large. size: of the mean, at most; most: of the
    sum of what was added."""
    layout, real = place.layout, _real(place)
    slack = _ROUNDING * most + _TINY
    if layout.format == "fp16":
        slack += _HALF_BITS * size + _HALF_TINY
    if layout.block:
        scales = layout.scales(place.number, given)
        if _scales_too_large(layout, layout.places(place.number)[real], (size + slack)[real], scales[real]):
            return None
        slack += 0.5 * (1 + _ROUNDING) * scales
    return slack


def _scales_too_large(layout: Layout, places: NDArray[np.int64], values: NDArray[np.float64], scales: NDArray[np.float64]) -> bool:
    """Whether a block has a larger scale than its largest value asks for: a mean that is so coarse could hide anything. Blocks that are here in
    part only are passed over."""
    blocks, first, inverse, counts = np.unique(places // layout.block, return_index=True, return_inverse=True, return_counts=True)
    largest = np.zeros(len(blocks))
    np.maximum.at(largest, inverse, values)
    whole = counts == np.minimum(layout.block, layout.elements - blocks * layout.block)
    return bool((scales[first] > _SCALE_ROUNDING * largest / _CODES[layout.format] + _TINY)[whole].any())
