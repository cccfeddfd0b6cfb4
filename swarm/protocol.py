"""What peers and the dataset server say to each other: JSON over HTTP, every field bounded, unknown fields refused.

Server and client parse with these same models. A *shard epoch* is one shard in one epoch; a sample's key is "epoch:shard:index".
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from blake3 import blake3
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, StringConstraints, model_serializer, model_validator
from typing_extensions import TypedDict

from swarm.held_out import MOST_HELD_OUT
from swarm.records import FINDINGS_PER_RECORD, MOST_BANS, HostWord
from swarm.signing import SIGNATURE
from swarm.wrong_states import Accusation

PROTOCOL_VERSION = 2
BANS_TOLD = 16  # with every renewal, the newest: so that each word is told to somebody who hands it on
MOST_SHOWN = 64  # samples of a contribution: for who measures what it does to their loss, which a few pictures show
PROOFS_TOLD = 4  # with one request: 1.5 kB and two signatures to check each, or 256 KiB and 25 signatures
BANNED = "banned"
"""The code of the refusal to a peer that the host, or a proof, keeps out."""
MAX_KEYS = 200_000  # in one request; a peer that trains more samples in one round is far beyond what a round is for
NO_LEASE = "0" * 32  # in place of a lease's name: keys that a peer holds by any lease, or in a contribution
MAX_BODY_BYTES = 8 << 20  # holds MAX_KEYS keys
MAX_MEMBERS = 512
MAX_SHARDS = 1_000_000
MAX_SHARD_SAMPLES = 1_000_000
MAX_GENERATIONS = 1000
MAX_CAPTION_BYTES = 64 << 10  # UTF-8, of a sample of a shard
MAX_RUN_BYTES = 2048  # a run's configuration as JSON: with its head it must fit in one record of the DHT
MAX_COUNT = 2**53  # exact in every JSON reader

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, StringConstraints(pattern=rf"^({SIGNATURE})?$")]
RunId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
LeaseId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
PeerId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
SampleKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}:[0-9]{1,9}:[0-9]{1,9}$")]
Maddr = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^/[!-~]+$")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Time = Annotated[float, Field(ge=0, le=1e11)]
"""UNIX seconds, up to the year 5138: later ones have no date in every C library."""
Period = Annotated[float, Field(ge=0.1, le=1e6)]
"""Seconds: what a server asks for again and again comes ten times a second at most."""
ShardBytes = Annotated[int, Field(ge=1, le=1 << 30)]
"""A host cuts shards at 48 MiB and one picture more. A peer keeps each on its disk, and one in memory."""
RunState = Literal["running", "paused", "ended"]
Column = Annotated[
    Sequence[Annotated[int, Field(ge=1, le=2**32 - 1)]],
    Field(max_length=MAX_SHARD_SAMPLES),
    AfterValidator(lambda numbers: array("I", numbers)),  # 4 bytes a number: a million samples' fit beside everything else
    PlainSerializer(list, return_type=list[int]),
]
Keys = Annotated[list[SampleKey], Field(max_length=MAX_KEYS)]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    most_bytes: ClassVar[int] = 256 << 10
    """Of a request as JSON: a report of 512 members has 100 kB."""


class ErrorBody(Message):
    """What went wrong, by name, in words, and what to do about it."""

    code: Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,64}$")]
    message: Annotated[str, StringConstraints(max_length=2000)]
    fix: Annotated[str, StringConstraints(max_length=2000)]


class ErrorAnswer(Message):
    """The body of every answer that is not 2xx."""

    error: ErrorBody


class Shard(Message):
    """A tar of `samples` pictures and captions; the columns have one number for each of them, in the tar's order."""

    index: Count
    digest: Digest
    bytes: ShardBytes
    samples: Annotated[int, Field(ge=1, le=MAX_SHARD_SAMPLES)]
    widths: Column
    """Pixels."""
    heights: Column
    image_bytes: Column
    """Of the encoded picture."""
    weights: Annotated[list[Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]], Field(max_length=MAX_SHARD_SAMPLES)] = []
    """What each sample's loss is multiplied with; empty: 1."""

    @model_serializer(mode="wrap")
    def _as_before(self, dump: Any) -> dict[str, Any]:
        """Without `weights` where all are 1: a shard of before is said as it was."""
        return {name: value for name, value in dump(self).items() if value or name != "weights"}

    @model_validator(mode="after")
    def _whole(self) -> "Shard":
        if {len(self.widths), len(self.heights), len(self.image_bytes), len(self.weights) or self.samples} != {self.samples}:
            raise ValueError("a column has not one number per sample")
        return self


