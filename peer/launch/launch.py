"""One start of a peer, as all its parts see it."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peer.config import PeerConfig
from peer.launch.joining import Joined
from peer.machine.device import RankGroup
from peer.results.output_folder import made
from swarm.bans import Bans
from swarm.end import EXTENSION_FILE, End
from swarm.members import Members
from swarm.run_config import RunConfig
from swarm.run_identity import with_own_places


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of a peer: the run, what this machine chose, its ranks, and how it ends."""

    joined: Joined
    peer: PeerConfig
    given: Mapping[str, Any] = field(default_factory=dict)
    """What the command line said of the run."""
    group: RankGroup
    device: torch.device
    stopping: Callable[[], bool]
    end: End | None = None
    """Where the run ends, by default as `joined` has it. The part that hears of a later end from the host tells the others here."""
    bans: Bans | None = None
    """Whom the host keeps out, by default those of whom `joined` knows; heard and told as the end is."""
    members: Members | None = None
    """The run's members, with our own membership: rank 0 has them where peers average, from `admitted` on."""
    closing: ExitStack
    """Closes the parts in the reverse order of their making."""

    def __post_init__(self) -> None:
        if self.end is None:
            kept = Path(self.peer.output_dir) / EXTENSION_FILE if self.peer.swarming else None
            object.__setattr__(self, "end", End(self.joined.run, self.joined.host_key, self.joined.extension, kept))
        if self.bans is None:
            object.__setattr__(self, "bans", Bans(self.joined.run, self.joined.host_key, self.joined.bans))

    @property
    def run(self) -> RunConfig:
        return self.joined.run

    @property
    def run_here(self) -> RunConfig:
        return with_own_places(self.run, self.given)

    @property
    def output(self) -> Path:
        """Where this peer writes. Raises UserError when it cannot be made."""
        return made(Path(self.peer.output_dir))
