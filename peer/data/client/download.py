"""Shards from the server into the cache: resumed where a connection broke, verified before they are used."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from peer.data.client.transport import ServerAway, Transport
from peer.data.shards import ShardCache
from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)
_CORRUPT_TRIES = 3


class Corrupt(Exception):
    """A shard arrived with other bytes than its digest says, again and again."""


async def fetch(transport: Transport, cache: ShardCache, digest: str, size: int, wanted: Callable[[], bool]) -> Path | None:
    """The shard's file in the cache; None once it is not `wanted` any more.

    Raises Corrupt, Refusal where the server has no such shard, and UserError when the disk takes nothing.
    """
    try:
        with cache.fetched(digest):
            return await _fetch(transport, cache, digest, size, wanted)
    except OSError as error:
        raise UserError(
            f"Cannot keep shards on the disk: {error.strerror or error}.",
            fix="Free some space, or choose another --cache_dir.",
            code=ExitCode.DISK,
        ) from None


async def _fetch(transport: Transport, cache: ShardCache, digest: str, size: int, wanted: Callable[[], bool]) -> Path | None:
    """As `fetch`; raises OSError when the disk takes nothing."""
    corrupt, backoff = 0, transport.backoff()
    path = await asyncio.to_thread(cache.get, digest)
    while path is None and wanted():
        cache.make_room(size)
        part = cache.part(digest)
        had = _size(part)
        try:
            await _download(transport, part, digest, size)
        except ServerAway as away:
            backoff = transport.backoff() if _size(part) > had else backoff  # a link that drops and comes back need not be spared
            await backoff.wait(f"shard {digest[:16]}", away)
            continue
        path = await asyncio.to_thread(cache.admit, digest)
        corrupt += path is None
        if corrupt == _CORRUPT_TRIES:
            raise Corrupt(f"Shard {digest[:16]} arrived corrupt {corrupt} times.")
        if path is None:
            log.warning("shard %s arrived corrupt; fetching it again", digest[:16])
    return path


async def _download(transport: Transport, part: Path, digest: str, size: int) -> None:
    """Append what is missing to the shard's part. Raises ServerAway when it ends early, and Refusal."""
    have = _size(part)
    if have >= size:
        return
    headers = {"Range": f"bytes={have}-"} if have else {}
    async with transport.stream(f"/v1/blobs/{digest}.tar", headers) as response:
        with part.open("ab" if response.status == 206 else "wb") as file:
            async for piece in response.content.iter_chunked(1 << 20):
                file.write(piece)
                if file.tell() > size:
                    return  # more than the shard has: its digest will not be right
    if part.stat().st_size < size:
        raise ServerAway(f"{part.stat().st_size} of {size} bytes")


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
