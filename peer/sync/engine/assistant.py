"""A peer without a trainer: it reduces, leads, hands out states and keeps them for those who train behind NAT.

It holds neither model nor data. What a state looks like it asks of those who train, and the first state it takes from them; from then
on both are on its disk, so that the volunteers may all leave, and find the run where it was (docs/decisions/0006).
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from peer.contracts import CommittedRound
from peer.sync.engine.buffers import MEMORY, Buffers, buffers_on
from peer.sync.engine.codec import Wire
from peer.sync.engine.first_state import FirstState
from peer.sync.engine.memory import available_bytes, check_memory, host_bytes
from peer.sync.engine.net.bucket import Bucket
from peer.sync.engine.outer import Strategy, load_strategy
from peer.sync.engine.replica import Replica
from peer.sync.engine.round.beginning import refuse_when_over
from peer.sync.engine.round.claims import head_of
from peer.sync.engine.round.excerpts import Auditor
from peer.sync.engine.state import Head, State, better
from peer.sync.engine.trainer.messages import Done, Failed, Final, Message, News, Progress, Rebase
from peer.sync.engine.transfer.archive import Archive
from peer.sync.engine.transfer.disk import StateStore
from peer.sync.engine.transfer.kind import Kind
from swarm import files
from swarm.advice import size
from swarm.dht import SwarmNode
from swarm.end import End
from swarm.members import Members
from swarm.records import ASSIST
from swarm.run_config import RunConfig
from swarm.tasks import end_tasks

log = logging.getLogger(__name__)

_WAITING = "waiting for the first peer that trains, whose state this peer can take"
_SEEN_SECONDS = 1.0
_ALONE_SECONDS = 300.0
"""How often we ask whether the run is over while nobody trains: for whoever left for a moment, that costs the server nothing."""
_STORED = 4
"""States on disk besides the kept ones: a state becomes final a round or two after it was made, and kept then."""


class Known(NamedTuple):
    """What the dataset server knows of the run: its newest state, who had that, and the run's end if the host has put it off."""

    head: Head
    holders: Sequence[str] = ()
    extension: Mapping[str, Any] | None = None


class Assistant:
    """Stands where a replica expects its trainer. kept: called with what is final; `ended` is set with the run, or by an error."""

    def __init__(self, kept: Callable[[Sequence[CommittedRound]], None]):
        self._kept = kept
        self.replica: Replica | None = None
        self.ended, self.error = asyncio.Event(), None

    async def wait(self) -> None:
        """For the run's end. Raises the error that ended it before."""
        await self.ended.wait()
        if self.error is not None:
            raise self.error

    def send(self, message: Message) -> None:
        """What the replica says; there is nothing to train on with, and nobody here whom an extension would concern."""
        match message:
            case Rebase(digest):
                self.replica.trainer.hear(Progress(stands_on=digest))
            case Final():
                self._kept([message.committed_round])
            case News(text):
                log.info("%s", text)
            case Done():
                self.ended.set()
            case Failed():
                self.error = message.error
                self.ended.set()


