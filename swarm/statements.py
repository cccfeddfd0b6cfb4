"""What the peers of one group sign of what they give each other, so that others can check it later (docs/decisions/0028, 0030)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from swarm.digest import digest_json
from swarm.records import Text

HasSigned = Callable[[str, bytes, str, str], bool]
"""Whether a peer signed a statement: (peer, statement, key, signature)."""
Signature = Annotated[str, Field(strict=True, max_length=700, pattern=r"^[A-Za-z0-9+/]*={0,2}$")]
"""Of a peer's key, in base64; '' for none."""
Key = Annotated[str, Field(strict=True, max_length=1000, pattern=r"^(ssh-rsa [!-~]+)?$")]
"""Of a peer, public, in OpenSSH's words; '' for none."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """What one member sent for a reducer's share, as it signed it. digest: `slices.tree_digest` of its parts; key: its public key."""

    peer: Text
    digest: Text
    signature: Signature
    key: Key


def statement(run: str, group: str, digest: str) -> bytes:
    """What a reducer signs of its share. run: the run's digest; digest: `share_digest`."""
    return f"distributed-diffusion share {digest_json({'run': run, 'group': group, 'digest': digest})}".encode()


def input_statement(run: str, group: str, reducer: str, digest: str) -> bytes:
    """What a member signs of what it sends to `reducer`."""
    return f"distributed-diffusion input {digest_json({'run': run, 'group': group, 'reducer': reducer, 'digest': digest})}".encode()


def lot_statement(run: str, state: str) -> bytes:
    """What a peer signs to learn whether it checks the round that made `state`."""
    return f"distributed-diffusion check {digest_json({'run': run, 'state': state})}".encode()


def inputs_digest(inputs: Iterable[Input]) -> str:
    """Of all members' inputs of a share, in the order of their ids."""
    return digest_json([[each.peer, each.digest, each.signature, each.key] for each in inputs])


def share_digest(means: str, squares: str, inputs: str) -> str:
    """Of a share: the digests of its means' parts, of their sums of squares, and of what it was made of."""
    return digest_json({"means": means, "squares": squares, "inputs": inputs})
