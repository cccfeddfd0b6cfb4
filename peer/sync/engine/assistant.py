"""A peer without a trainer: it reduces, leads, hands out states and keeps them for those who train behind NAT.

It holds neither model nor data. What a state looks like it asks of those who train, and the first state it takes from them; from then
on both are on its disk, so that the volunteers may all leave, and find the run where it was (docs/decisions/0006).
"""

import asyncio
import collections
import contextlib
import logging
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from peer.contracts import CommittedRound
from peer.sync.engine.buffers import IN_MEMORY, MEMORY, Buffers, buffers_on
from peer.sync.engine.certificate import Seals, Shown, judged
from peer.sync.engine.codec import Wire
from peer.sync.engine.memory import available_bytes, check_memory, host_bytes
from peer.sync.engine.net.bucket import Bucket
from peer.sync.engine.net.streams import PeerLost, Streams
from peer.sync.engine.outer import Strategy, load_strategy
from peer.sync.engine.replica import Replica
from peer.sync.engine.round.evidence import MOST_ASKED, ask
from peer.sync.engine.round.excerpts import Auditor
from peer.sync.engine.round.heads import most_signed
from peer.sync.engine.state import CHUNK_BYTES, HASH_BYTES, BadState, Head, Header, State, better
from peer.sync.engine.trainer.messages import Done, Failed, Final, Message, News, Progress, Rebase
from peer.sync.engine.transfer.discarded import Discarded
from peer.sync.engine.transfer.disk import StateStore
from peer.sync.engine.transfer.download import Download
from peer.sync.engine.transfer.kind import Kind, ask_kind
from peer.sync.engine.transfer.pace import Slow, fetch_seconds
from peer.sync.engine.transfer.state_fetch import WholeState
from peer.sync.engine.vectors import SharedBuffer
from swarm import files
from swarm.advice import size
from swarm.dht import SwarmNode
from swarm.end import End
from swarm.errors import ExitCode, UserError
from swarm.members import Members
from swarm.records import LEAVING, PeerRecord
from swarm.run_config import RunConfig
from swarm.tasks import end_tasks

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
_TOLD_EVERY_SECONDS = 60.0
_WAITING = "waiting for the first peer that trains, whose state this peer can take"
_SEEN_SECONDS = 1.0
_STORED = 4
"""States on disk besides the kept ones: a state becomes final a round or two after it was made, and kept then."""


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


class Archive:
    """The final states, as links to the files of `store`: round-00000012-samples-0000024576-3f2a91c0d4e5.state; 0: no limit.

    Raises UserError (disk) when the folder cannot be made.
    """

    def __init__(self, folder: Path, store: StateStore, limit: int):
        """What was discarded since goes: it would be taken for the newest."""
        self.folder, self._store, self._limit = folder, store, limit
        with self._or_say_why():
            folder.mkdir(parents=True, exist_ok=True)
            for path in self._files():
                if store.is_discarded(path):
                    log.warning("removed %s: it is discarded", path.name)
                    path.unlink()

    def newest(self) -> Path | None:
        return max(self._files(), default=None)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.state"))

    def keep(self, final_rounds: Sequence[CommittedRound]) -> None:
        """Keep those of these that are on disk: one that came and went while the one before was written never is. Raises UserError (disk)."""
        with self._or_say_why():
            for final in final_rounds:
                source = next(self._store.folder.glob(f"samples-*-{final.digest[:12]}.state"), None)
                target = self.folder / f"round-{final.round:08d}-samples-{final.samples:010d}-{final.digest[:12]}.state"
                if source is not None and not target.exists():
                    files.link(source, target)
                    log.info("kept round=%d samples=%d file=%s", final.round, final.samples, target)
            for old in self._files()[: -self._limit if self._limit else 0]:
                old.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _or_say_why(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"Cannot keep final states in {self.folder}: {error.strerror}.",
                fix="They are hard links: choose an --output_dir on a file system that has them.",
                code=ExitCode.DISK,
            ) from None


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
    last_known: Head | None = None,
    last_holders: tuple[str, ...] = (),
    end: End | None = None,
    members: Members | None = None,
    upload: Bucket | None = None,
    auditor: Auditor | None = None,
    wall: Callable[[], float] = time.time,
    rng: random.Random | None = None,
) -> None:
    """Take part until the run's end or `stop`. final: told of each state that is safe; seen: once a second, of the swarm. Raises UserError."""
    members = members or Members(run, wall=wall)
    node.admit(members)
    buffers = buffers_on(state_on, folder / "state")
    older = bool(states_limit)  # else the archive has them all
    store = StateStore(folder / "state", keep=_STORED, bans=members.bans, older=older, wall=wall, buffers=buffers)
    archive = Archive(folder / "settled", store, states_limit)
    strategy = load_strategy(f"peer.sync.{run.sync}:strategy", run)
    finding = asyncio.create_task(_stored_or_fetched(run, strategy, node, members, store, folder / "kind.json", archive))
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
        last_known=last_known, last_holders=last_holders, assists=True, end=end, members=members, upload=upload, auditor=auditor,
        clock=asyncio.get_running_loop().time, wall=wall, rng=rng,
    )  # fmt: skip
    await replica.start()
    header, num_bytes = replica.state.value.header, replica.state.value.buffer.num_bytes
    log.info("assisting '%s' from round=%d samples=%d", run.run_name, header.round, header.samples)
    log.info(
        "keeping %s final states in %s: %s each, %s free",
        states_limit or "all", archive.folder, size(num_bytes), size(files.free_bytes(archive.folder)),
    )  # fmt: skip
    await replica.live_until(stop.wait(), assistant.wait(), _tell_forever(replica, seen))


