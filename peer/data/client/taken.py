"""Some samples of a dataset server's, for who trains none of them: nothing is leased, and nothing reported."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from peer.contracts import Sample
from peer.data.client.download import Corrupt, fetch
from peer.data.client.manifest import SignedShards
from peer.data.client.transport import Refusal, Transport
from peer.data.shards import Row, ShardCache, read_shard
from swarm import protocol
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from swarm.signing import KnownHosts

_MOST_SHARDS = 4
_ANY_EPOCH = 1 << 53
ASK_SECONDS = 30.0
"""For the samples of one contribution, their shard included: without them the rest is measured."""


class Pictures:
    """rng: draws shards and samples. cache_bytes: of the shards that are kept in `cache_dir`."""

    def __init__(
        self, url: str, run: RunConfig, *, token: str = "", known_hosts: KnownHosts | None, cache_dir: Path, cache_bytes: int, rng: random.Random
    ):
        self._url, self._token, self._rng = url, token, rng
        self._cache = ShardCache(cache_dir, cache_bytes)
        self._shards = SignedShards(run, known_hosts, cache_dir / f"manifest-{run.run_id}-audit.json")

    async def some(self, most: int) -> list[Sample]:
        """Up to `most`: of the pictures that --validation_split holds out where there are any, else of shards drawn by chance.

        Waits until the server is there. Raises UserError when it refuses, or its shards are none.
        """
        try:
            async with Transport(self._url, self._token) as transport:
                chosen = list(await self._shards.held_out(transport))
                if not chosen:
                    every = self._shards.of_epoch(_ANY_EPOCH)
                    chosen = self._rng.sample(every, min(_MOST_SHARDS, len(every)))
                found = [
                    Sample(f"audit:{shard.index}:{number}", *row)
                    for shard in chosen
                    for number, row in enumerate(await self._rows(transport, shard))
                    if row[0]
                ]
        except Corrupt as fault:
            raise UserError(str(fault), fix="Ask the host to check its disk.", code=ExitCode.NETWORK) from None
        except Refusal as refusal:
            raise UserError(f"{self._url}: {refusal.error.message}", fix=refusal.error.fix, code=ExitCode.NETWORK) from None
        if not found:
            raise UserError(f"{self._url} gave no picture to measure the loss of.", fix="Ask the host to check its dataset.")
        return self._rng.sample(found, min(most, len(found)))

    async def of(self, peer: str, number: int, most: int) -> list[Sample]:
        """Up to `most` that are registered in contribution `number` of `peer`; none where the server does not say, or not in time."""
        with contextlib.suppress(asyncio.TimeoutError, Corrupt, Refusal, ValidationError):
            return await asyncio.wait_for(self._of(peer, number, most), ASK_SECONDS)
        return []

    async def _of(self, peer: str, number: int, most: int) -> list[Sample]:
        async with Transport(self._url, self._token) as transport:
            reply = await transport.insist_get(f"/v1/contributions/{peer}/{number}")
            keys = protocol.ContributionSamples.model_validate_json(reply.body).keys
            places = [tuple(map(int, key.split(":"))) for key in self._rng.sample(keys, min(most, len(keys)))]
            every, found = self._shards.of_epoch(_ANY_EPOCH), []
            for shard in {place[1] for place in places if place[1] < len(every)}:  # others are of a dataset that has grown since we came
                rows = await self._rows(transport, every[shard])
                found += [Sample(f"audit:{shard}:{index}", *rows[index]) for _, of, index in places if of == shard and index < len(rows)]
        return [sample for sample in found if sample.image]

    async def _rows(self, transport: Transport, shard: protocol.Shard) -> Sequence[Row]:
        """Raises Corrupt, Refusal, UserError."""
        path = await fetch(transport, self._cache, shard.digest, shard.bytes, lambda: True)
        return await asyncio.to_thread(read_shard, path, shard.samples)
