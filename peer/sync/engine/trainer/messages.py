"""All that the training process and its sidecar say to each other, as types; how they travel is in `port.py`.

A message is a frozen dataclass. Its fields are msgpack's own kinds of values, but for memory (`SharedBuffer`), which travels as a file
descriptor. The name of its class is the first word on the wire.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from peer.contracts import CommittedRound, Member
from peer.sync.engine.vectors import SharedBuffer
from swarm.errors import ExitCode, UserError

_STUCK_SECONDS = 5.0
"""A trainer that is silent for two of its steps and this long is not stepping."""


# ------------------------------------------------------------------ the trainer says


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first message to a new sidecar: the state that the parameters last stood on, and who we are."""

    state: SharedBuffer
    header: Mapping[str, Any]
    run: Mapping[str, Any]
    sizes: list[int]
    """Elements in the run's codec, and in the one for small tensors."""
    strategy: str
    """`module:function`, from which the sidecar makes its own."""
    folder: str
    state_on: str
    peers: list[str]
    has_joined: bool
    """Whether an earlier sidecar of this trainer has found the swarm."""
    host_maddrs: list[str]
    announce_maddrs: list[str]
    identity_path: str
    client_mode: bool
    server_url: str
    last_known: Mapping[str, Any] | None
    """{digest, samples} of the newest state that the server or the DHT knew of."""
    last_holders: list[str]
    min_peers: int
    host_key: str
    extension: Mapping[str, Any]
    bans: list[Mapping[str, Any]]
    """As `swarm.bans.said` makes them."""
    membership: Mapping[str, Any] | None
    """As `swarm.members.said` makes it."""
    max_upload_mbit: float
    peer_name: str
    hardware: str
    name: str
    debug: bool
    log_format: str


@dataclass(frozen=True)
class Progress:
    """How far the trainer is. waiting: samples that are in no state yet; stands_on: digest of the state that its parameters are rebased onto."""

    waiting: int = 0
    samples_per_second: float = 0.0
    step_seconds: float = 0.0
    share_lost: float = 0.0
    """Of its time, what it spent on rounds: waiting, freezing, rebasing."""
    loss: float | None = None
    waits: bool = False
    """For the swarm, instead of training at that speed."""
    paused: bool = False
    """By its owner."""
    stands_on: str = ""
    validation_loss: float | None = None
    """Of held-out pictures, in the state after `validation_round`."""
    validation_round: int = 0

    def brings_samples(self, age_seconds: float) -> bool:
        """Whether samples are to be expected of a trainer that said this `age_seconds` ago."""
        if age_seconds >= 2 * self.step_seconds + _STUCK_SECONDS:
            return False
        return self.waiting > 0 or (self.samples_per_second > 0 and not self.waits)


@dataclass(frozen=True)
class Offer:
    """A frozen contribution. Said again after each rebase for as long as it is in no state."""

    number: int
    samples: int
    parent: str
    """The state that the trainer stood on when it said this."""
    encoded: SharedBuffer
    receipt: str = ""
    """The host's for it; '' without one."""


@dataclass(frozen=True)
class Nothing:
    """Asked to freeze, it has no samples; or what it froze was refused by the dataset server."""


@dataclass(frozen=True)
class Extend:
    """The host has put off the run's end."""

    extension: Mapping[str, Any]


@dataclass(frozen=True)
class Admitted:
    """The host has renewed our membership."""

    membership: Mapping[str, Any]


@dataclass(frozen=True)
class Banned:
    """The host's words about peers, all that are known."""

    words: list[Mapping[str, Any]]


@dataclass(frozen=True)
class Leave:
    """It makes no more samples: what it has is averaged as soon as can be."""


@dataclass(frozen=True)
class Close:
    """End now. reason: why the training failed, for the others to read."""

    reason: str = ""


# ------------------------------------------------------------------ the sidecar says


@dataclass(frozen=True)
class Ready:
    """It has joined the DHT."""

    peer_id: str
    maddrs: list[str]


@dataclass(frozen=True)
class Freeze:
    """A round is due: freeze what you have, and offer it."""


@dataclass(frozen=True)
class Train:
    """The frozen contribution has to wait: train on meanwhile."""


@dataclass(frozen=True)
class Rebase:
    """A new state: move the parameters onto it."""

    digest: str
    header: Mapping[str, Any]
    state: SharedBuffer


@dataclass(frozen=True)
class Final:
    """A state that can no longer be lost: report it."""

    digest: str
    parent: str
    round: int
    samples: int
    members: list[list[Any]]

    @classmethod
    def of(cls, committed_round: CommittedRound) -> "Final":
        s = committed_round
        return cls(s.digest, s.parent, s.round, s.samples, [[m.peer, m.number, m.samples] for m in s.members])

    @property
    def committed_round(self) -> CommittedRound:
        return CommittedRound(self.digest, self.parent, self.round, self.samples, tuple(Member(*member) for member in self.members))


@dataclass(frozen=True)
class Proven:
    """What is proven of peers that lied about a mean, for the dataset server."""

    accusations: list[Mapping[str, Any]]


@dataclass(frozen=True)
class News:
    """For the person who watches the log."""

    text: str


@dataclass(frozen=True)
class Extended:
    """The others have heard that the host put off the run's end."""

    extension: Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """What the swarm looks like, by the names in `METRICS`."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class Done:
    """The run is over, and its last state is final."""


@dataclass(frozen=True)
class Failed:
    """The sidecar cannot go on, and nor can the trainer."""

    message: str
    fix: str
    code: int

    @classmethod
    def of(cls, error: UserError) -> "Failed":
        return cls(error.message, error.fix, int(error.code))

    @property
    def error(self) -> UserError:
        return UserError(self.message, fix=self.fix, code=ExitCode(self.code))


@dataclass(frozen=True)
class Pulse:
    """A sign of life."""


FromTrainer = Start | Progress | Offer | Nothing | Extend | Banned | Admitted | Leave | Close
FromSidecar = Ready | Freeze | Train | Rebase | Final | Proven | News | Extended | Seen | Done | Failed | Pulse
Message = FromTrainer | FromSidecar

_KINDS = {kind.__name__.lower(): kind for kind in (*FromTrainer.__args__, *FromSidecar.__args__)}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class Sends(Protocol):
    """Where a message goes: a line to the other process or, where there is none, whoever stands for it. Does not block."""

    def send(self, message: Message) -> None: ...


def pack(message: Message) -> tuple[str, dict[str, Any], list[SharedBuffer]]:
    """Its kind, its values, and its memory, as a port takes them."""
    cls, values = type(message), vars(message)
    if memory := _memory(cls):
        values = {name: value for name, value in values.items() if name not in memory}
    return _NAMES[cls], values, [getattr(message, name) for name in memory]


def unpack(kind: str, values: dict[str, Any], buffers: list[SharedBuffer]) -> Message:
    """Both ends are of one program: a message that does not fit its type is a broken invariant."""
    cls = _KINDS[kind]
    return cls(**values, **dict(zip(_memory(cls), buffers, strict=True)))


@functools.cache
def _memory(cls: type[Message]) -> list[str]:
    """Its fields that travel as file descriptors."""
    return [field.name for field in fields(cls) if field.type is SharedBuffer]