async def _tell_forever(replica: Replica, seen: Callable[[dict[str, Any]], None]) -> None:
    while True:
        seen(replica.seen())
        await asyncio.sleep(_SEEN_SECONDS)


async def _stored_or_fetched(
    run: RunConfig, strategy: Strategy, node: SwarmNode, members: Members, store: StateStore, path: Path, archive: Archive
) -> tuple[Kind, list[State]]:
    """What a state looks like, and one to begin with; in a list, so that nobody holds its memory for as long as the process lives."""
    kind = Kind.read(path)
    if kind is not None:
        _check_memory(run, strategy, kind, store.buffers)
    state = _stored(run, strategy, kind, store, archive) if kind is not None else None
    if state is None:
        known = kind
        kind, state = await _first_from_others(run, strategy, node, members, discarded=store.discarded, buffers=store.buffers)
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


async def newest_state(
    run: RunConfig,
    strategy: Strategy,
    node: SwarmNode,
    members: Members,
    seconds: float,
    named: Collection[str] = (),
    known: str = "",
) -> State:
    """The best state of a run, for who takes it and goes. Raises UserError (NETWORK) when nobody gives one in time.

    named: peers whose word this user takes, before that of however many others; known: digest of the state that the server knows.
    """
    waiting = f"nobody who holds the state is here yet; waiting up to {seconds:.0f} s in all (--wait_seconds)"
    finding = asyncio.create_task(_first_from_others(run, strategy, node, members, waiting, False, named, known))
    try:
        await asyncio.wait({finding}, timeout=seconds)
        if finding.done():
            return finding.result()[1]
    finally:
        await end_tasks(finding)
    raise UserError(
        f"Nobody gave a state of the run '{run.run_name}' within {seconds:.0f} s.",
        fix="Try again while a peer trains or assists; a folder that one kept works without them (--state FOLDER).",
        code=ExitCode.NETWORK,
    )


async def _first_from_others(
    run: RunConfig,
    strategy: Strategy,
    node: SwarmNode,
    members: Members,
    waiting: str = _WAITING,
    spare_memory: bool = True,
    named: Collection[str] = (),
    known: str = "",
    discarded: Discarded | None = None,
    buffers: Buffers = IN_MEMORY,
) -> tuple[Kind, State]:
    """The best state of a run that this peer knows nothing of; waits until somebody is there who has one, and says so: `waiting`."""
    streams, told, seals = Streams(node, members=members), -_TOLD_EVERY_SECONDS, Seals(run, node, members)
    failures: collections.Counter[str] = collections.Counter()
    clock = asyncio.get_running_loop().time
    while True:
        records = await _records(run, node, members)
        peers = [record.peer_id for record in records]
        kind = await ask_kind(streams, [peer for peer in peers if peer in named]) or await ask_kind(streams, peers)
        alike = [record for record in records if kind is not None and record.schema == kind.schema]
        if alike:
            if spare_memory:
                _check_memory(run, strategy, kind, buffers)
            alike = await _that_count(streams, seals, alike, named, known)
            with contextlib.suppress(PeerLost, BadState):
                return kind, await _fetch(streams, run, kind, strategy, alike, failures, named, known, discarded, buffers)
        if clock() - told >= _TOLD_EVERY_SECONDS:
            told = clock()
            log.info("%s", waiting)
        await asyncio.sleep(LOOK_SECONDS)


