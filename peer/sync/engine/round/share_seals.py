"""In a run for members, a reducer signs the mean of its share once a group. Whoever takes that mean checks the signature."""

import json
import logging
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from torch import Tensor

from peer.sync.engine.certificate import Signs
from peer.sync.engine.net.streams import PeerLost
from swarm import files
from swarm.proofs import statement

log = logging.getLogger(__name__)
_REMEMBERED = 64
_SQUARE = struct.Struct("<d")


@dataclass(frozen=True)
class SealedShare:
    """The mean of a reducer's share, as it signed it for us. key: its public key."""

    digest: str
    signature: str
    key: str


class ShareSeals:
    """run: its digest. path: what was signed for the last groups; a peer that is started again must not sign another mean for one of them."""

    def __init__(self, run: str, node: Signs, path: Path):
        self._run, self._node, self._path = run, node, path
        self._signed = self._read()

    def sign(self, group: str, digest: str) -> str:
        """Ours for the mean of our share, on disk before it is said. Raises PeerLost when we have signed another one, OSError.

        Members could make us sign two: they send us other bytes once we were started again, and keep the first mean.
        """
        if self._signed.setdefault(group, digest) != digest:
            raise PeerLost("this peer has signed another mean for this group")
        while len(self._signed) > _REMEMBERED:
            del self._signed[next(iter(self._signed))]
        files.replace(self._path, json.dumps(self._signed).encode())
        return self._node.sign(statement(self._run, group, digest))

    def check(self, reducer: str, group: str, digest: str, signature: str) -> SealedShare | None:
        """What `reducer` gave us; None where its key, which its record brings, is not at hand. Raises PeerLost, which names it, when it has not
        signed that."""
        key = self._node.key_of(reducer)
        if not key:
            return None
        if not self._node.has_signed(reducer, statement(self._run, group, digest), key, signature):
            raise PeerLost(f"{reducer[-6:]} did not sign the mean that it gave", [reducer])
        return SealedShare(digest, signature, key)

    def _read(self) -> dict[str, str]:
        try:
            known = json.loads(self._path.read_text(encoding="utf-8"))
            return {str(group): str(digest) for group, digest in known.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            log.warning("ignored %s: %s", self._path, error)
            return {}


def part_hash(data: Tensor, square: float) -> bytes:
    """Of one encoded part of a mean, (num_bytes,) uint8, and its sum of squares."""
    return blake2b(data.numpy(), digest_size=32, key=_SQUARE.pack(square)).digest()


def share_digest(hashes: Iterable[bytes]) -> str:
    """Of a share: its parts' hashes in their order."""
    return blake2b(b"".join(hashes), digest_size=32).hexdigest()
