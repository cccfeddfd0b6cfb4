"""The identities of one attack, and what they see of the swarm that they came to."""

import asyncio
import contextlib
import functools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.attacks.wire import Key, Record, Stranger, newest, say
from swarm.members import said, sign_membership
from swarm.run_config import RunConfig
from swarm.signing import HostKey


@dataclass
class Band:
    """address: of one honest peer; url, token: of a server, where the attack is on one; host_key: of a host that has let us in."""

    address: str
    folder: Path
    rng: random.Random
    stack: contextlib.AsyncExitStack
    url: str = ""
    token: str = ""
    host_key: Path | None = None
    strangers: list[Stranger] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    run: Record = field(default_factory=dict)

    async def come(self, count: int = 1) -> list[Stranger]:
        """`count` identities with nodes of their own, each of which has read the run's record."""
        for number in range(count):
            entering = Stranger.come(self.address, self.folder, self.rng, f"stranger-{number}")
            self.strangers.append(await self.stack.enter_async_context(entering))
        self.run = await self.strangers[0].run()
        for stranger in self.strangers:
            stranger.fellows = {each.peer_id for each in self.strangers}
            self._let_in(stranger)
        self.say(event="came", peers=[stranger.peer_id for stranger in self.strangers])
        return self.strangers

    def _let_in(self, stranger: Stranger) -> None:
        if self.host_key is not None:
            stranger.membership = dict(said(sign_membership(HostKey(self.host_key, missing="refuse"), self.config, stranger.peer_id)))

    def arrived(self) -> None:
        """From now on it counts: what was prepared before did nobody any harm."""
        self.say(event="arrived", peers=[stranger.peer_id for stranger in self.strangers])

    def stored(self) -> None:
        """Say how many of all questions to store a record have been answered."""
        self.say(event="stored", **{name: sum(getattr(each, name) for each in self.strangers) for name in ("asked", "answered")})

    def say(self, **values: Any) -> None:
        """To who watches."""
        say(**values)

    def draw_keys(self, count: int) -> list[Key]:
        """Keys without nodes."""
        return [Key() for _ in range(count)]

    @property
    def run_id(self) -> str:
        return self.run["run_id"]

    @functools.cached_property  # asked for each record that a band of hundreds signs
    def config(self) -> RunConfig:
        return RunConfig.from_mapping(self.run["run"], where="the run's record")

    @property
    def target(self) -> int:
        return self.config.target_batch_size

    async def honest(self) -> dict[str, Record]:
        """Records of everybody else; waits until there is one that says which state it is on."""
        ours = {stranger.peer_id for stranger in self.strangers} | {key.peer_id for key in self.keys}
        while True:
            found = await self.strangers[0].records(self.run_id)
            found = {peer: record for peer, record in found.items() if peer not in ours}
            if newest(found):
                return found
            await asyncio.sleep(0.5)

    async def head(self) -> Record:
        """The honest record with the most samples."""
        return newest(await self.honest())

    def waiting(self, record: Record, **changes: Any) -> Record:
        """`record` as one of a peer that is about to average: on the same state, with up to two rounds' samples."""
        promised = {"waiting_samples": self.rng.randint(1, 2 * self.target), "samples_per_second": self.rng.uniform(0.1, self.target)}
        return {**record, **promised, "phase": "train", "name": "", "note": "", "maddrs": [], "client_mode": False, **changes}
