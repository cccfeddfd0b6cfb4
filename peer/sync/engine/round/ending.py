"""Whether the run is over: at its last sample, unless the host has extended it, of which a peer may hear from the others only."""

import asyncio
import contextlib
import logging

from peer.sync.engine.round import span
from peer.sync.engine.state import Header, State
from peer.sync.engine.trainer.messages import Extended, Sends
from swarm.dht import SwarmNode
from swarm.end import End
from swarm.records import RENEW_SECONDS
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)


class Ending:
    def __init__(self, run: RunConfig, end: End, node: SwarmNode, trainer: Sends):
        self._run, self._end, self._node, self._trainer = run, end, node, trainer
        self.in_doubt = False
        """Whether others went on after what we take for the end."""

    def is_over(self, state: State) -> bool:
        return span.is_over(self._end, state.header)

    def refusal(self, header: Header) -> str:
        """Why not to take over a state with this header; empty: nothing about its end is against it."""
        over = span.began_after_the_end(self._end, header)
        self.in_doubt |= over  # or its makers have heard of an extension, and we have not
        return f"it made a round after the run's end of {self._end.total} samples" if over else ""

    async def was_put_off(self) -> bool:
        """Whether the peers that the DHT knows have heard from the host that the run goes on. Asked only where it matters, at the end."""
        self.in_doubt = False
        if not self._end.may_be_extended:
            return False
        with contextlib.suppress(Exception):  # a node that answers nothing is the watchdog's matter
            records = await asyncio.wait_for(self._node.find_runs(), RENEW_SECONDS)
            told = [record.extension for record in records.values() if record.run_id == self._run.run_id]
            if any([self._end.extend(extension) for extension in told]):
                log.info("the host has extended the run to %d samples", self._end.total)
                self._trainer.send(Extended(self._end.extension))
                return True
        return False