class Generation(Message):
    """From epoch `from_epoch` on, an epoch has the first `shards` of the dataset's shards."""

    from_epoch: Count
    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)]


class Manifest(Message):
    """The dataset: its shards, in the order of their indices, and from which epoch on each of them is trained.

    The digest of its canonical JSON names it. A dataset that grows keeps its shards: `first()` of every later manifest is the one that
    the run began with, whose digest is the run's `dataset_digest`.
    """

    version: Annotated[int, Field(ge=2, le=2)] = 2
    generations: Annotated[list[Generation], Field(min_length=1, max_length=MAX_GENERATIONS)]
    total: Positive
    shards: Annotated[list[Shard], Field(min_length=1, max_length=MAX_SHARDS)]
    held_out: Annotated[list[Shard], Field(max_length=MOST_HELD_OUT)] = []
    """Of pictures that nobody trains on (--validation_split); they are in no epoch, and `total` leaves them out."""

    @model_serializer(mode="wrap")
    def _as_before(self, dump: Any) -> dict[str, Any]:
        """Without `held_out` where there is none: a dataset of before keeps its digest."""
        return {name: value for name, value in dump(self).items() if value or name != "held_out"}

    @model_validator(mode="after")
    def _whole(self) -> "Manifest":
        first, last = self.generations[0], self.generations[-1]
        if first.from_epoch != 0 or last.shards != len(self.shards):
            raise ValueError("the generations must begin with epoch 0 and end with all shards")
        if any(new.from_epoch < old.from_epoch or new.shards <= old.shards for old, new in pairwise(self.generations)):
            raise ValueError("a generation must have more shards than the one before, and begin no earlier")
        if [shard.index for shard in self.shards] != list(range(len(self.shards))):
            raise ValueError("the shards' indices must count from 0")
        if self.total != sum(shard.samples for shard in self.shards):
            raise ValueError("total must be the samples of all shards")
        if sum(shard.samples for shard in self.held_out) > MOST_HELD_OUT:
            raise ValueError(f"more than {MOST_HELD_OUT} samples are held out")
        return self

    @classmethod
    def of(cls, shards: "Sequence[Shard]", generations: "Sequence[Generation]" = (), held_out: "Sequence[Shard]" = ()) -> "Manifest":
        """The manifest of these shards; without generations, all of them from the beginning."""
        generations = list(generations) or [Generation(from_epoch=0, shards=len(shards))]
        return cls(generations=generations, total=sum(shard.samples for shard in shards), shards=list(shards), held_out=list(held_out))

    def first(self) -> "Manifest":
        """The manifest of the first generation."""
        return Manifest.of(self.shards[: self.generations[0].shards], held_out=self.held_out)


class Head(Message):
    """The best final state the server was told of, and who had it."""

    digest: Digest
    round: Count
    samples: Count
    reporters: Annotated[list[PeerId], Field(max_length=MAX_MEMBERS)]


class Extension(Message):
    """The host's order that the run goes on to `total_samples`: its signature, in the role "extension", of {run, total_samples}; see swarm/end.py."""

    total_samples: Positive
    host_key: Digest
    signature: Signature


class RunAnswer(Message):
    """GET /v1/run: all that a newcomer needs. `run` is RunConfig's mapping; its digest begins with `run_id`.

    `signature`: that of `host_key` for the digest of `run`'s canonical JSON; see `swarm.signing`.
    """

    protocol: Annotated[int, Field(ge=1, le=1_000_000)]
    run: dict[str, Any]
    run_id: RunId
    url: Annotated[str, StringConstraints(max_length=2000)]
    initial_peers: Annotated[list[Maddr], Field(max_length=64)]
    manifest: Digest
    head: Head | None
    server_time: Time
    host_key: Digest
    signature: Signature
    extension: Extension | None = None
    bans: Annotated[list[HostWord], Field(max_length=MOST_BANS + 1)] = []
    """The host's words about peers and states, one that countersigns a state among them; see `swarm.bans`."""
    version: str = ""
    """Of the server's program."""


RunValue = (  # None: an option that was left to whoever reads the model
    None
    | bool
    | Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)]
    | Number
    | Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]*$")]
)


class FoundRequest(Message):
    """PUT /v1/run: found this run at a server that has none. `run` is RunConfig's mapping; the server fills in `dataset_digest`."""

    most_bytes = 8 * MAX_RUN_BYTES
    run: dict[str, RunValue | dict[str, RunValue]]


