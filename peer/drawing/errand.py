"""What a process beside an assisting peer is sent to do, and how it is started (`beside.py` is its other end)."""

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from peer.config import PeerConfig
from swarm import child
from swarm.errors import ExitCode
from swarm.options import build
from swarm.run_config import RunConfig

MEMORY_SHARE = 0.5
"""Of what is free when such a process begins: reducing takes more and less in turns, and may be at its least just then."""
HOPELESS = (ExitCode.CONFIG, ExitCode.MEMORY)
"""Exit statuses after which it goes no better with a later state."""
_STDERR = 2


@dataclass(frozen=True, kw_only=True)
class Errand:
    """What it is told first, as a line of JSON."""

    peer: PeerConfig
    given: Mapping[str, Any]
    """What the command line said of the run: where its model lies here."""
    run: RunConfig
    server_url: str
    memory_bytes: float
    """What it may take."""

    def to_json(self) -> bytes:
        return json.dumps({**dataclasses.asdict(self), "run": self.run.to_mapping()}, default=str).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        values = json.loads(data)
        own = {"peer": build(PeerConfig, values["peer"]), "run": RunConfig.from_mapping(values["run"], where="the errand")}
        return cls(**{**values, **own})


async def begin(command: tuple[str, ...], stdout: int = _STDERR) -> asyncio.subprocess.Process:
    """Start `python *command`, which hears us on its stdin. stdout: by default our stderr, for what libraries print. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        env=child.environment(),
    )


def ending(how: int | Exception, does: str, late: str) -> str:
    """In words, why the process that `does` something ended: by its exit status, or by the error of who waited for it, `late` for a TimeoutError.

    '' where it has told of it by itself.
    """
    if isinstance(how, Exception):
        return str(how) or late
    return f"{signal.Signals(-how).name} ended the process that {does}; often memory was short" if how < 0 else ""


async def end(process: asyncio.subprocess.Process) -> None:
    """Whatever happens, it is gone afterwards."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    while process.returncode is None:  # who cancels us does so again, and would leave it behind
        with contextlib.suppress(asyncio.CancelledError):
            await process.wait()
