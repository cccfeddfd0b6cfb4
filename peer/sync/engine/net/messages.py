"""Every message that a peer may send to another over a stream, with its bounds. Nothing else looks at one before it was read here.

Peers of several versions meet: an unknown field is ignored, and one that a version adds has a default. What a message means here and now,
such as whether a contribution is in our state already, is its reader's matter.

Texts and numbers are taken in their own type only: `strict`, since pydantic would else make 1 of True and of "1".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetPydanticSchema,
    StringConstraints,
    Tag,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import core_schema
from typing_extensions import TypedDict

from peer.contracts import CommittedRound, Member
from peer.sync.engine.certificate import MOST_SIGNERS, Certificate, Signer, is_enough
from peer.sync.engine.state import (
    ANCESTORS_KEPT,
    ELDER_CHARACTERS,
    ELDERS_KEPT,
    MAX_HEADER_BYTES,
    MOST_COUNT,
    MOST_MEMBERS,
    BadState,
    Head,
    Header,
)
from swarm.proofs import MOST_PROOFS, Proof
from swarm.records import SEAL, Membership, Text
from swarm.signing import SIGNATURE
from swarm.statements import Input
from swarm.statements import Key as PeerPublicKey
from swarm.statements import Signature as PeerSignature
from swarm.unpacking import fault
from swarm.wrong_means import MOST_SENDERS, Slice, WrongMean

MOST_LOOKS = 4
"""Reducers of whose means one check sees a slice."""
MAX_WAIT_SECONDS = 300.0
"""Nobody is waited for longer, whatever it says."""
MOST_NAMED = 8
"""Peers that a peer's ticket or a leader's announcement accuses."""
MOST_PAST_ROUNDS = 16
"""In one answer; fewer where they have many members."""
MOST_CULPRITS = 64
"""Peers that a refusal accuses."""
_REASON_LENGTH = 200
_MOST_INCLUDED = MAX_HEADER_BYTES // 32
"""Peers that a header names; an id has 46 characters, so fewer than 5,500 fit."""
_LARGEST_SQUARE = 2.0**1000
"""Of a part: no sum of a state's 3,280 parts (SD 1.5) overflows, and float32's largest values stay far below."""
_LARGEST_NORM = 2.0**200
"""Of a contribution: 2^36 of float32's largest values have 2^146."""
_MOST_ELEMENTS = 1 << 36
"""The largest open diffusion models have half of that. A helper divides what it is told into parts before it knows whether it has the memory: 10 s."""


class BadMessage(ValueError):
    """A message is not what it should be; the reason is one line."""


# ---------------------------------------------------------------- values


def _a_float(value: Any) -> float:
    if not isinstance(value, float):
        raise ValueError("no float")
    return value