class FindingInfo(TypedDict):
    """A `records.Finding`: what a peer that audits has measured of `peer`'s contributions."""

    peer: PeerId
    change: Number
    error: Number
    rounds: Count
    own: Number | None
    reported: bool


class PeerInfo(Message):
    """One live peer, as its own signed record in the DHT describes it."""

    peer_id: PeerId
    round: Count = 0
    samples: Count = 0
    digest: str = Field(default="", max_length=128)
    waiting_samples: Count = 0
    samples_per_second: Number = 0.0
    loss: Number | None = None
    validation_loss: Number | None = None
    """Of held-out pictures, in the state after `validation_round`."""
    validation_round: Count = 0
    sent_bytes: Count = 0
    received_bytes: Count = 0
    transfer_seconds: Number = 0.0
    share_lost: Number = 0.0
    phase: Annotated[str, StringConstraints(max_length=16)] = ""
    """One of records.PHASES."""
    name: Annotated[str, StringConstraints(max_length=32)] = ""
    """What its owner calls it, if anything."""
    hardware: Annotated[str, StringConstraints(max_length=64)] = ""
    note: Annotated[str, StringConstraints(max_length=160)] = ""
    """What it is waiting for, or what failed and why."""
    time: Number = 0.0
    """When it said all this: UNIX seconds by its own clock."""
    maddrs: Annotated[list[Maddr], Field(max_length=64)] = []
    client_mode: bool = False
    findings: Annotated[list[FindingInfo], Field(max_length=FINDINGS_PER_RECORD)] = []
    """What it has measured of others' contributions, if it audits."""


class PeersAnswer(Message):
    peers: Annotated[list[PeerInfo], Field(max_length=10_000)]


class LeaseRequest(Message):
    """POST /v1/leases: give me shard epochs with about this many samples."""

    run_id: RunId
    peer: PeerId
    want_samples: Annotated[int, Field(ge=1, le=MAX_KEYS)]


class LeasedShard(Message):
    """All samples of a shard in an epoch, except the indices in `skip`, which others trained already."""

    epoch: Count
    shard: Count
    digest: Digest
    bytes: ShardBytes
    samples: Positive
    skip: Annotated[list[Count], Field(max_length=1_000_000)]


class LeaseAnswer(Message):
    """Renew every `renew_every` seconds; after `expires_in` seconds without, the shard epochs go to others."""

    lease_id: LeaseId
    expires_in: Period
    renew_every: Period
    shard_epochs: Annotated[list[LeasedShard], Field(min_length=1, max_length=MAX_KEYS)]


class RenewRequest(Message):
    run_id: RunId
    peer: PeerId


class RenewAnswer(Message):
    """state: paused: keep the samples, and train on when it is running again; ended: no more are wanted."""

    expires_in: Period
    renew_every: Period
    state: RunState = "running"
    extension: Extension | None = None
    bans: Annotated[list[HostWord], Field(max_length=BANS_TOLD)] = []
    """The newest of them."""


class MemberRequest(Message):
    run_id: RunId
    peer: PeerId


class MemberAnswer(Message):
    """POST /v1/members: the host's word that the peer may take part until then, in UNIX seconds; see `swarm.members`."""

    until: Count
    signature: Signature


class ReleaseRequest(Message):
    """Give back `keys`, or with null the whole lease; work in a contribution that was registered stays with it when null."""

    most_bytes = MAX_BODY_BYTES
    run_id: RunId
    peer: PeerId
    keys: Keys | None = None


class ReleaseAnswer(Message):
    released: Count


class ContributionRequest(Message):
    """POST /v1/contributions: number `number` of `peer`, about to be offered to the swarm, holds exactly these samples.

    offered: it is with the swarm already, since the server was away. Then samples may be in it that the peer holds no lease for, of
    any shard epoch up to one epoch after the last one begun.
    """

    most_bytes = MAX_BODY_BYTES
    run_id: RunId
    peer: PeerId
    number: Positive
    keys: Annotated[Keys, Field(min_length=1)]
    offered: bool = False


class ContributionAnswer(Message):
    """registered: samples that count once the contribution is final; repeated: those that others hold, and that do not.

    receipt: the host's signature for all of them, where the peer held a lease for each; see `swarm.receipts`.
    """

    registered: Count
    repeated: Count = 0
    counted: bool
    receipt: Signature | None = None


class ContributionSamples(Message):
    """GET /v1/contributions/<peer>/<number>: some of its samples, drawn by chance from one of its shards."""

    keys: Annotated[list[SampleKey], Field(max_length=MOST_SHOWN)]


class RoundMember(Message):
    peer: PeerId
    number: Positive
    samples: Positive


