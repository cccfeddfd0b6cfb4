"""A state of a run of which we have nothing yet: for a peer that assists, and for who takes the newest one and goes (`dd-export`)."""

import asyncio
import collections
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Sequence

from peer.sync.engine.buffers import IN_MEMORY, Buffers
from peer.sync.engine.certificate import Seals, Shown, judged
from peer.sync.engine.net.streams import PeerLost, Streams
from peer.sync.engine.outer import Strategy
from peer.sync.engine.round.evidence import MOST_ASKED, ask
from peer.sync.engine.round.heads import most_signed
from peer.sync.engine.state import CHUNK_BYTES, HASH_BYTES, BadState, Header, State
from peer.sync.engine.transfer.discarded import Discarded
from peer.sync.engine.transfer.download import Download
from peer.sync.engine.transfer.kind import Kind, ask_kinds
from peer.sync.engine.transfer.pace import Slow, fetch_seconds
from peer.sync.engine.transfer.state_fetch import WholeState
from peer.sync.engine.vectors import SharedBuffer
from swarm.dht import SwarmNode
from swarm.errors import ExitCode, UserError
from swarm.members import Members
from swarm.records import LEAVING, PeerRecord
from swarm.run_config import RunConfig
from swarm.tasks import end_tasks

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
_TOLD_EVERY_SECONDS = 60.0


