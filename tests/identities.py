"""Peers' keys for tests: one for each name, drawn when it is first asked for."""

import functools
import threading
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from swarm.peer_key import PeerKey
from swarm.signed_request import Signer

_RSA = b"\x08\x00\x12"


def key(name: str) -> PeerKey:
    with _drawing:  # else two threads that ask for one name at once get a key each
        return _key(name)


@functools.cache
def _key(name: str) -> PeerKey:
    return PeerKey.draw()


def id_of(name: str) -> str:
    _names[key(name).peer_id] = name
    return key(name).peer_id


def signer(peer_id: str) -> Signer | None:
    """Of a peer that `id_of` named; None for another."""
    name = _names.get(peer_id)
    return _signer(name) if name else None


@functools.cache
def _signer(name: str) -> Signer:
    return Signer(key(name))


def identity_file(path: Path, name: str) -> Path:
    """The file in which a peer keeps the key of that name, as p2pd reads it."""
    form = serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    der = key(name)._key.private_bytes(*form)
    length = bytes([len(der) & 0x7F | 0x80, len(der) >> 7])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_RSA + length + der)
    return path


_names: dict[str, str] = {}
_drawing = threading.Lock()