async def assist(
    *,
    run: RunConfig,
    node: SwarmNode,
    folder: Path,
    stop: asyncio.Event,
    final: Callable[[Sequence[CommittedRound]], None],
    seen: Callable[[dict[str, Any]], None] = lambda values: None,
    states_limit: int,
    state_on: str = MEMORY,
    server_url: str = "",
    name: str = "",
    hardware: str = "",
    known: Known | None = None,
    ask: Callable[[], Awaitable[Known | None]] | None = None,
    end: End | None = None,
    members: Members | None = None,
    upload: Bucket | None = None,
    auditor: Auditor | None = None,
    wall: Callable[[], float] = time.time,
    rng: random.Random | None = None,
) -> None:
    """Take part until the run's end or `stop`. final: told of each state that is safe; seen: once a second, of the swarm.

    known: what the server knew when we came; ask: what it knows now, None when it does not answer. Raises UserError.
    """
    members, end = members or Members(run, wall=wall), end or End(run)
    node.admit(members)
    buffers = buffers_on(state_on, folder / "state")
    older = bool(states_limit)  # else the archive has them all
    store = StateStore(folder / "state", keep=_STORED, bans=members.bans, older=older, wall=wall, buffers=buffers)
    archive = Archive(folder / "settled", store, states_limit)
    strategy = load_strategy(f"peer.sync.{run.sync}:strategy", run)
    alone = partial(_refuse_when_over, run, end, ask) if ask else None
    finding = asyncio.create_task(_stored_or_fetched(run, strategy, node, members, store, folder / "kind.json", archive, alone))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({finding, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return
        kind, states = finding.result()
    finally:
        await end_tasks(finding, stopping)

    def on_final(final_rounds: Sequence[CommittedRound]) -> None:
        archive.keep(final_rounds)
        final(final_rounds)

    assistant = Assistant(on_final)
    assistant.replica = replica = Replica(
        run=run, state=states.pop(), wire=Wire(run.wire, *kind.sizes), strategy=strategy, node=node, store=store,
        rounds_path=folder / "rounds.jsonl", line=assistant, server_url=server_url, name=name, hardware=hardware,
        last_known=known and known.head, last_holders=tuple(known.holders) if known else (), assists=True, end=end, members=members, upload=upload, auditor=auditor,
        clock=asyncio.get_running_loop().time, wall=wall, rng=rng,
    )  # fmt: skip
    await replica.start()
    header, num_bytes = replica.state.value.header, replica.state.value.buffer.num_bytes
    log.info("assisting '%s' from round=%d samples=%d", run.run_name, header.round, header.samples)
    log.info(
        "keeping %s final states in %s: %s each, %s free",
        states_limit or "all", archive.folder, size(num_bytes), size(files.free_bytes(archive.folder)),
    )  # fmt: skip
    await replica.live_until(stop.wait(), assistant.wait(), _tell_forever(replica, seen), *([_end_when_over(run, replica, ask)] if ask else ()))


async def _tell_forever(replica: Replica, seen: Callable[[dict[str, Any]], None]) -> None:
    while True:
        seen(replica.seen())
        await asyncio.sleep(_SEEN_SECONDS)


async def _end_when_over(run: RunConfig, replica: Replica, ask: Callable[[], Awaitable[Known | None]]) -> None:
    """Until the server says that the run is over, and all who are left assist and lack its last state. Raises UserError then.

    Helpers that a cut left behind while the others made the last rounds have each other, and would wait for ever.
    """
    while True:
        await asyncio.sleep(_ALONE_SECONDS)
        if _lacks_givers(replica, replica.state.value.head) and (known := await ask()):
            replica.extend(known.extension)
            if better(known.head, replica.state.value.head) and _lacks_givers(replica, replica.state.value.head):
                refuse_when_over(run, replica.end, known.head, known.holders)


async def _refuse_when_over(run: RunConfig, end: End, ask: Callable[[], Awaitable[Known | None]]) -> None:
    """Raises UserError where nobody is there, and the server says that the run is over."""
    if known := await ask():
        end.extend(known.extension)
        refuse_when_over(run, end, known.head, known.holders)


def _lacks_givers(replica: Replica, ours: Head) -> bool:
    """Whether nobody who is live trains, or has a later state."""
    return not any(record.phase != ASSIST or better(head_of(record), ours) for record in replica.neighbours.others())


async def _stored_or_fetched(
    run: RunConfig,
    strategy: Strategy,
    node: SwarmNode,
    members: Members,
    store: StateStore,
    path: Path,
    archive: Archive,
    alone: Callable[[], Awaitable[None]] | None = None,
) -> tuple[Kind, list[State]]:
    """What a state looks like, and one to begin with; in a list, so that nobody holds its memory for as long as the process lives."""
    kind = Kind.read(path)
    if kind is not None:
        _check_memory(run, strategy, kind, store.buffers)
    state = _stored(run, strategy, kind, store, archive) if kind is not None else None
    if state is None:
        known = kind
        first = FirstState(run, strategy, node, members, discarded=store.discarded, buffers=store.buffers)
        kind, state = await first.found(_WAITING, lambda kind: _check_memory(run, strategy, kind, store.buffers), alone)
        if known is None and (stored := _stored(run, strategy, kind, store, archive)) and better(stored.head, state.head):
            state = stored  # only the kind was lost
        try:
            kind.write(path)
        except OSError as error:
            log.warning("cannot write %s, so the others are asked again after the next start: %s", path, error.strerror)
    return kind, [state]


def _stored(run: RunConfig, strategy: Strategy, kind: Kind, store: StateStore, archive: Archive) -> State | None:
    """The newest state on disk."""
    kept = run.digest, kind.schema, kind.num_bytes(strategy.slots), run.target_batch_size
    state = store.load(*kept)
    if state is None and store.forsaken and (settled := archive.newest()):
        state = store.load(*kept, paths=[settled])  # all that were newer are discarded: nobody else may have one of before
    return state


def _check_memory(run: RunConfig, strategy: Strategy, kind: Kind, buffers: Buffers) -> None:
    """Raises UserError."""
    check_memory(host_bytes(strategy, Wire(run.wire, *kind.sizes), trains=False, state_on=buffers.state_on), available_bytes())