class FirstState:
    """named: peers whose word this user takes, before that of however many others; known: digest of the state that the server knows;
    discarded: what the host has discarded; buffers: make the memory of the state."""

    def __init__(
        self,
        run: RunConfig,
        strategy: Strategy,
        node: SwarmNode,
        members: Members,
        *,
        named: Collection[str] = (),
        known: str = "",
        discarded: Discarded | None = None,
        buffers: Buffers = IN_MEMORY,
    ):
        self._run, self._strategy, self._node, self._members = run, strategy, node, members
        self._named, self._known, self._discarded, self._buffers = named, known, discarded, buffers
        self._streams, self._seals = Streams(node, members=members), Seals(run, node, members)
        self._failures: collections.Counter[str] = collections.Counter()
        self._failed: collections.Counter[Kind] = collections.Counter()

    async def found(
        self, waiting: str, check: Callable[[Kind], None] = lambda kind: None, alone: Callable[[], Awaitable[None]] | None = None
    ) -> tuple[Kind, State]:
        """The best state, and what it looks like; waits until somebody is there who has one, and says so: `waiting`.

        check: may refuse a kind (UserError), which is raised where no other kind is said. alone: called each minute for which nobody has been
        there; may raise UserError.
        """
        clock, told = asyncio.get_running_loop().time, -math.inf
        while True:
            records = await self._records()
            peers = [record.peer_id for record in records]
            kinds = await ask_kinds(self._streams, [peer for peer in peers if peer in self._named]) or await ask_kinds(self._streams, peers)
            found = await self._of_one(kinds, records, check) if kinds else None
            if found is not None:
                return found
            if clock() - told >= _TOLD_EVERY_SECONDS:
                if alone and not records and told > -math.inf:
                    await alone()
                told = clock()
                log.info("%s", waiting)
            await asyncio.sleep(LOOK_SECONDS)

    async def _of_one(self, kinds: Sequence[Kind], records: Sequence[PeerRecord], check: Callable[[Kind], None]) -> tuple[Kind, State] | None:
        """A state of one of these kinds. One that has failed us gives way to the next: anybody may say a kind, and as many as he has keys."""
        schemas = {kind.schema for kind in kinds}
        counted = await self._that_count([record for record in records if record.schema in schemas])
        alike = {kind: [record for record in counted if record.schema == kind.schema] for kind in kinds}
        alike = {kind: holders for kind, holders in alike.items() if holders}
        fits, refusals = [], []
        for kind in alike:
            try:
                check(kind)
                fits.append(kind)
            except UserError as refusal:
                refusals.append(refusal)
        if refusals and not fits:
            raise refusals[0]
        for kind in sorted(fits, key=lambda kind: self._failed[kind]):
            try:
                return kind, await self._fetch(kind, alike[kind])
            except (PeerLost, BadState) as error:
                log.debug("no state of the kind %s: %s", kind, error)
                self._failed[kind] += 1
        return None

    async def within(self, seconds: float) -> State:
        """The same, for who takes it and goes. Raises UserError (NETWORK) when nobody gives one in time."""
        waiting = f"nobody who holds the state is here yet; waiting up to {seconds:.0f} s in all (--wait_seconds)"
        finding = asyncio.create_task(self.found(waiting))
        try:
            await asyncio.wait({finding}, timeout=seconds)
            if finding.done():
                return finding.result()[1]
        finally:
            await end_tasks(finding)
        raise UserError(
            f"Nobody gave a state of the run '{self._run.run_name}' within {seconds:.0f} s.",
            fix="Give a long download more time, --wait_seconds 7200, or try again while a peer trains or assists; "
            "a folder that one kept works without them (--state FOLDER).",
            code=ExitCode.NETWORK,
        )

    async def _records(self) -> list[PeerRecord]:
        try:
            found = await self._node.records(self._run.run_id)
        except Exception as error:  # a node that answers nothing: hivemind raises its own kinds
            log.debug("could not read the records: %r", error)
            return []
        return [
            record
            for record in found.values()
            if record.config == self._run.digest
            and record.phase != LEAVING
            and record.peer_id != self._node.peer_id
            and self._is_admitted(record)
            and not self._members.bans.discards(record.digest, record.parents)
        ]

    def _is_admitted(self, record: PeerRecord) -> bool:
        self._members.hear(record.peer_id, record.membership)
        return self._members.has(record.peer_id)

    async def _that_count(self, records: Sequence[PeerRecord]) -> list[PeerRecord]:
        """Those that count by the certificates that all of them show (certificate.py), that were named, or that stand on what the server knows."""
        if not self._seals.needed:
            return list(records)
        shown: dict[str, Shown] = {}
        for at in range(0, len(records), MOST_ASKED):
            shown |= await ask(self._streams, self._seals, [record.peer_id for record in records[at : at + MOST_ASKED]])
        judgement = judged(shown, countersigned=self._seals.countersigned)
        if judgement.best is not None:
            log.info("the state %s is certified by %d members", judgement.best.made.digest[:8], len(judgement.best.signers))
        return [record for record in records if record.peer_id in judgement.peers or record.peer_id in self._named or _is_on(record, self._known)]

    async def _fetch(self, kind: Kind, records: Sequence[PeerRecord]) -> State:
        """The first of `_choices` that its holders give; who failed us least comes first. Raises PeerLost, BadState."""
        num_bytes = kind.num_bytes(self._strategy.slots)
        nothing = (bytes(HASH_BYTES),) * -(-num_bytes // CHUNK_BYTES)
        like = State(Header(run=self._run.digest, schema=kind.schema), SharedBuffer(num_bytes), nothing)
        fewest = min((self._failures[record.peer_id] for record in records), default=0)
        found = _choices([record for record in records if self._failures[record.peer_id] == fewest], self._named, self._known)
        reason: PeerLost | BadState = PeerLost("none of them has a state")
        for digest, holders in found:
            try:
                state = await self._download(digest, holders, like, fetch_seconds(num_bytes, contested=len(found) > 1))
                state.header.check_bounds(self._run.target_batch_size)
                if self._discarded is not None and self._discarded.holds(state.digest, state.header):
                    raise BadState(f"the state {digest[:8]} descends from one that is discarded")
                return state
            except (PeerLost, BadState) as error:
                self._failures.update(holders)
                reason = error
        raise reason

    async def _download(self, digest: str, holders: Collection[str], like: State, longest: float) -> State:
        content = WholeState(digest, like, buffers=self._buffers)
        try:
            await asyncio.wait_for(Download(content, set(holders)).run(self._streams), longest)
        except asyncio.TimeoutError:
            raise Slow(f"the state {digest[:8]} has not come within {longest:.0f} s") from None
        return content.state()


def _is_on(record: PeerRecord, digest: str) -> bool:
    """Whether it says that it stands on that state, or on one shortly after."""
    return bool(digest) and digest in (record.digest, *record.parents)


def _choices(records: Sequence[PeerRecord], named: Collection[str], known: str) -> list[tuple[str, set[str]]]:
    """Digests to ask for, with those who say that they hold them, in order. Keys cost nothing, so numbers are the last thing to go by.

    First what peers that were named sign, then the state that the server knows, then what most sign.
    """
    signers: dict[str, set[str]] = {}
    for record in sorted(records, key=lambda record: -record.samples):
        signers.setdefault(record.digest, set()).add(record.peer_id)
    of_named = [(digest, holders) for digest, holders in signers.items() if not holders.isdisjoint(named)]
    of_known = {record.peer_id for record in records if _is_on(record, known)}
    of_most = [(head.digest, holders) for head, holders in most_signed(records).items()]
    return [*of_named, *([(known, of_known)] if of_known else []), *of_most]
