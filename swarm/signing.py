"""The host's key. It signs what a run is and which shards it has, so that a peer can tell them from what others send in the host's place.

Not signed, because it changes all the time and nothing is decided by it alone: addresses, the newest state, leases (whose shards must be
in the signed manifest). Not promised: that the host is who it says; a peer compares the key with the one it was given or saw first.

The host may sign a *successor*: a spare key, kept elsewhere, that speaks for it once its own is lost. A successor's signature carries that
endorsement, so everybody who knows the host's key can check it, and the key that peers know stays the same (docs/decisions/0024).
"""

import json
import re
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm import files
from swarm.errors import ExitCode, UserError

SIGNATURE_HEADER = "X-Host-Signature"
"""Of the answer to GET /v1/manifest; the run's is in its answer itself."""
What = Literal["run", "manifest", "extension", "ban", "member", "successor", "receipt"]
_KEY, _SIGNATURE = 64, 128
MOST_SIGNATURE = _SIGNATURE + _KEY + _SIGNATURE
"""Digits of a signature: a successor's is followed by its public key and the host's signature for that."""
SIGNATURE = rf"[0-9a-f]{{{_SIGNATURE}}}([0-9a-f]{{{_KEY + _SIGNATURE}}})?"
_SUCCESSOR = re.compile(rf"successor of ([0-9a-f]{{{_KEY}}}): ([0-9a-f]{{{_SIGNATURE}}})\n")
"""The first line of a successor's file: whose it is, and the endorsement. The key itself follows, as PEM."""


class BadSignature(Exception):
    """There is no signature, or it is of another key or for something else."""


class HostKey:
    """An Ed25519 key in a file that only its owner can read. `public`: 64 hex digits, by which peers know the host: of a successor's file those
    of the key that it stands in for. `is_new`: in no file yet.

    missing: what is done without a file: "make" writes a new key, "draw" holds a new key that `keep` writes, "refuse" raises.
    Raises UserError when the file is no key, or cannot be read or written.
    """

    def __init__(self, path: Path, *, missing: Literal["make", "draw", "refuse"] = "make"):
        self._path = path
        try:
            self.is_new = not path.exists()
            if self.is_new and missing == "refuse":
                raise UserError(
                    f"There is no host key {path}.",
                    fix="Restore it; where no run has begun, the server makes a new one when it starts.",
                )
            self._key, self.public, self._endorsed = (Ed25519PrivateKey.generate(), "", "") if self.is_new else _read_key(path)
        except OSError as error:
            raise _unusable(path, error) from None
        self.public = self.public or _public(self._key)
        if missing == "make":
            self.keep()

    def keep(self) -> None:
        """Write a new key into its file; nothing to do for one that was read. Raises UserError (disk)."""
        if not self.is_new:
            return
        try:
            files.replace(self._path, _pem(self._key), mode=0o600)
        except OSError as error:
            raise _unusable(self._path, error) from None
        self.is_new = False

    def sign(self, what: What, digest: str) -> str:
        """128 hex digits for `digest` in the role of `what`; 320 where a successor signs."""
        return self._key.sign(_statement(what, digest)).hex() + self._endorsed

    def write_successor(self, path: Path) -> None:
        """Write a new key to `path` that may sign in this one's place. Raises UserError, also when something is there or this is a successor itself."""
        if self._endorsed:
            raise UserError(
                f"{self._path} is a successor itself, and cannot name another.",
                fix="Take another spare that the lost key signed, or keep copies of this one.",
            )
        if path.exists() or path.is_symlink():
            raise UserError(f"{path} exists.", fix="Name a new file: an overwritten key is lost.")
        key = Ed25519PrivateKey.generate()
        line = f"successor of {self.public}: {self.sign('successor', _public(key))}\n"
        try:
            files.replace(path, line.encode() + _pem(key), mode=0o600)
        except OSError as error:
            raise _unusable(path, error) from None


