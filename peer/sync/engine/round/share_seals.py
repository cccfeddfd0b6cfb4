"""In a run for members, each member signs what it sends for a reducer's share, and the reducer signs the mean of its share and what it was made of.

A reducer takes no input that its sender did not sign, and a member no mean that its reducer did not. What is signed names the group, whose name
holds what the reducer drew for this one average (`Ticket.draw`). So a reducer that was started again, on whatever disk, has no second mean to
sign under the same name.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from torch import Tensor

from peer.sync.engine.certificate import Signs
from peer.sync.engine.codec import Part
from peer.sync.engine.net.streams import PeerLost
from swarm.slices import tree_digest
from swarm.statements import Input, input_statement, inputs_digest, share_digest, statement
from swarm.wrong_means import MOST_SENDERS

_SQUARE = struct.Struct("<d")


@dataclass(frozen=True)
class SealedShare:
    """The mean of a reducer's share, as it signed it for us. key: its public key; hashes: of the mean's parts; squares, inputs: digests of the
    parts' sums of squares and of what members sent; made_of: the latter as members signed it, in a group that can be checked."""

    digest: str
    signature: str
    key: str
    hashes: tuple[bytes, ...] = ()
    squares: str = ""
    inputs: str = ""
    made_of: tuple[Input, ...] = ()


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

    def check_inputs(self, reducer: str, members: int, digest: str, made_of: tuple[Input, ...]) -> tuple[Input, ...]:
        """What `reducer` says that its mean was made of. Raises PeerLost, which names it, when it is not what it signed: whoever has taken the mean
        could not show that it is wrong. Whether members signed these is not looked at: a list with other ones is a proof."""
        if members > MOST_SENDERS:
            return ()
        if inputs_digest(made_of) != digest:
            raise PeerLost(f"{reducer[-6:]} does not show what its mean was made of", [reducer])
        return made_of

    def sign_input(self, group: str, reducer: str, hashes: Sequence[bytes]) -> Input:
        """Of what we send to `reducer`. hashes: of its parts."""
        peer, digest = self._node.peer_id, tree_digest(hashes)
        signature = self._node.sign(input_statement(self._run, group, reducer, digest))
        return Input(peer=peer, digest=digest, signature=signature, key=self._node.key_of(peer))

    def check_input(self, group: str, sent: Input) -> Input:
        """What its sender says to have sent to us. Raises PeerLost, which names it, when it has not signed that."""
        if not self._node.has_signed(sent.peer, input_statement(self._run, group, self._node.peer_id, sent.digest), sent.key, sent.signature):
            raise PeerLost(f"{sent.peer[-6:]} did not sign what it sent", [sent.peer])
        return sent


def part_hash(part: Part, data: Tensor) -> bytes:
    """Of one encoded part, (num_bytes,) uint8."""
    return part.layout.part_hash(memoryview(data.numpy()))


class Given:
    """A share's mean, part by part, as its reducer signs it."""

    def __init__(self, parts: Iterable[tuple[Part, Tensor, float]] = ()):
        """parts: of each, its encoded bytes and its sum of squares."""
        self.hashes: list[bytes] = []
        self._squares: list[float] = []
        for part, data, square in parts:
            self.add(part, data, square)

    def add(self, part: Part, data: Tensor, square: float) -> None:
        self.hashes.append(part_hash(part, data))
        self._squares.append(square)

    @property
    def squares(self) -> str:
        return blake2b(b"".join(map(_SQUARE.pack, self._squares)), digest_size=32).hexdigest()

    def digest(self, inputs: str) -> str:
        """Of the share. inputs: `inputs_digest` of what it was made of."""
        return share_digest(tree_digest(self.hashes), self.squares, inputs)
