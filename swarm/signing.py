"""The host's key. It signs what a run is and which shards it has, so that a peer can tell them from what others send in the host's place.

Not signed, because it changes all the time and nothing is decided by it alone: addresses, the newest state, leases (whose shards must be
in the signed manifest). Not promised: that the host is who it says; a peer compares the key with the one it was given or saw first.
"""

import json
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm import files
from swarm.errors import ExitCode, UserError

SIGNATURE_HEADER = "X-Host-Signature"
"""Of the answer to GET /v1/manifest; the run's is in its answer itself."""
What = Literal["run", "manifest", "extension", "ban", "member"]


class BadSignature(Exception):
    """There is no signature, or it is of another key or for something else."""


class HostKey:
    """An Ed25519 key in a file that only its owner can read. `public`: 64 hex digits; `is_new`: in no file yet.

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
            self._key = Ed25519PrivateKey.generate() if self.is_new else _read_key(path)
        except OSError as error:
            raise _unusable(path, error) from None
        self.public = self._key.public_key().public_bytes_raw().hex()
        if missing == "make":
            self.keep()

    def keep(self) -> None:
        """Write a new key into its file; nothing to do for one that was read. Raises UserError (disk)."""
        if not self.is_new:
            return
        pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        try:
            files.replace(self._path, self._key.private_bytes(*pem), mode=0o600)
        except OSError as error:
            raise _unusable(self._path, error) from None
        self.is_new = False

    def sign(self, what: What, digest: str) -> str:
        """128 hex digits for `digest` in the role of `what`."""
        return self._key.sign(_statement(what, digest)).hex()


def check_signature(what: What, digest: str, signature: str, public: str) -> None:
    """Raises BadSignature unless the key `public` has signed `digest` in the role of `what`."""
    if not signature:
        raise BadSignature("it is not signed")
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), _statement(what, digest))
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
                where = "as --host_key says" if self._given else f"as before ({self._path})"
                raise UserError(
                    f"{url} signs with the key {key[:16]}, not with {other[:16]} {where}: it is not the same host.",
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
            raise UserError(f"Cannot read {self._path}: {error}.", fix="Move it away: hosts' keys are then learned anew.") from None
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


def _read_key(path: Path) -> Ed25519PrivateKey:
    """Raises OSError, and UserError when it is none."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{path} is no Ed25519 key.", fix="Restore it: peers know the run by it. Without it, move it away.")
    return key


def _unusable(path: Path, error: OSError) -> UserError:
    return UserError(f"Cannot use the host's key {path}: {error.strerror}.", fix="See to it.", code=ExitCode.DISK)
