"""What peers tell each other through the DHT: short signed records, renewed while their owner lives, gone soon after it died.

Nothing is decided upon before it passed the bounds here. Signatures are `dht.py`'s matter.

Peers of several versions meet in one run: a field that this program does not know is ignored, and one that is missing has its default here. So
a version may add fields that have a default; it must not take one away, or widen what one may hold.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgpack
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from swarm.signing import SIGNATURE
from swarm.unpacking import fault, unpack

RECORD_LIFE_SECONDS = 20.0
"""A peer without a renewed record for this long is gone."""
RENEW_SECONDS = 5.0
"""Three renewals may be lost in a row before a peer counts as gone."""
RUN_RECORD_LIFE_SECONDS = 600.0
MAX_RECORD_BYTES = 4096
MAX_SAMPLES_PER_SECOND = 1e6
SEAL = r"^([A-Za-z0-9+/]{342}==)?$"
"""What a peer's key of 2,048 bits makes of a statement, in base64. p2pd makes no other keys; a peer that has another one seals nothing."""
MAX_NAME, MAX_HARDWARE, MAX_NOTE, MAX_REASON = 32, 64, 160, 120
"""Characters of what a peer says of itself in words, and a host of a peer."""
MOST_BANS, BANS_PER_RECORD = 256, 2
"""Words of a host about peers, of 330 bytes, and 900 at most (long reasons, signed by a successor): kept by everybody, and two in one record beside
its 1.6 kB. A host with more to keep out wants tokens."""
FINDINGS_PER_RECORD = 4
"""Members of which an auditor tells: 120 bytes each beside its 1.6 kB and two bans of up to 900. Who is reported comes first."""
JOINING, TRAIN, CATCHING_UP, AVERAGING, PAUSED, DONE = "joining", "train", "catching_up", "averaging", "paused", "done"
ASSIST = "assist"
"""The phase of a peer that trains nothing: it reduces, leads and hands out states for those who do."""
LEAVING = "leaving"
"""The phase in the last record of a peer that leaves in order: nobody waits for it."""
Phase = Literal["joining", "train", "catching_up", "averaging", "paused", "done", "assist", "leaving"]
PHASES = get_args(Phase)


