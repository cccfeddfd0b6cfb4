"""What peers tell each other through the DHT: short signed records, renewed while their owner lives, gone soon after it died.

Nothing is decided upon before it passed the bounds here. Signatures are `dht.py`'s matter.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

RECORD_LIFE_SECONDS = 20.0
"""A peer without a renewed record for this long is gone."""
RENEW_SECONDS = 5.0
"""Three renewals may be lost in a row before a peer counts as gone."""
RUN_RECORD_LIFE_SECONDS = 600.0
MAX_RECORD_BYTES = 4096
MAX_SAMPLES_PER_SECOND = 1e6
MAX_NAME, MAX_HARDWARE, MAX_NOTE = 32, 64, 160
"""Characters of what a peer says of itself in words."""
JOINING, TRAIN, CATCHING_UP, AVERAGING, PAUSED, DONE = "joining", "train", "catching_up", "averaging", "paused", "done"
ASSIST = "assist"
"""The phase of a peer that trains nothing: it reduces, leads and hands out states for those who do."""
LEAVING = "leaving"
"""The phase in the last record of a peer that leaves in order: nobody waits for it."""
PHASES = (JOINING, TRAIN, CATCHING_UP, AVERAGING, PAUSED, DONE, ASSIST, LEAVING)
_MAX_COUNT = 1 << 53
_MAX_ADDRESSES = 6
_MAX_PARENTS = 8


class BadRecord(ValueError):
    """A record that is malformed or out of bounds: ignore it."""


@dataclass(frozen=True, kw_only=True)
class PeerRecord:
    """One live peer, as it describes itself.

    digest, parents: its state's digest and those of the state's last ancestors, the parent first. samples: all samples ever
    averaged into that state. waiting_samples: trained since, in no state yet. sent_bytes, received_bytes, transfer_seconds: of its
    last averaged round. share_lost: of its time, in which it waited for rounds. phase: one of PHASES. name: what its owner calls it, if
    anything. note: what it is waiting for, or what failed and why; '' while all is well.
    """

    peer_id: str
    config: str
    schema: str
    round: int
    samples: int
    digest: str
    parents: tuple[str, ...] = ()
    waiting_samples: int = 0
    samples_per_second: float = 0.0
    loss: float | None = None
    phase: str = TRAIN
    name: str = ""
    hardware: str = ""
    note: str = ""
    group_size: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    transfer_seconds: float = 0.0
    share_lost: float = 0.0
    client_mode: bool = False
    maddrs: tuple[str, ...] = ()
    time: float = 0.0

    def pack(self) -> bytes:
        return msgpack.packb(dataclasses.asdict(self))

    def asdict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def unpack(cls, data: bytes, *, owner: str) -> "PeerRecord":
        """The record of `owner`, whose key signed it. Raises BadRecord."""
        values = _unpack_mapping(data)
        if set(values) != {field.name for field in dataclasses.fields(cls)}:
            raise BadRecord(f"fields {sorted(map(str, values))}")
        record = cls(
            **{**values, "parents": _texts(values["parents"], _MAX_PARENTS, 64), "maddrs": _texts(values["maddrs"], _MAX_ADDRESSES, 256)}
        )
        if record.peer_id != owner:
            raise BadRecord(f"signed by {owner}, but speaks for {record.peer_id}")
        for name in ("config", "schema", "digest"):
            _text(getattr(record, name), 64)
        for name, longest in (("name", MAX_NAME), ("hardware", MAX_HARDWARE), ("note", MAX_NOTE)):
            _text(getattr(record, name), longest)
        if record.phase not in PHASES:
            raise BadRecord(f"phase {str(record.phase)[:40]!r}")
        for name in ("round", "samples", "waiting_samples", "group_size", "sent_bytes", "received_bytes"):
            _count(getattr(record, name))
        _number(record.transfer_seconds, 0, 1e6)
        _number(record.share_lost, 0, 1)
        _number(record.samples_per_second, 0, MAX_SAMPLES_PER_SECOND)
        _number(record.time, 0, 1e11)
        if record.loss is not None:
            _number(record.loss, -1e9, 1e9)
        if not isinstance(record.client_mode, bool):
            raise BadRecord("client_mode")
        return record


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run, as one of its peers describes it to a newcomer that knows nothing but an address.

    head: {digest, round, samples, peers} of the newest state the peer held, so that nobody starts the run again from its base model.
    """

    run_id: str
    run: Mapping[str, Any]
    server_url: str = ""
    head: Mapping[str, Any] | None = None
    extension: Mapping[str, Any] | None = None
    """The host's order that the run goes on beyond its total_samples, see swarm/end.py; checked by whoever knows the host's key."""

    def pack(self) -> bytes:
        return msgpack.packb(dataclasses.asdict(self))

    @classmethod
    def unpack(cls, data: bytes) -> "RunRecord":
        """Raises BadRecord; the configuration itself is checked by `RunConfig.from_mapping`."""
        values = _unpack_mapping(data)
        if set(values) != {"run_id", "run", "server_url", "head", "extension"} or not isinstance(values["run"], dict):
            raise BadRecord(f"fields {sorted(map(str, values))}")
        _text(values["run_id"], 64)
        _text(values["server_url"], 512)
        head = values["head"]
        if head is not None:
            if not isinstance(head, dict) or set(head) != {"digest", "round", "samples", "peers"}:
                raise BadRecord("head")
            _text(head["digest"], 64)
            _count(head["round"])
            _count(head["samples"])
            _texts(head["peers"], 8, 64)
        _check_extension(values["extension"])
        return cls(**values)


def _check_extension(values: Any) -> None:
    """Raises BadRecord for one that is out of bounds; whose it is, `swarm.end` tells."""
    if values is None:
        return
    if not isinstance(values, dict) or set(values) != {"total_samples", "host_key", "signature"}:
        raise BadRecord("extension")
    _count(values["total_samples"])
    _text(values["host_key"], 64)
    _text(values["signature"], 128)


def words(text: str, longest: int) -> str:
    """`text` as a record may carry it: one line of at most so many printable characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return line if len(line) <= longest else line[: longest - 1] + "…"


def _unpack_mapping(data: bytes) -> dict[str, Any]:
    if not isinstance(data, bytes) or len(data) > MAX_RECORD_BYTES:
        raise BadRecord("not bytes, or too long")
    try:
        values = msgpack.unpackb(data)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise BadRecord(f"no msgpack: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise BadRecord("no mapping")
    return values


def _text(value: Any, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest or not value.isprintable():
        raise BadRecord(f"text {str(value)[:40]!r}")
    return value


def _texts(values: Any, most: int, longest: int) -> tuple[str, ...]:
    if not isinstance(values, list) or len(values) > most:
        raise BadRecord("list of texts")
    return tuple(_text(value, longest) for value in values)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise BadRecord(f"count {str(value)[:40]}")
    return value


def _number(value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not least <= value <= most:
        raise BadRecord(f"number {str(value)[:40]}")
    return value
