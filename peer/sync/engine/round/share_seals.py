"""In a run for members, a reducer signs the mean of its share once a group. Whoever takes that mean checks the signature.

What is signed names the group, whose name holds what the reducer drew for this one average (`Ticket.draw`). So a reducer that was started
again, on whatever disk, has no second mean to sign under the same name.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from torch import Tensor

from peer.sync.engine.certificate import Signs
from peer.sync.engine.net.streams import PeerLost
from swarm.proofs import statement

_SQUARE = struct.Struct("<d")


@dataclass(frozen=True)
class SealedShare:
    """The mean of a reducer's share, as it signed it for us. key: its public key."""

    digest: str
    signature: str
    key: str


class ShareSeals:
    """run: its digest."""

    def __init__(self, run: str, node: Signs):
        self._run, self._node = run, node

    def sign(self, group: str, digest: str) -> tuple[str, str]:
        """Ours for the mean of our share, and the key that made it: whom our record has not reached can check it as well."""
        return self._node.sign(statement(self._run, group, digest)), self._node.key_of(self._node.peer_id)

    def check(self, reducer: str, group: str, digest: str, signature: str, key: str) -> SealedShare:
        """What `reducer` gave us. Raises PeerLost, which names it, when it has not signed that."""
        if not self._node.has_signed(reducer, statement(self._run, group, digest), key, signature):
            raise PeerLost(f"{reducer[-6:]} did not sign the mean that it gave", [reducer])
        return SealedShare(digest, signature, key)


def part_hash(data: Tensor, square: float) -> bytes:
    """Of one encoded part of a mean, (num_bytes,) uint8, and its sum of squares."""
    return blake2b(data.numpy(), digest_size=32, key=_SQUARE.pack(square)).digest()


def share_digest(hashes: Iterable[bytes]) -> str:
    """Of a share: its parts' hashes in their order."""
    return blake2b(b"".join(hashes), digest_size=32).hexdigest()