class BadRecord(ValueError):
    """A record that is malformed or out of bounds: ignore it."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("not one printable line")
    return text


_LINE = AfterValidator(_printable)
"""Behind the bound of its length: before it, pydantic calls two functions of Python for each string, and a record has some twenty."""
Text = Annotated[str, Field(strict=True, max_length=64, pattern=r"^[\x20-\x7e]*$")]
"""A peer's id, a digest or another name: nothing that a message between peers could not say (`net.messages`)."""
Signature = Annotated[str, Field(strict=True, pattern=rf"^({SIGNATURE})?$")]
"""Of the host's key: see `swarm.signing`. One spelling only: with a space behind it, it would be another word of the host."""
Count = Annotated[int, Field(strict=True, ge=0, le=1 << 53)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Seal = Annotated[str, Field(strict=True, pattern=SEAL)]
"""Of a peer's key; '' for none."""


@dataclass(frozen=True, kw_only=True)
class HostWord:
    """The host's word that a peer is banned, or trusted, or neither any more, or that a state is discarded or countersigned: see `swarm.bans`.

    about: the peer's id, or the state's digest. at: UNIX milliseconds.
    """

    about: Text
    at: Count
    banned: Annotated[bool, Field(strict=True)]
    reason: Annotated[str, Field(strict=True, max_length=MAX_REASON), _LINE]
    signature: Signature
    trusted: Annotated[bool, Field(strict=True)] = False


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The host's word that a peer, which is named where this stands, may take part: see `swarm.members`. until: UNIX seconds."""

    until: Count
    signature: Signature


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What an assisting peer has measured of a member's contributions (`--audit`, peer/audit).

    change: the mean change of the loss by one of them, the less the better; error: its standard error; own: likewise, of pictures that the
    member had leased for them; rounds: how many were measured; reported: whether they make the model worse, beyond chance, and unlike the
    others'.
    """

    peer: Text
    change: Annotated[Number, Field(ge=-1e9, le=1e9)]
    error: Annotated[Number, Field(ge=0, le=1e9)]
    rounds: Count
    own: Annotated[Number, Field(ge=-1e9, le=1e9)] | None = None
    reported: Annotated[bool, Field(strict=True)] = False


@dataclass(frozen=True, kw_only=True)
class PeerRecord:
    """One live peer, as it describes itself.

    digest, parents: its state's digest and those of the state's last ancestors, the parent first. samples: all samples ever averaged into
    that state. backers: live peers whom this one has met, and that stand with it, itself included. waiting_samples: trained since, in no
    state yet. validation_loss: of held-out pictures, in the state after validation_round. sent_bytes, received_bytes, transfer_seconds: of its last averaged round. share_lost: of its time, in which it waited for
    rounds. phase: one of PHASES. name: what its owner calls it, if anything. note: what it is waiting for, or what failed and why; ''
    while all is well.
    """

    peer_id: Text
    config: Text
    schema: Text
    round: Count
    samples: Count
    digest: Text
    parents: Annotated[tuple[Text, ...], Field(max_length=8)] = ()
    backers: Count = 1
    waiting_samples: Count = 0
    samples_per_second: Annotated[Number, Field(ge=0, le=MAX_SAMPLES_PER_SECOND)] = 0.0
    loss: Annotated[Number, Field(ge=-1e9, le=1e9)] | None = None
    validation_loss: Annotated[Number, Field(ge=-1e9, le=1e9)] | None = None
    validation_round: Count = 0
    phase: Phase = TRAIN
    name: Annotated[str, Field(strict=True, max_length=MAX_NAME), _LINE] = ""
    hardware: Annotated[str, Field(strict=True, max_length=MAX_HARDWARE), _LINE] = ""
    note: Annotated[str, Field(strict=True, max_length=MAX_NOTE), _LINE] = ""
    group_size: Count = 0
    sent_bytes: Count = 0
    received_bytes: Count = 0
    transfer_seconds: Annotated[Number, Field(ge=0, le=1e6)] = 0.0
    share_lost: Annotated[Number, Field(ge=0, le=1)] = 0.0
    client_mode: Annotated[bool, Field(strict=True)] = False
    maddrs: Annotated[tuple[Annotated[str, Field(strict=True, max_length=256), _LINE], ...], Field(max_length=6)] = ()
    time: Annotated[Number, Field(ge=0, le=1e11)] = 0.0
    bans: Annotated[tuple[HostWord, ...], Field(max_length=BANS_PER_RECORD)] = ()
    """Some of the host's words, others each time: so all of them come round."""
    membership: Membership | None = None
    """Its owner's, in a run for members."""
    seal: Seal = ""
    """In a run for members, its owner's signature for the state, if its work is in it: see `peer.sync.engine.certificate`."""
    findings: Annotated[tuple[Finding, ...], Field(max_length=FINDINGS_PER_RECORD)] = ()
    """What its owner has measured of others."""

    def pack(self) -> bytes:
        return msgpack.packb(vars(self), default=vars)

    def asdict(self) -> dict[str, Any]:
        """What it says of its peer: without what it hands on, and what it shows."""
        plain = {name: value for name, value in vars(self).items() if name not in ("bans", "membership", "seal")}
        return {**plain, "findings": [dict(vars(found)) for found in self.findings]}

    @classmethod
    def unpack(cls, data: bytes, *, owner: str) -> "PeerRecord":
        """The record of `owner`, whose key signed it. Raises BadRecord."""
        record: PeerRecord = _read(_PEER_RECORD, data)
        if record.peer_id != owner:
            raise BadRecord(f"signed by {owner}, but speaks for {record.peer_id}")
        return record


class LastState(TypedDict):
    """The newest state that a peer held, and who had it."""

    digest: Text
    round: Count
    samples: Count
    peers: Annotated[list[Text], Field(max_length=8)]


class SignedExtension(TypedDict):
    """The host's order that the run goes on beyond its total_samples. Whose it is, `swarm.end` checks."""

    total_samples: Count
    host_key: Text
    signature: Signature


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run, as one of its peers describes it to a newcomer that knows nothing but an address.

    run: its configuration, which `RunConfig.from_mapping` checks. head: so that nobody starts the run again from its base model.
    """

    run_id: Text
    run: dict[str, Any]
    server_url: Annotated[str, Field(strict=True, max_length=512), _LINE] = ""
    head: LastState | None = None
    extension: SignedExtension | None = None

    def pack(self) -> bytes:
        return msgpack.packb(vars(self))

    @classmethod
    def unpack(cls, data: bytes) -> "RunRecord":
        """Raises BadRecord."""
        record: RunRecord = _read(_RUN_RECORD, data)
        return record


_PEER_RECORD, _RUN_RECORD = TypeAdapter(PeerRecord), TypeAdapter(RunRecord)


def _read(kind: TypeAdapter[Any], data: bytes) -> Any:
    if not isinstance(data, bytes) or len(data) > MAX_RECORD_BYTES:
        raise BadRecord("not bytes, or too long")
    try:
        return kind.validate_python(unpack(data))
    except ValidationError as error:
        raise BadRecord(fault(error)) from None
    except ValueError as error:
        raise BadRecord(str(error)) from None


def words(text: str, longest: int) -> str:
    """`text` as a record may carry it: one line of at most `longest` printable characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return line if len(line) <= longest else line[: longest - 1] + "…"
