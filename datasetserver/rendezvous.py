"""Keeps the bootstrap process running, and holds what it last said: our addresses in the DHT and the live peers."""

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from swarm import child
from swarm.protocol import PeerInfo

log = logging.getLogger(__name__)
_STALE_SECONDS = 20.0
_LONGEST_LINE = 64 << 20  # 10,000 peers of a few kB each


class Rendezvous:
    """`options` go to `datasetserver.bootstrap` as they are. Start with `start()`; `ready` is set once it told its addresses."""

    def __init__(self, options: Mapping[str, Any]):
        self._options = dict(options)
        self._peers: list[PeerInfo] = []
        self._heard = float("-inf")
        self._task: asyncio.Task | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.maddrs: list[str] = []
        self.ready = asyncio.Event()
        self.error: dict[str, Any] | None = None
        """Why the first start failed: {message, fix, code}."""

    def peers(self) -> list[PeerInfo]:
        """Live peers; none when the DHT node's last report is so old that they may be gone."""
        return self._peers if time.monotonic() - self._heard < _STALE_SECONDS else []

    def tell(self, **news: Any) -> None:
        """Change options of the process: of the one that runs, and of those that may follow it."""
        self._options.update(news)
        if self._process and not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(news).encode() + b"\n")

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """End the process, in order if it will, within 12 s."""
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_running(self) -> None:
        pause = 1.0
        while True:
            started = time.monotonic()
            await self._run_once()
            pause = 1.0 if time.monotonic() - started > 60 else min(2 * pause, 30.0)
            log.warning("the DHT node ended; starting it again in %.0f s", pause)
            await asyncio.sleep(pause)

    async def _run_once(self) -> None:
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "datasetserver.bootstrap",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
                env=child.environment(),
                start_new_session=True,  # Ctrl-C is for us: we end it, once we have served what is on its way
            )
        except OSError as error:  # no memory, or no room in the table of processes: there may be some later
            log.warning("cannot start the DHT node: %s", error)
            return
        try:
            process.stdin.write(json.dumps(self._options).encode() + b"\n")
            async for line in process.stdout:
                self._hear(json.loads(line))
            await process.wait()
        except (ConnectionError, ValueError) as error:
            log.warning("the DHT node cannot be understood: %s", error)
        finally:
            await _end(process)

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "error" in message:
            self.error = message["error"]
            log.warning("%s %s", self.error["message"], self.error["fix"])
            self.ready.set()
            return
        self.error = None
        self.maddrs = list(message.get("maddrs", self.maddrs))
        if "records" in message:
            self._peers, self._heard = [info for info in map(_peer_info, message["records"]) if info], time.monotonic()
        self.ready.set()


def _peer_info(record: Mapping[str, Any]) -> PeerInfo | None:
    """What people and other peers need of a record; None when it is not what ours look like."""
    try:
        return PeerInfo.model_validate({name: record[name] for name in PeerInfo.model_fields if name in record})
    except ValidationError as error:
        log.debug("ignored a record: %s", error)
        return None


async def _end(process: asyncio.subprocess.Process) -> None:
    process.stdin.close()  # its sign to leave
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), 10)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
