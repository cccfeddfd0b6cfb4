"""Who a peer is, from start to start: an RSA key in a file, for hivemind's p2pd and DHT node."""

import fcntl
from pathlib import Path

from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey

from swarm.errors import ExitCode, UserError


class Identity:
    """A peer's RSA key, kept in a file that only one process may use at a time.

    Raises UserError when the file is no key, cannot be written, or is in use by another process on this machine.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                P2P.generate_identity(str(path))
            data = path.read_bytes()
            self._lock = path.open("rb")
        except OSError as error:
            raise UserError(
                f"Cannot use the identity file {path}: {error.strerror}.", fix="Choose another --identity_path.", code=ExitCode.DISK
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(
                f"The identity {path} is in use by another process.", fix="Stop that one, or choose another --identity_path."
            ) from None
        try:
            self.peer_id = PeerID.from_identity(data).to_base58()
            self.key = _key_in(data)
        except Exception as error:
            self._lock.close()
            raise UserError(f"{path} is not an identity file: {error}.", fix="Move it away; a new one is made.") from None

    def close(self) -> None:
        self._lock.close()


def _key_in(identity: bytes) -> RSAPrivateKey:
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key.__setstate__({"_private_key": crypto_pb2.PrivateKey.FromString(identity).data})
    return key
