"""What a record in the DHT must be before anybody stores it or reads it: one of our two kinds, under its own key, signed by its owner.

Keys travel as hashes, so no node can read what a key is for. But each of our records says which run it is about, and that gives its
key: a record under any other key is refused. What a record says beyond that is checked by whoever reads it (`records.py`).
"""

import functools
import hashlib
import re
import time
from collections.abc import Mapping
from typing import Any

import msgpack
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from swarm.members import Members, read_membership
from swarm.peer_key import peer_id_of
from swarm.records import MAX_RECORD_BYTES, RECORD_LIFE_SECONDS, RUN_RECORD_LIFE_SECONDS
from swarm.unpacking import unpack

RUNS_KEY = "distributed-diffusion.runs.1"
MAX_OWNER_BYTES = 1024
"""Of a subkey: the owner's public key, in OpenSSH's words. RSA of 2,048 bits takes 389 bytes, of 4,096 bits 733."""
MAX_SIGNED_BYTES = MAX_RECORD_BYTES + 1024
"""A record with its signature in base64, of which RSA of 4,096 bits takes 696 bytes."""
_SKEW_SECONDS = 10.0
"""How far another clock may be ahead of ours; nobody joins whose clock differs by more than 3 s, but clocks drift later."""
_OWNER = re.compile(re.escape(RSASignatureValidator.PUBLIC_KEY_FORMAT).replace(b"_key_", rb"([^\]]+)"))
_SIGNED = re.compile(rb"(.*)\[signature:[A-Za-z0-9+/=]+\]", re.DOTALL)
_VERIFIED = 8192


def peers_key(run_id: str) -> str:
    """Where the records of a run's peers are."""
    return f"{run_id}.peers"


@functools.lru_cache(4096)
def signer_of(subkey: bytes) -> str:
    """The peer id whose key a subkey is, as msgpack brings it. Raises ValueError unless it is that key and nothing else.

    An owner has one subkey only: `3,000 records under one key` came in while anything that contained a key was taken for one.
    """
    owner = unpack(subkey) if len(subkey) <= MAX_OWNER_BYTES else None
    match = _OWNER.fullmatch(owner) if isinstance(owner, bytes) else None
    if match is None or msgpack.packb(owner) != subkey:
        raise ValueError("a subkey that is not a public key")
    return peer_id_of(match[1])


class Rules(RecordValidatorBase):
    """Asked before the signature is verified."""

    priority = 20

    def __init__(self) -> None:
        self._door: tuple[bytes, Members] | None = None

    def admit(self, members: Members) -> bool:
        """From now on, refuse records of that run's peers unless `members` admits them. Whether any were taken until now."""
        key, before = _key_id(peers_key(members.run.run_id)), self._door
        self._door = key, members
        return before is None or before[0] != key

    def validate(self, record: DHTRecord) -> bool:
        try:
            values, signer = _content(record.value), signer_of(record.subkey)
            key, life_seconds = _place_of(values, signer)
        except ValueError:
            return False
        if record.key != key or not 0 < record.expiration_time - time.time() <= life_seconds + _SKEW_SECONDS:
            return False
        return self._door is None or key != self._door[0] or _is_let_in(self._door[1], signer, values)


class Signatures(RSASignatureValidator):
    """Verifies each record once: up to 20 nodes answer every question, most of them with the same records."""

    def __init__(self, private_key: Any):
        super().__init__(private_key)
        self._verified: dict[bytes, bool] = {}

    def validate(self, record: DHTRecord) -> bool:
        digest = hashlib.sha256(self._serialize_record(record)).digest()
        if digest not in self._verified:
            while len(self._verified) >= _VERIFIED:
                del self._verified[next(iter(self._verified))]
            self._verified[digest] = super().validate(record)
        return self._verified[digest]


def _is_let_in(members: Members, signer: str, values: Mapping[str, Any]) -> bool:
    members.hear(signer, read_membership(values.get("membership")))
    return members.has(signer)  # bans are for the reader: a node that hears of one late keeps such a record in good faith


def _content(value: bytes) -> Mapping[str, Any]:
    """What is signed in `value`: a mapping, packed twice, by us and by hivemind. Raises ValueError."""
    match = _SIGNED.fullmatch(value) if len(value) <= MAX_SIGNED_BYTES else None
    data = unpack(match[1]) if match else None
    values = unpack(data) if isinstance(data, bytes) and len(data) <= MAX_RECORD_BYTES else None
    if not isinstance(values, dict):
        raise ValueError("a record that is not a mapping")
    return values


def _place_of(values: Mapping[str, Any], signer: str) -> tuple[bytes, float]:
    """The key under which a record of `signer` with this content belongs, and for how many seconds. Raises ValueError for other kinds."""
    if "run" in values:
        return _key_id(RUNS_KEY), RUN_RECORD_LIFE_SECONDS
    config = values.get("config")
    if values.get("peer_id") != signer or not isinstance(config, str):
        raise ValueError("neither a run nor the signer")
    return _key_id(peers_key(config[:16])), RECORD_LIFE_SECONDS


@functools.lru_cache(256)
def _key_id(key: str) -> bytes:
    return DHTID.generate(source=key).to_bytes()