async def _records(run: RunConfig, node: SwarmNode, members: Members) -> list[PeerRecord]:
    try:
        found = await node.records(run.run_id)
    except Exception as error:  # a node that answers nothing: hivemind raises its own kinds
        log.debug("could not read the records: %r", error)
        return []
    return [
        record
        for record in found.values()
        if record.config == run.digest
        and record.phase != LEAVING
        and record.peer_id != node.peer_id
        and _is_admitted(members, record)
        and not members.bans.discards(record.digest, record.parents)
    ]


def _is_admitted(members: Members, record: PeerRecord) -> bool:
    members.hear(record.peer_id, record.membership)
    return members.has(record.peer_id)


async def _that_count(
    streams: Streams, seals: Seals, records: Sequence[PeerRecord], named: Collection[str], known: str
) -> list[PeerRecord]:
    """Those of peers that count by the certificates that all of them show (certificate.py), that were named, or that stand on what the server knows."""
    if not seals.needed:
        return list(records)
    shown: dict[str, Shown] = {}
    for at in range(0, len(records), MOST_ASKED):
        shown |= await ask(streams, seals, [record.peer_id for record in records[at : at + MOST_ASKED]])
    judgement = judged(shown, countersigned=seals.countersigned)
    if judgement.best is not None:
        log.info("the state %s is certified by %d members", judgement.best.made.digest[:8], len(judgement.best.signers))
    return [
        record
        for record in records
        if record.peer_id in judgement.peers or record.peer_id in named or (known and known in (record.digest, *record.parents))
    ]


async def _fetch(
    streams: Streams,
    run: RunConfig,
    kind: Kind,
    strategy: Strategy,
    records: Sequence[PeerRecord],
    failures: collections.Counter[str],
    named: Collection[str] = (),
    known: str = "",
    discarded: Discarded | None = None,
    buffers: Buffers = IN_MEMORY,
) -> State:
    """The first of `_choices` that its holders give; who failed us least comes first (`failures`, which this adds to).

    Raises PeerLost, BadState.
    """
    num_bytes = kind.num_bytes(strategy.slots)
    nothing = (bytes(HASH_BYTES),) * -(-num_bytes // CHUNK_BYTES)
    like = State(Header(run=run.digest, schema=kind.schema), SharedBuffer(num_bytes), nothing)
    fewest = min(failures[record.peer_id] for record in records)
    choices = _choices([record for record in records if failures[record.peer_id] == fewest], named, known)
    reason: PeerLost | BadState = PeerLost("none of them has a state")
    for digest, holders in choices:
        try:
            state = await _download(streams, digest, holders, like, fetch_seconds(num_bytes, contested=len(choices) > 1), buffers)
            state.header.check_bounds(run.target_batch_size)
            if discarded is not None and discarded.holds(state.digest, state.header):
                raise BadState(f"the state {digest[:8]} descends from one that is discarded")
            return state
        except (PeerLost, BadState) as error:
            failures.update(holders)
            reason = error
    raise reason


async def _download(streams: Streams, digest: str, holders: Collection[str], like: State, longest: float, buffers: Buffers) -> State:
    content = WholeState(digest, like, buffers=buffers)
    try:
        await asyncio.wait_for(Download(content, set(holders)).run(streams), longest)
    except asyncio.TimeoutError:
        raise Slow(f"the state {digest[:8]} has not come within {longest:.0f} s") from None
    return content.state()


def _choices(records: Sequence[PeerRecord], named: Collection[str], known: str) -> list[tuple[str, set[str]]]:
    """Digests to ask for, with those who say that they hold them, in order. Keys cost nothing, so numbers are the last thing to go by.

    First what peers that were named sign, then the state that the server knows, then what most sign.
    """
    signers: dict[str, set[str]] = {}
    for record in sorted(records, key=lambda record: -record.samples):
        signers.setdefault(record.digest, set()).add(record.peer_id)
    of_named = [(digest, holders) for digest, holders in signers.items() if not holders.isdisjoint(named)]
    of_known = {record.peer_id for record in records if known and known in (record.digest, *record.parents)}
    of_most = [(head.digest, holders) for head, holders in most_signed(records).items()]
    return [*of_named, *([(known, of_known)] if of_known else []), *of_most]