class RoundRequest(Message):
    """POST /v1/rounds: this state is final. `samples` are all samples ever averaged into it, these members' included."""

    run_id: RunId
    peer: PeerId
    digest: Digest
    parent: Digest
    round: Positive
    samples: Positive
    members: Annotated[list[RoundMember], Field(min_length=1, max_length=MAX_MEMBERS)]


class RoundAnswer(Message):
    head: Head


class ProofsRequest(Message):
    """POST /v1/proofs: what proves that peers lied about a mean, and which states wrong means made; see `swarm.proofs`, `swarm.wrong_states`."""

    most_bytes = PROOFS_TOLD * (512 << 10)
    run_id: RunId
    peer: PeerId
    proofs: Annotated[list[Accusation], Field(min_length=1, max_length=PROOFS_TOLD)]


class ProofsAnswer(Message):
    """banned: those of the accused that a proof bans now. bans: the host's words, where a state was shown that it may have discarded."""

    banned: Annotated[list[PeerId], Field(max_length=PROOFS_TOLD)]
    bans: Annotated[list[HostWord], Field(max_length=BANS_TOLD)] = []


class LedgerTotals(Message):
    """How many samples, over all epochs begun, are in each state; every sample is in exactly one."""

    available: Count
    leased: Count
    pending: Count
    counted: Count


class StateInfo(Message):
    """A final state that the server offers: GET /v1/states/{digest}.state; what `dd-export` makes a model of. bytes: of the file."""

    digest: Digest
    round: Count
    samples: Count
    bytes: Positive


class Progress(Message):
    """GET /v1/progress: what a person who watches the run wants to see."""

    run_id: RunId
    run_name: str
    round: Count
    samples: Count
    """In the state, by the ledger's own count: what `ledger` has as counted, and `repeated_samples`."""
    repeated_samples: Count = 0
    """In the state though they were counted before: trained by a second peer, or again after an outage."""
    total_samples: Count
    target_batch_size: Positive
    resolution: Count = 0
    """Of its pictures, in pixels; 0: not known."""
    model: str = ""
    """What is trained: a Hub id or the name of a folder; '': not known."""
    method: str = ""
    waiting_samples: Count
    samples_per_second: Number
    loss: Number | None
    peers: list[PeerInfo]
    samples_by_peer: dict[str, int]
    banned: dict[str, str] = {}
    """Peers that the host keeps out, and why."""
    proven: dict[str, str] = {}
    """Peers that a proof bans, and why."""
    trusted: list[str] = []
    """Peers that the host trusts to average."""
    epoch: Count
    epoch_samples: Count
    dataset_samples: Positive
    ledger: LedgerTotals
    finished: bool
    state: RunState = "running"
    checkpoint: StateInfo | None = None
    """The newest final state that can be had from the server; None: it keeps none."""
    server_time: Time


Prompt = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")]


class PictureRequest(Message):
    """PUT /v1/pictures: what the state after `round` draws for `prompt`. picture: a PNG, JPEG or WebP in base64."""

    most_bytes = MAX_BODY_BYTES
    run_id: RunId
    peer: PeerId
    round: Count
    samples: Count
    prompt: Prompt
    picture: Annotated[str, StringConstraints(max_length=4 << 20, pattern=r"^[A-Za-z0-9+/]+={0,2}$")]


class DrawnPicture(Message):
    """A picture that GET /v1/pictures/<digest> gives, as WebP. time: UNIX seconds at which it came."""

    digest: Digest
    round: Count
    samples: Count
    prompt: Prompt
    peer: PeerId
    width: Positive
    height: Positive
    time: Number


class PicturesAnswer(Message):
    """The newest round's first."""

    pictures: Annotated[list[DrawnPicture], Field(max_length=10_000)]


class HistoryAnswer(Message):
    """GET /v1/history: how the run went, a column per figure, the oldest first; see `swarm.page.history`."""

    time: list[Number]
    """UNIX seconds."""
    round: list[Count]
    samples: list[Count]
    loss: list[Number | None]
    samples_per_second: list[Number]
    peers: list[Count]
    utilisation: list[Number | None]


def sample_key(epoch: int, shard: int, index: int) -> str:
    return f"{epoch}:{shard}:{index}"


def shuffled(count: int, *seed: object) -> list[int]:
    """A permutation of range(count) that depends on `seed` alone: the same with every Python, machine and peer."""
    prefix = ":".join(str(part) for part in seed)
    return sorted(range(count), key=lambda index: blake3(f"{prefix}:{index}".encode()).digest())
