"""Which state a proven wrong mean has made, shown so that nobody need be believed (docs/decisions/0031).

A state's digest is that of its header and of its bytes' hashes, and its header names the group that made it. So who shows both has shown of which
group the state is. A proof against one of that group's reducers names the group as well.
"""

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from blake3 import blake3
from pydantic import Field, TypeAdapter

from swarm.digest import digest_bytes
from swarm.proofs import AnyProof
from swarm.records import Text
from swarm.run_config import RunConfig
from swarm.wrong_means import WrongMean

MOST_HEADER_CHARACTERS = 64 << 10
"""Of 24 members in each of nine rounds: 35 kB, with 250 peers' last contributions."""
MOST_CHUNKS = 5120
"""Of 4 MiB: a state of 20 GiB, as SDXL has with momentum. Header and hashes fit into one message to the trainer (320 KiB)."""
_HASH_BYTES = 32
_MOST_ROUND = 1 << 53
"""What the ledger's database takes ends at 2^63."""
MOST_BEHIND = 2
"""How many rounds after such a state the head may be: as many states more the peers keep (`transfer/disk.py`). What is older is left to the host."""


@dataclass(frozen=True, kw_only=True)
class WrongState:
    """accused: of whose wrong mean the state was made; digest: the state's; header: as its digest hashes it; chunks: the hashes of its bytes, in
    base64."""

    accused: Text
    digest: Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{64}$")]
    header: Annotated[str, Field(strict=True, max_length=MOST_HEADER_CHARACTERS)]
    chunks: Annotated[str, Field(strict=True, max_length=-(-MOST_CHUNKS * _HASH_BYTES // 3) * 4, pattern=r"^[A-Za-z0-9+/]*={0,2}$")]

    @classmethod
    def of(cls, proof: WrongMean, digest: str, header: bytes, chunk_hashes: Iterable[bytes]) -> "WrongState | None":
        """None where the state is too large to be shown. header: JSON, as it is hashed."""
        text, hashes = header.decode(), b"".join(chunk_hashes)
        if len(text) > MOST_HEADER_CHARACTERS or len(hashes) > MOST_CHUNKS * _HASH_BYTES:
            return None
        return cls(accused=proof.accused, digest=digest, header=text, chunks=base64.b64encode(hashes).decode())

    def round_by(self, proof: WrongMean, run: RunConfig) -> int | None:
        """Its round, if it was made by the mean of which `proof` holds; else None.

        The accused must have been a reducer of that group: anybody can sign a wrong mean in the name of a group in which it was not.
        """
        try:
            if blake3(self.header.encode() + base64.b64decode(self.chunks, validate=True)).hexdigest() != self.digest:
                return None
            header = json.loads(self.header)
            said = header["run"], header["group"], header["round"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        number = said[2]
        if said[:2] != (run.digest, group_of(proof)) or self.accused not in reducers_of(proof):
            return None
        return number if type(number) is int and 0 < number <= _MOST_ROUND else None


def group_of(proof: WrongMean) -> str:
    """The name of the group that the proof is about."""
    return digest_bytes(proof.group.encode())


def reducers_of(proof: WrongMean) -> list[str]:
    """Of that group; of a proof that holds."""
    return list(json.loads(proof.group)[2])


Accusation = AnyProof | WrongState
"""What the dataset server is told of liars: proofs, and which state one's wrong mean has made."""
ACCUSATIONS: TypeAdapter[tuple[Accusation, ...]] = TypeAdapter(tuple[Accusation, ...])
