"""When an assisting peer draws, and what: the newest final state that it keeps, every N rounds, one after the other.

Nobody waits for a drawing, and it takes nothing that reducing needs: it is made by a process of the lowest priority, with a bound on its
memory, which the kernel ends first when memory is short, and which is gone when the pictures are sent.
"""

import asyncio
import dataclasses
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from peer.config import PeerConfig
from peer.drawing.errand import HOPELESS, MEMORY_SHARE, Errand, begin, end, ending
from peer.launch.joining import Joined
from peer.sync.engine.memory import available_bytes
from swarm import files

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
_LONGEST_SECONDS = 6 * 3600.0
"""A large model on a slow CPU takes an hour; what takes longer hangs."""
_STATE, _DRAWN = re.compile(r"round-(\d+)-.*\.state"), re.compile(r"step-(\d+)\.png")


@dataclass(frozen=True, kw_only=True)
class Order(Errand):
    """What the drawing process is told: draw this state."""

    peer_id: str
    state: Path
    round: int

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        order = super().from_json(data)
        return dataclasses.replace(order, state=Path(order.state))


class Artist:
    """given: what the command line said of the run. command: what is told an Order on its stdin."""

    def __init__(
        self, peer: PeerConfig, given: Mapping[str, Any], joined: Joined, peer_id: str, command: tuple[str, ...] = ("-m", "peer.drawing")
    ):
        self._peer, self._given, self._joined, self._peer_id, self._command = peer, given, joined, peer_id, command
        self._folder = Path(peer.output_dir)
        self._kept = self._folder / "drawing.state"
        """A second name of the state that is drawn: with a small --states_total_limit its own may go meanwhile."""
        self._drawn = max(_numbers(self._folder / "validation", _DRAWN), default=-1)

    async def draw_forever(self) -> None:
        """Ends when there is no use in trying again; of that and of what went wrong the drawing process has told."""
        while self._peer.validation_prompts:
            if (path := self._due()) and not await self._draw(path):
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _due(self) -> Path | None:
        """The newest final state, if it is of a round to draw or one to draw was passed over."""
        newest = max(_numbers(self._folder / "settled", _STATE).items(), default=None)
        every = self._peer.validation_steps or 1
        if newest is None or newest[0] // every <= self._drawn // every:
            return None
        self._drawn = newest[0]
        return newest[1]

    async def _draw(self, path: Path) -> bool:
        """Whether it is worth trying with a later state."""
        order = Order(
            peer=self._peer,
            given=self._given,
            run=self._joined.run,
            server_url=self._joined.server_url,
            peer_id=self._peer_id,
            state=self._kept,
            round=self._drawn,
            memory_bytes=MEMORY_SHARE * available_bytes(),
        )
        try:
            self._kept.unlink(missing_ok=True)  # a process that was killed leaves it
            files.link(path, self._kept)
            how = await self._told(order.to_json())
        except (OSError, asyncio.TimeoutError) as error:
            how = error
        finally:
            self._kept.unlink(missing_ok=True)
        if why := ending(how, "draws", f"they were not drawn within {_LONGEST_SECONDS:.0f} s"):
            log.warning("no pictures of round %d: %s", order.round, why)
        return how not in HOPELESS

    async def _told(self, order: bytes) -> int:
        """The exit status of the process that drew it. Raises OSError, TimeoutError."""
        process = await begin(self._command)
        try:
            await asyncio.wait_for(process.communicate(order), _LONGEST_SECONDS)
        finally:
            await end(process)
        return process.returncode


def _numbers(folder: Path, names: re.Pattern) -> dict[int, Path]:
    """The files of these names by the number in them."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return {int(found[1]): path for path in paths if (found := names.fullmatch(path.name))}
