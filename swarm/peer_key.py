"""A peer's RSA key without a DHT node: which peer id it makes, how the peer signs with it, and whether it signed what is said in its name."""

import base64
import functools
import hashlib
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from swarm.signing import BadSignature

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.MAX_LENGTH)  # as hivemind signs with it
_LOT_PADDING = padding.PKCS1v15()  # no salt, where PSS makes another signature each time
_SHA256_MULTIHASH = b"\x12\x20"
_RSA_IDENTITY = b"\x08\x00\x12"  # libp2p's PrivateKey as a protobuf: {1: type RSA = 0, 2: the key}, the key's length follows
_BITS, _EXPONENT, _LONGEST_KEY = range(2048, 4097), 65537, 1000
"""libp2p makes no other keys. Verifying takes 40 us with them, and 5 ms with a key of 4,096 bits whose exponent is as long."""


class PeerKey:
    """What one peer signs with. `public`: OpenSSH's form of its public key."""

    def __init__(self, key: rsa.RSAPrivateKey):
        self._key = key
        form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        self.public = key.public_key().public_bytes(*form).decode("ascii")
        self.peer_id = peer_id_of(self.public.encode())

    @classmethod
    def read(cls, path: Path) -> "PeerKey":
        """The key in an identity file, which may be in use. Raises OSError, ValueError."""
        identity = path.read_bytes()
        key = serialization.load_der_private_key(_field(identity, _RSA_IDENTITY), password=None)
        if not isinstance(key, rsa.RSAPrivateKey):
            raise ValueError(f"expected an RSA key, got {type(key).__name__}")
        return cls(key)

    @classmethod
    def draw(cls) -> "PeerKey":
        """A new one, in no file."""
        return cls(rsa.generate_private_key(public_exponent=_EXPONENT, key_size=_BITS[0]))

    def sign(self, statement: bytes) -> str:
        """For `check_statement`, in base64."""
        return self._signed(statement, _PADDING)

    def lot(self, statement: bytes) -> str:
        """For `is_lot`, in base64: the one signature of its kind that this key makes of `statement`, so nobody can draw again."""
        return self._signed(statement, _LOT_PADDING)

    def _signed(self, statement: bytes, by: padding.AsymmetricPadding) -> str:
        return base64.b64encode(self._key.sign(statement, by, hashes.SHA256())).decode("ascii")


def is_lot(peer_id: str, statement: bytes, public_key: str, lot: str) -> bool:
    """Whether `public_key` (OpenSSH) is that of `peer_id`, and `lot` the one that it draws for `statement`."""
    # A base64 text of 344 characters has 16 spellings, which would be 16 draws.
    return _is_spelt_as_we_do(lot) and _has_made(peer_id, statement, public_key, lot, _LOT_PADDING)


def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id of an OpenSSH-encoded RSA public key.

    Source: libp2p specs, peer-ids: base58 of the SHA-256 multihash of the key as a protobuf. Raises ValueError for another kind of key,
    and for one that is written otherwise than OpenSSH does (with a comment): a key has one spelling.
    """
    der = _rsa(public_key).public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    wrapped = b"\x08\x00\x12" + _varint(len(der)) + der  # {1: type RSA = 0, 2: the key}
    return _base58(_SHA256_MULTIHASH + hashlib.sha256(wrapped).digest())


def check_statement(peer_id: str, statement: bytes, public_key: str, signature: str) -> None:
    """Raises BadSignature unless `public_key` (OpenSSH) is that of `peer_id` and made `signature` (base64) for `statement`."""
    _check(peer_id, statement, public_key, signature, _PADDING)


@functools.lru_cache(maxsize=4096)  # 40 us each, and every look at the others brings the same ones
def has_signed(peer_id: str, statement: bytes, public_key: str, signature: str) -> bool:
    """Whether `check_statement` has nothing against it."""
    return _has_made(peer_id, statement, public_key, signature, _PADDING)


def _has_made(peer_id: str, statement: bytes, public_key: str, signature: str, by: padding.AsymmetricPadding) -> bool:
    try:
        _check(peer_id, statement, public_key, signature, by)
    except BadSignature:
        return False
    return True


def _check(peer_id: str, statement: bytes, public_key: str, signature: str, by: padding.AsymmetricPadding) -> None:
    """Raises BadSignature."""
    try:
        key, its_id = _known(public_key)
        if its_id != peer_id:
            raise BadSignature(f"its key is not that of {peer_id}")
        key.verify(base64.b64decode(signature, validate=True), statement, by, hashes.SHA256())
    except (InvalidSignature, ValueError):
        raise BadSignature(f"its signature is not that of {peer_id}") from None


def _is_spelt_as_we_do(said: str) -> bool:
    try:
        return base64.b64encode(base64.b64decode(said, validate=True)).decode() == said
    except ValueError:
        return False


@functools.lru_cache(maxsize=4096)  # to read a key takes longer than to check a signature with it
def _known(public_key: str) -> tuple[rsa.RSAPublicKey, str]:
    """A public key and the peer id that it makes. Raises ValueError."""
    if len(public_key) > _LONGEST_KEY:
        raise ValueError(f"a key of {len(public_key)} characters")
    key = _rsa(public_key.encode())
    return key, peer_id_of(public_key.encode())


def _rsa(public_key: bytes) -> rsa.RSAPublicKey:
    try:
        key = serialization.load_ssh_public_key(public_key)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None
    if not isinstance(key, rsa.RSAPublicKey):
        raise ValueError(f"expected an RSA public key, got {type(key).__name__}")
    if key.key_size not in _BITS or key.public_numbers().e != _EXPONENT:
        raise ValueError(f"an RSA key of {key.key_size} bits, or with another exponent than {_EXPONENT}")
    if key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) != public_key:
        raise ValueError("a key in another spelling")
    return key


def _field(message: bytes, tag: bytes) -> bytes:
    """The last field of a protobuf that begins with `tag`. Raises ValueError for another message."""
    if not message.startswith(tag):
        raise ValueError("it is not an identity of a known kind")
    length, at = 0, len(tag)
    for shift in range(0, 28, 7):
        if at >= len(message):
            break
        length |= (message[at] & 0x7F) << shift
        at += 1
        if message[at - 1] < 0x80:
            break
    if len(message) != at + length:
        raise ValueError("it is torn")
    return message[at:]


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
