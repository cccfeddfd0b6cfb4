"""Asking a dataset server what it takes no part in the run to ask: how far away it is, its clock, how fast its bytes come, the state that it keeps."""

import asyncio
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from peer.data.client.transport import ServerAway, Transport, exchange, open_session
from swarm import protocol
from swarm.errors import ExitCode, UserError

_TRIES = 3
_CONNECT_SECONDS = 60.0
_SLOWEST_BYTES_A_SECOND = 50_000
"""A state of 2 GB over 1 Mbit/s takes half of the time that this gives."""


@dataclass(frozen=True)
class Distance:
    """seconds: of the quickest of a few questions and answers. ahead: by how much its clock is ahead of ours, give or take half of that."""

    seconds: float
    ahead: float


def distance(url: str, token: str = "") -> Distance:
    """Raises ServerAway, and UserError when it wants another token."""

    async def ask() -> Distance:
        found = []
        async with open_session() as session:
            for _ in range(_TRIES):
                began, wall = time.monotonic(), time.time()
                reply = await exchange(session, "GET", url, "/v1/run", seconds=10.0, token=token)
                took = time.monotonic() - began
                try:
                    told = protocol.RunAnswer.model_validate_json(reply.body).server_time
                except ValueError:
                    raise ServerAway("something that is not an answer of a dataset server") from None
                found.append(Distance(took, told - wall - took / 2))
        return min(found, key=lambda each: each.seconds)

    return asyncio.run(ask())


def download(url: str, manifest: str, token: str = "", *, most_bytes: int, seconds: float) -> tuple[int, float]:
    """(bytes, seconds) of the begin of a shard. Stops at `most_bytes` or after `seconds`. Raises ServerAway and Refusal."""

    async def fetch() -> tuple[int, float]:
        async with Transport(url, token) as transport:
            reply = await exchange(transport._session, "GET", url, f"/v1/manifest/{manifest}", seconds=30, token=token)
            try:
                shards = protocol.Manifest.model_validate_json(reply.body).shards
            except ValueError:
                raise ServerAway("a manifest that this program does not know") from None
            shard, count, began = max(shards, key=lambda each: each.bytes), 0, time.monotonic()
            headers = {"Range": f"bytes=0-{min(shard.bytes, most_bytes) - 1}"}
            async with transport.stream(f"/v1/blobs/{shard.digest}.tar", headers) as response:
                async for piece in response.content.iter_chunked(1 << 16):
                    count += len(piece)
                    if count >= most_bytes or time.monotonic() - began > seconds:
                        break
            return count, time.monotonic() - began

    return asyncio.run(fetch())


def download_state(url: str, folder: Path, token: str = "") -> Path | None:
    """The newest final state that the server offers, as a file in `folder`; None where it offers none.

    Raises ServerAway, also for a server that sends less than 50 kB a second, Refusal, and UserError where the disk has no room.

    Whether its bytes are what its digest says is for its reader to check.
    """

    async def fetch() -> Path | None:
        async with Transport(url, token) as transport:
            reply = await exchange(transport._session, "GET", url, "/v1/progress", seconds=30, token=token)
            try:
                offered = protocol.Progress.model_validate_json(reply.body).checkpoint
            except ValueError:
                raise ServerAway("something that is not an answer of a dataset server") from None
            if offered is None:
                return None
            folder.mkdir(parents=True, exist_ok=True)
            path, count = folder / f"{offered.digest}.state", 0
            if (free := shutil.disk_usage(folder).free) < offered.bytes:
                said = f"The server's state has {offered.bytes / 1e9:.1f} GB, and {folder} has room for {free / 1e9:.1f} GB."
                raise UserError(said, fix="Free some space, or give another folder.", code=ExitCode.DISK)
            until = time.monotonic() + _CONNECT_SECONDS + offered.bytes / _SLOWEST_BYTES_A_SECOND
            async with transport.stream(f"/v1/states/{offered.digest}.state", {}) as response:
                with path.open("wb") as file:
                    async for piece in response.content.iter_chunked(1 << 20):
                        count += file.write(piece)
                        if count > offered.bytes or time.monotonic() > until:
                            break
            if count != offered.bytes:
                raise ServerAway(f"{count} bytes of the state's {offered.bytes}")
            return path

    return asyncio.run(fetch())