def check_signature(what: What, digest: str, signature: str, public: str) -> None:
    """Raises BadSignature unless the key `public`, or a successor that it has signed, has signed `digest` in the role of `what`."""
    if not signature:
        raise BadSignature("it is not signed")
    try:
        signer = public
        if len(signature) == MOST_SIGNATURE:
            signature, signer, endorsement = signature[:_SIGNATURE], signature[_SIGNATURE:-_SIGNATURE], signature[-_SIGNATURE:]
            _verify(public, endorsement, _statement("successor", signer))
        _verify(signer, signature, _statement(what, digest))
    except (InvalidSignature, ValueError):
        raise BadSignature(f"its signature is not that of the key {public[:16]}") from None


class KnownHosts:
    """Which key a server and a run showed first, kept in a file. given: the key as the host told it, which overrules what is kept.

    remember: whether to keep what is seen.
    """

    def __init__(self, path: Path, given: str = "", *, remember: bool = True):
        self._path, self._given, self._remember = path, given, remember

    def check(self, url: str, run_id: str, key: str) -> None:
        """Raises UserError (AUTH) when `key` is not the one given, or not the one known for this URL or this run."""
        names = (url.rstrip("/"), run_id)
        known = self._read()
        expected = [self._given] if self._given else [known[name] for name in names if name in known]
        for other in expected:
            if other != key:
                shown = 16 if key[:16] != other[:16] else None  # two that differ behind are shown whole
                where = "as --host_key says" if self._given else f"as before ({self._path})"
                raise UserError(
                    f"{url} signs with the key {key[:shown]}, not with {other[:shown]} {where}: it is not the same host.",
                    fix=f"Ask the host, another way than through this URL, whether its key is now {key}; if so, give that as --host_key.",
                    code=ExitCode.AUTH,
                )
        if self._remember and any(known.get(name) != key for name in names):
            self._write({**known, **dict.fromkeys(names, key)})

    def key_of(self, run_id: str) -> str:
        """The key given, or else the one that this run showed before; '' when there is none."""
        return self._given or self._read().get(run_id, "")

    def _read(self) -> dict[str, str]:
        try:
            known = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UserError(
                f"Cannot read {self._path}: {error}.", fix="Move it away: this peer then trusts the first key of each host again."
            ) from None
        return known if isinstance(known, dict) else {}

    def _write(self, known: dict[str, str]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(self._path, (json.dumps(known, indent=2, sort_keys=True) + "\n").encode())
        except OSError as error:
            raise UserError(f"Cannot write {self._path}: {error.strerror}.", fix="Free some space, or choose another folder.") from None


def _statement(what: What, digest: str) -> bytes:
    # The role is part of what is signed: a manifest's signature must not pass for a run's.
    return f"distributed-diffusion {what} {digest}".encode()


def _verify(public: str, signature: str, statement: bytes) -> None:
    """Raises InvalidSignature, and ValueError where `public` is no key."""
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), statement)


def _public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def _pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _read_key(path: Path) -> tuple[Ed25519PrivateKey, str, str]:
    """The key; of a successor whose it is, and what follows its signatures, else '' twice. Raises OSError, and UserError when it is none."""
    content = path.read_bytes()
    line, host, endorsed = _SUCCESSOR.match(content.decode("latin-1")), "", ""
    try:
        key = serialization.load_pem_private_key(content[line.end() if line else 0 :], password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{path} is not an Ed25519 key.", fix="Restore it: peers know the run by it. Without it, move it away.")
    if line:
        host, endorsement = line.groups()
        try:
            check_signature("successor", _public(key), endorsement, host)
        except BadSignature:
            raise UserError(
                f"{path} says that it is a successor of {host[:16]}, which has not signed it.", fix="Restore the file."
            ) from None
        endorsed = _public(key) + endorsement
    return key, host, endorsed


def _unusable(path: Path, error: OSError) -> UserError:
    return UserError(f"Cannot use the host's key {path}: {error.strerror}.", fix="Check the file and its permissions.", code=ExitCode.DISK)
