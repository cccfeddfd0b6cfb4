"""A peer's RSA key, as those see it who have no DHT node: which peer id it makes, and whether it signed what is said in that peer's name."""

import base64
import hashlib

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from swarm.signing import BadSignature

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.MAX_LENGTH)  # as hivemind signs with it
_SHA256_MULTIHASH = b"\x12\x20"


def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id of an OpenSSH-encoded RSA public key.

    Source: libp2p specs, peer-ids: base58 of the SHA-256 multihash of the key as a protobuf. Raises ValueError for another kind of key.
    """
    der = _rsa(public_key).public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    wrapped = b"\x08\x00\x12" + _varint(len(der)) + der  # {1: type RSA = 0, 2: the key}
    return _base58(_SHA256_MULTIHASH + hashlib.sha256(wrapped).digest())


def check_statement(peer_id: str, statement: bytes, public_key: str, signature: str) -> None:
    """Raises BadSignature unless `public_key` (OpenSSH) is that of `peer_id` and made `signature` (base64) for `statement`."""
    try:
        key = _rsa(public_key.encode())
        if peer_id_of(public_key.encode()) != peer_id:
            raise BadSignature(f"its key is not that of {peer_id}")
        key.verify(base64.b64decode(signature, validate=True), statement, _PADDING, hashes.SHA256())
    except (InvalidSignature, ValueError):
        raise BadSignature(f"its signature is not that of {peer_id}") from None


def _rsa(public_key: bytes) -> rsa.RSAPublicKey:
    try:
        key = serialization.load_ssh_public_key(public_key)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None
    if not isinstance(key, rsa.RSAPublicKey):
        raise ValueError(f"expected an RSA public key, got {type(key).__name__}")
    return key


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _base58(data: bytes) -> str:
    number, out = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        out = _BASE58[digit] + out
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + out
