"""What peers tell each other through the DHT: short signed records, renewed while their owner lives, gone soon after it died.

Nothing is decided upon before it passed the bounds here. Signatures are `dht.py`'s matter.

Peers of several versions meet in one run: a field that this program does not know is ignored, and one that is missing has its default here. So
a version may add fields that have a default; it must not take one away, or widen what one may hold.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from swarm.unpacking import unpack

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
    averaged into that state. backers: live peers whom this one has met, and that stand with it, itself included. waiting_samples: trained since, in no state yet. sent_bytes, received_bytes, transfer_seconds: of its
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
    backers: int = 1
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
        return msgpack.packb(vars(self))

    def asdict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def unpack(cls, data: bytes, *, owner: str) -> "PeerRecord":
        """The record of `owner`, whose key signed it. Raises BadRecord."""
        values = _fields_of(cls, _unpack_mapping(data))
        lists = {"parents": (_MAX_PARENTS, 64), "maddrs": (_MAX_ADDRESSES, 256)}
        record = cls(**{**values, **{name: _texts(values[name], *bounds) for name, bounds in lists.items() if name in values}})
        if record.peer_id != owner:
            raise BadRecord(f"signed by {owner}, but speaks for {record.peer_id}")
        for name in ("config", "schema", "digest"):
            _text(getattr(record, name), 64)
        for name, longest in (("name", MAX_NAME), ("hardware", MAX_HARDWARE), ("note", MAX_NOTE)):
            _text(getattr(record, name), longest)
        if record.phase not in PHASES:
            raise BadRecord(f"phase {str(record.phase)[:40]!r}")
        for name in ("round", "samples", "backers", "waiting_samples", "group_size", "sent_bytes", "received_bytes"):
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
        record = cls(**_fields_of(cls, _unpack_mapping(data)))
        if not isinstance(record.run, dict):
            raise BadRecord("run")
        _text(record.run_id, 64)
        _text(record.server_url, 512)
        return dataclasses.replace(record, head=_head(record.head), extension=_extension(record.extension))


def _fields_of(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are fields of `cls`. Raises BadRecord when one that has no default is missing."""
    names, needed = _names(cls)
    if missing := [name for name in needed if name not in values]:
        raise BadRecord(f"without {', '.join(missing)}")
    return {name: values[name] for name in names if name in values}


@functools.cache
def _names(cls: type) -> tuple[list[str], list[str]]:
    """Of its fields: all, and those that have no default."""
    fields = dataclasses.fields(cls)
    return [field.name for field in fields], [field.name for field in fields if field.default is dataclasses.MISSING]


def _head(values: Any) -> dict[str, Any] | None:
    head = _part(values, ("digest", "round", "samples", "peers"), "head")
    if head is not None:
        _text(head["digest"], 64)
        _count(head["round"])
        _count(head["samples"])
        _texts(head["peers"], 8, 64)
    return head


def _extension(values: Any) -> dict[str, Any] | None:
    """Raises BadRecord for one that is out of bounds; whose it is, `swarm.end` tells."""
    extension = _part(values, ("total_samples", "host_key", "signature"), "extension")
    if extension is not None:
        _count(extension["total_samples"])
        _text(extension["host_key"], 64)
        _text(extension["signature"], 128)
    return extension


def _part(values: Any, names: Sequence[str], what: str) -> dict[str, Any] | None:
    """These of a mapping's values, all of which must be there; None for None."""
    if values is not None and not (isinstance(values, dict) and set(names) <= set(values)):
        raise BadRecord(what)
    return None if values is None else {name: values[name] for name in names}


def words(text: str, longest: int) -> str:
    """`text` as a record may carry it: one line of at most so many printable characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return line if len(line) <= longest else line[: longest - 1] + "…"


def _unpack_mapping(data: bytes) -> dict[str, Any]:
    if not isinstance(data, bytes) or len(data) > MAX_RECORD_BYTES:
        raise BadRecord("not bytes, or too long")
    try:
        values = unpack(data)
    except ValueError as error:
        raise BadRecord(str(error)) from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise BadRecord("no mapping")
    return values


def _text(value: Any, longest: int) -> str:
    if type(value) is not str or len(value) > longest or not value.isprintable():
        raise BadRecord(f"text {str(value)[:40]!r}")
    return value


def _texts(values: Any, most: int, longest: int) -> tuple[str, ...]:
    if not isinstance(values, list) or len(values) > most:
        raise BadRecord("list of texts")
    return tuple(_text(value, longest) for value in values)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise BadRecord(f"count {str(value)[:40]}")
    return value


def _number(value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not least <= value <= most:
        raise BadRecord(f"number {str(value)[:40]}")
    return value
