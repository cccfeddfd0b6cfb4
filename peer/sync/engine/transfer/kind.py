"""What a peer that has no model must know to hold a run's state: which tensors, and how long the vector's segments are.

Who trains derives both from `params`; who assists asks those who train, and believes first what most of them say.
"""

import asyncio
import collections
import contextlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer.sync.engine.net.messages import KIND_OF_STATE, read
from peer.sync.engine.net.streams import Channel, PeerLost, Streams
from swarm import files

KIND = "distributed-diffusion.kind.1"
_ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Kind:
    """schema: digest of the names, shapes and dtypes; sizes: elements of the vector's segments, as `codec.Wire` takes them."""

    schema: str
    sizes: tuple[int, ...]

    def num_bytes(self, slots: int) -> int:
        """Of a state whose strategy keeps `slots` tensors besides the anchor."""
        return 4 * sum(self.sizes) * (1 + slots)

    def to_json(self) -> dict[str, Any]:
        return {"schema": self.schema, "sizes": list(self.sizes)}

    @classmethod
    def from_json(cls, values: Any) -> "Kind":
        """Raises BadMessage."""
        return cls(**read(KIND_OF_STATE, values))

    def write(self, path: Path) -> None:
        """Durably: without it the states beside it cannot be read. Raises OSError."""
        files.replace(path, json.dumps(self.to_json()).encode())

    @classmethod
    def read(cls, path: Path) -> "Kind | None":
        with contextlib.suppress(OSError, ValueError):
            return cls.from_json(json.loads(path.read_text()))
        return None


async def serve_kind(streams: Streams, kind: Kind) -> None:
    async def answer(channel: Channel) -> None:
        await channel.send(kind.to_json(), seconds=_ANSWER_SECONDS)

    await streams.serve(KIND, answer)


async def ask_kinds(streams: Streams, peers: Collection[str]) -> list[Kind]:
    """What `peers` say, first what most of them do."""

    async def ask(peer: str) -> Kind | None:
        with contextlib.suppress(PeerLost), contextlib.closing(await streams.open(peer, KIND)) as channel:
            answer, _ = await channel.receive(KIND_OF_STATE, seconds=_ANSWER_SECONDS)
            return Kind(**answer)
        return None

    votes = collections.Counter(kind for kind in await asyncio.gather(*map(ask, peers)) if kind is not None)
    return sorted(votes, key=lambda kind: (-votes[kind], kind.schema, kind.sizes))