Count = Annotated[int, Field(strict=True, ge=0, le=MOST_COUNT)]
Flag = Annotated[bool, Field(strict=True)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Measured = Annotated[Finite, BeforeValidator(_a_float)]
"""No whole number: every member hashes the bits of this one."""
Norm = Annotated[Measured, Field(ge=0, le=_LARGEST_NORM)]
Seconds = Annotated[Finite, AfterValidator(lambda seconds: min(max(seconds, 0.0), MAX_WAIT_SECONDS))]
"""Somebody's claim about time, within what we would ever wait."""
Receipt = Annotated[str, StringConstraints(strict=True, pattern=rf"^({SIGNATURE})?$")]
"""A host's signature; '' for none."""
Reason = Annotated[str, Field(strict=True), AfterValidator(lambda text: text[:_REASON_LENGTH])]


def _first(most: int) -> BeforeValidator:
    return BeforeValidator(lambda names: names[:most] if isinstance(names, list | tuple) else names)


Named = Annotated[tuple[Text, ...], _first(MOST_NAMED)]
Parents = Annotated[tuple[Text, ...], Field(max_length=ANCESTORS_KEPT)]


def _built(cls: type, optional: Mapping[str, Any] = {}, **kinds: Any) -> Any:
    """`cls`, a dataclass, from a mapping of its fields. Pydantic itself builds the instances: a header has thousands of members.

    optional: fields that a message of an earlier version lacks, and what they are then.
    """

    def schema(source: Any, handler: Any) -> core_schema.CoreSchema:
        schemas = {name: handler.generate_schema(kind) for name, kind in kinds.items()}
        schemas |= {name: core_schema.with_default_schema(schemas[name], default=default) for name, default in optional.items()}
        fields = [core_schema.dataclass_field(name, inner) for name, inner in schemas.items()]
        arguments = core_schema.dataclass_args_schema(cls.__name__, fields)
        return core_schema.dataclass_schema(cls, arguments, list(kinds), frozen=True)

    return Annotated[cls, GetPydanticSchema(schema)]


def _in_order(members: tuple[Member, ...]) -> tuple[Member, ...]:
    peers = [member.peer for member in members]
    if peers != sorted(set(peers)):
        raise ValueError("members out of order")
    return members


def _not_too_many(included: Any) -> Any:
    if isinstance(included, dict) and len(included) > _MOST_INCLUDED:
        raise ValueError(f"{len(included)} peers, at most {_MOST_INCLUDED} are allowed")
    return included


def _whole(certificate: Certificate) -> Certificate:
    peers = [signer.peer for signer in certificate.signers]
    if peers != sorted(set(peers)):
        raise ValueError("signers out of order")
    if not certificate.peers <= {member.peer for member in certificate.made.members}:
        raise ValueError("a signer that is not a member of the round")
    if not is_enough(certificate.made, certificate.peers):
        raise ValueError("signers with half of the round's samples or less")
    return certificate


def _fits(header: Header) -> Header:
    if header.is_too_large:
        raise ValueError(f"a header of {header.num_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed")
    header.check()
    return header


_Members = Annotated[
    tuple[_built(Member, peer=Text, number=Count, samples=Count), ...], Field(max_length=MOST_MEMBERS), AfterValidator(_in_order)
]
_Ancestor = _built(CommittedRound, digest=Text, parent=Text, round=Count, samples=Count, members=_Members)
_Header = Annotated[
    _built(
        Header,
        optional={"elders": "", "group": ""},
        run=Text, schema=Text, round=Count, samples=Count, parents=Parents, members=_Members, mean=Text, group=Text,
        elders=Annotated[str, StringConstraints(strict=True, max_length=ELDERS_KEPT * ELDER_CHARACTERS, pattern="^[0-9a-f]*$")],
        included=Annotated[dict[Text, Count], BeforeValidator(_not_too_many)],
        ancestors=Annotated[tuple[_Ancestor, ...], Field(max_length=ANCESTORS_KEPT)],
    ),
    AfterValidator(_fits),
]  # fmt: skip
_Signer = _built(
    Signer,
    peer=Text,
    key=Annotated[str, StringConstraints(strict=True, max_length=400, pattern="^ssh-rsa [!-~]+$")],
    seal=Annotated[str, StringConstraints(strict=True, min_length=1, pattern=SEAL)],
    membership=Membership,
)
_Certificate = Annotated[
    _built(Certificate, made=_Ancestor, signers=Annotated[tuple[_Signer, ...], Field(max_length=MOST_SIGNERS)]), AfterValidator(_whole)
]
_Line = Annotated[
    str, StringConstraints(strict=True, max_length=(1 + ANCESTORS_KEPT + ELDERS_KEPT) * ELDER_CHARACTERS, pattern="^[0-9a-f]*$")
]
_Head = _built(Head, digest=Text, samples=Count, parents=Parents)


# ---------------------------------------------------------------- messages


class Message(BaseModel):
    model_config = ConfigDict(frozen=True)

    def wire(self) -> dict[str, Any]:
        return self.model_dump()


class Nothing(Message):
    """What goes with a payload that speaks for itself."""


class Refusal(Message):
    """Why the other end goes, and to whom that is owed. hearsay: it was told so itself. void: a reducer gave up a part that it has not made,
    so nobody has the group's whole mean, nor ever will."""

    error: Reason
    culprits: Annotated[tuple[Text, ...], _first(MOST_CULPRITS)] = ()
    hearsay: Flag = False
    void: Flag = False


class Call(Message):
    """We are ready to average onto the state `head`."""

    head: _Head


class Answer(Message):
    """To a call. behind: it has work, but does not know our state yet; head: its own; busy: it averages in a group that is closed."""

    coming: Flag
    ready_seconds: Seconds
    head: _Head
    busy: Flag
    behind: Flag
    reason: Reason


class Join(Message):
    """The sender asks to average this contribution in the receiver's group. With number and samples 0, the sender assists and brings none.

    norm: L2 norm of its decoded values. receipt: the host's for it. draw: see `Ticket`. after: the group of this leader that is void, which the
    sender was in.
    """

    parent: Text
    number: Count
    samples: Count
    norm: Norm
    receipt: Receipt = ""
    reduces: Flag = False
    without: Named = ()
    draw: Text = ""
    after: Text = ""


class Wait(Message):
    """The leader lives; its group is not closed yet."""

    wait: Literal[True] = True


class Onward(Message):
    """Another one leads."""

    leader: Text


class Announcement(Message):
    """A closed group. members: [peer, number, samples, norm] of each; receipts: theirs, in the same order, or none at all;
    draws: of the reducers, likewise."""

    members: Annotated[tuple[tuple[Text, Count, Count, Norm], ...], Field(max_length=MOST_MEMBERS)]
    receipts: Annotated[tuple[Receipt, ...], Field(max_length=MOST_MEMBERS)] = ()
    reducers: Annotated[tuple[Text, ...], Field(max_length=MOST_MEMBERS)]
    draws: Annotated[tuple[Text, ...], Field(max_length=MOST_MEMBERS)] = ()
    attempt: Text
    late: Named = ()


def _which(values: Any) -> str:
    said = values if isinstance(values, dict) else ()
    return next((word for word in ("wait", "leader") if word in said), "group")


JOIN_ANSWER: TypeAdapter[Wait | Onward | Announcement] = TypeAdapter(
    Annotated[
        Annotated[Wait, Tag("wait")] | Annotated[Onward, Tag("leader")] | Annotated[Announcement, Tag("group")], Discriminator(_which)
    ]
)


class Share(Message):
    """Whose share of which group's average is wanted, and will get parts."""

    group: Text


class InputPart(Message):
    """With one encoded part of what a member brings. signature, key: with the last one for a share, in a run for members: its sender's for all of
    them, and the public key that made it."""

    signature: PeerSignature = ""
    key: PeerPublicKey = ""


class MeanPart(Message):
    """With the encoded mean of one part: the sum of squares of its values. In a run for members, with the last part of a share: the
    digest of the inputs that it was made of, its reducer's signature, and the public key that made it. made_of: those inputs themselves, where a
    group is small enough to be checked. A liar that was asked for them later would not answer."""

    square: Annotated[Measured, Field(ge=0, le=_LARGEST_SQUARE)]
    inputs: Text = ""
    made_of: Annotated[tuple[Input, ...], Field(max_length=MOST_SENDERS)] = ()
    signature: PeerSignature = ""
    key: PeerPublicKey = ""


class Fetch(Message):
    """The state of that digest is wanted, or the mean that made it."""

    digest: Text
    mean: Flag = False


class StateOffer(Message):
    """With the hashes of the state's chunks."""

    header: _Header

    def wire(self) -> dict[str, Any]:
        return {**vars(self), "header": self.header.to_json()}


class MeanOffer(StateOffer):
    """With the hashes of the state's chunks, then those of the mean's. num_bytes: of the mean."""

    square_norm: Measured
    num_bytes: Count


class Certified(Message):
    """The strongest certificate that the sender has on its own line, if any; line: see `certificate.Shown`."""

    certificate: _Certificate | None = None
    line: _Line

    def wire(self) -> dict[str, Any]:
        return {"certificate": self.certificate and self.certificate.to_json(), "line": self.line}


class PastRounds(Message):
    """To a Fetch: the round that made that state and those before it, the newest first; empty where they are not known."""

    rounds: Annotated[tuple[_Ancestor, ...], Field(max_length=MOST_PAST_ROUNDS)] = ()

    def wire(self) -> dict[str, Any]:
        return {"rounds": [{**vars(each), "members": [dict(vars(member)) for member in each.members]} for each in self.rounds]}


@dataclass(frozen=True, kw_only=True)
class SignedShare:
    """What a reducer signed of its share's mean."""

    reducer: Text
    digest: Annotated[str, StringConstraints(strict=True, pattern="^[0-9a-f]{64}$")]
    """No other one can be signed: a proof with it would be refused by all others, and with it every proof in the same message."""
    signature: PeerSignature


class Shares(Message):
    """What the reducers of a group signed for the sender; where it was in no such group, or asks about none: all proofs that it knows."""

    group: Text = ""
    shares: Annotated[tuple[SignedShare, ...], Field(max_length=MOST_MEMBERS)] = ()
    proofs: Annotated[tuple[Proof, ...], Field(max_length=MOST_PROOFS)] = ()

    def wire(self) -> dict[str, Any]:
        return {"group": self.group, "shares": [vars(share) for share in self.shares], "proofs": [vars(proof) for proof in self.proofs]}


@dataclass(frozen=True, kw_only=True)
class Sought:
    """A slice of what the asked one sent: `number` of part `position` of the share of `reducer`."""

    reducer: Text
    position: Count
    number: Count


class Look(Message):
    """To a member of a group, from one that was drawn to check its round. lot, key: show that; sought: what it wants to see."""

    group: Text
    lot: PeerSignature
    key: PeerPublicKey
    sought: Annotated[tuple[Sought, ...], Field(max_length=MOST_LOOKS)]


class Looked(Message):
    """slices: those sought, if the asked one is a member."""

    slices: Annotated[tuple[Slice, ...], Field(max_length=MOST_LOOKS)] = ()


class WrongMeans(Message):
    """known: of whom the sender knows that they signed a wrong mean; proof: one that the other lacks."""

    known: Annotated[tuple[Text, ...], Field(max_length=MOST_PROOFS)] = ()
    proof: WrongMean | None = None


class Chunk(Message):
    """Which chunk comes next; None: no more are wanted."""

    chunk: Count | None = None


class LinkPiece(Message):
    """pieces: after the last one, how many are wanted back."""

    more: Flag = False
    pieces: Count = 0


class _Kind(TypedDict):
    schema: Text
    sizes: tuple[Annotated[int, Field(strict=True, ge=0, lt=_MOST_ELEMENTS)], Annotated[int, Field(strict=True, ge=0, lt=_MOST_ELEMENTS)]]


def _of_some_size(kind: _Kind) -> _Kind:
    if not 0 < sum(kind["sizes"]) < _MOST_ELEMENTS:
        raise ValueError(f"{sum(kind['sizes'])} elements")
    return kind


KIND_OF_STATE: TypeAdapter[dict[str, Any]] = TypeAdapter(Annotated[_Kind, AfterValidator(_of_some_size)])
HEAD: TypeAdapter[Head] = TypeAdapter(_Head)
HEADER: TypeAdapter[Header] = TypeAdapter(_Header)
CERTIFICATE: TypeAdapter[Certificate] = TypeAdapter(_Certificate)

M = TypeVar("M")


def read(kind: type[M] | TypeAdapter[M], values: Any) -> M:
    """What was received, as `kind`. Raises BadMessage."""
    try:
        return kind.validate_python(values) if isinstance(kind, TypeAdapter) else kind.model_validate(values)
    except ValidationError as error:
        raise BadMessage(fault(error)) from None


def read_header(values: Any) -> Header:
    """A state's header, from a disk or another process. Raises BadState."""
    try:
        return read(HEADER, values)
    except BadMessage as error:
        raise BadState(f"header: {error}") from None
