"""A peer that assists: one process without a trainer, which reduces, leads and keeps states. `assist` is the product's own."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from peer.contracts import CommittedRound
from peer.data.client.outbox import ROUNDS
from peer.data.client.runs import round_body
from peer.data.client.transport import Refusal, Transport
from peer.sync.engine.assistant import Known, assist
from peer.sync.engine.net.streams import PeerLost
from peer.sync.engine.state import Head
from simulation.machine import Machine, Process
from simulation.network import Link
from simulation.server import URL, Session, SimKey
from swarm.errors import ExitCode, UserError
from swarm.signed_request import Signer
from swarm.tasks import within

if TYPE_CHECKING:
    from simulation.world import World

_STATES_KEPT = 4
_AGAIN_SECONDS, _ASKS_SECONDS = 5.0, 0.1
_LAST_REPORTS_SECONDS = 5.0
"""As in peer/assist.py."""


class Assistant(Machine):
    """Its process is `sidecar`, as the loop and the faults know it; it is started again when it ends."""

    def __init__(self, world: "World", peer: str, number: int):
        super().__init__(world, peer, number, Link(100.0, 100.0, 0.01), step_seconds=1.0, batch=1, skew=world.rng.uniform(-0.5, 0.5))
        self._final: asyncio.Queue[CommittedRound] = asyncio.Queue()

    @property
    def alive(self) -> bool:
        return self.sidecar is not None and not self.sidecar.dead

    def boot(self) -> None:
        if self.alive:
            return
        self.boots += 1
        self.over, self.known, self.booted = False, self.world.last_known(), self.world.loop.time()
        self.sidecar = process = Process(self, "assistant")
        process.context.run(self.world.loop.call_soon, lambda: process.spawn(self._assist(process)))

    def leave(self) -> None:
        """It stays as long as anybody trains."""

    def kill_sidecar(self) -> None:
        self.kill()
        self.world.later(_AGAIN_SECONDS, self.boot)

    async def _assist(self, process: Process) -> None:
        """As `peer.assist`: takes part, and tells the dataset server of what is final, for as long as it takes."""
        world, rng = self.world, random.Random(self.world.rng.getrandbits(64))
        node, self._final = None, asyncio.Queue()
        try:
            await asyncio.sleep(world.rng.uniform(1.0, 3.0))  # to load its modules
            node = await self._join(process)
            reporting = process.spawn(self._report(rng))
            await assist(
                run=world.run, node=node, folder=self.disk.root(), stop=asyncio.Event(), final=self._hear, states_limit=_STATES_KEPT,
                wall=self.wall, rng=rng, known=self._known(), ask=self._ask, end=self.end(), members=self.members(),
            )  # fmt: skip
            with contextlib.suppress(asyncio.TimeoutError):
                await within(_LAST_REPORTS_SECONDS, self._final.join())
            reporting.cancel()
            await node.close()
            self.over = True
            process.die()
            self.graveyard.append(process)
        except (UserError, PeerLost) as error:
            world.note(f"{self.short} assistant: ended: {error}")
            self.kill()
            if isinstance(error, UserError) and error.code == ExitCode.OVER:  # its owner does not start it again
                self.over = True
                world.verdict.ends_without(self)
            else:
                world.later(_AGAIN_SECONDS, self.boot)
        except Exception as error:
            world.checks.breach(f"an assistant ended with {error!r}", self, error)

    def _known(self) -> Known | None:
        """What the server told it at its start, or tells it now."""
        last = self.known
        return Known(Head(last["digest"], last["samples"]), last["peers"], self.world.server.end.extension) if last else None

    async def _ask(self) -> Known | None:
        await asyncio.sleep(_ASKS_SECONDS)
        self.known = self.world.last_known() if self.world.network.reaches_server(self.peer) else None
        return self._known()

    def _hear(self, final_rounds: Sequence[CommittedRound]) -> None:
        for committed_round in final_rounds:
            self.world.checks.reported(self, committed_round.digest)
            self._final.put_nowait(committed_round)

    async def _report(self, rng: random.Random) -> None:
        world = self.world
        async with Transport(
            URL, signer=Signer(SimKey(self.peer), self.wall), clock=world.loop.time, session=lambda: Session(world.server, self), uniform=rng.uniform
        ) as transport:
            while True:
                committed_round = await self._final.get()
                with contextlib.suppress(Refusal):  # old news
                    await transport.insist(ROUNDS, {"run_id": world.run.run_id, "peer": self.peer, **round_body(committed_round)})
                self._final.task_done()
