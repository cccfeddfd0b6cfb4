"""The live peers of the run, as their signed records describe them, and how far they can be counted upon."""

import logging
import time
from collections.abc import Callable, Collection, Sequence

from peer.sync.engine.round.company import Company
from swarm.clock import SwarmClock
from swarm.dht import SwarmNode
from swarm.members import Members
from swarm.records import LEAVING, RECORD_LIFE_SECONDS, RENEW_SECONDS, PeerRecord
from swarm.run_config import RunConfig
from swarm.tasks import within
from swarm.version import VERSION

log = logging.getLogger(__name__)

PATIENT_ATTEMPTS = 3
"""A peer that missed this many attempts in a row (a stranger: one) is neither waited for nor counted for a while."""
_FIRST_PAUSE_SECONDS, _FIRST_PAUSE_OF_CALLERS_SECONDS, _LONGEST_PAUSE_SECONDS = 10.0, 1.0, 120.0
"""The while doubles with every absence more. Two that missed each other must meet again soon; who calls is there, and is forgiven sooner."""
_FORGOTTEN_SECONDS = 600.0
_PREDECESSOR_SECONDS = RECORD_LIFE_SECONDS + RENEW_SECONDS
"""How long a record of an earlier process with our identity may be left, whatever the clocks say."""
_OWN_RECORDS = 1024
UNREAD_PATIENCE_SECONDS = 600.0
"""How long in all, since this process began, records that it cannot read keep it from being alone.

They may be peers of a newer version, and who goes on without them makes a branch that is lost. But anybody can sign junk under the run's key,
so that without an end one message every 20 s would stop a peer that is alone. Ten minutes are time to read the warning and update.
"""


class Neighbours:
    """Records are never trusted for more than their owner could do to us anyway: bounds, signature and freshness are checked."""

    def __init__(
        self,
        node: SwarmNode,
        run: RunConfig,
        schema: str,
        clock: Callable[[], float] = time.monotonic,
        company: Company | None = None,
        wall: Callable[[], float] = time.time,
        members: Members | None = None,
    ):
        self._node, self._run, self._schema, self._clock, self._wall = node, run, schema, clock, wall
        self._company, self.members = company or Company(), members or Members(run)
        self._seen: dict[str, tuple[PeerRecord, float]] = {}
        self._live: list[PeerRecord] = []
        """Of `_seen`, those of this run."""
        self._others: list[PeerRecord] = []
        """Of `_live`, those with the same tensors."""
        self._peers: frozenset[str] = frozenset()
        """Their ids."""
        self._own_read: float | None = None
        self._said: dict[float, None] = {}
        self._not_ours: float | None = None
        self._unread_since: float | None = None
        self.starting_again: frozenset[str] = frozenset()
        """Live peers that stand on what the host has discarded: they start again, and are none of `others` before."""
        self.doubled = False
        """Whether records appear under our identity that we did not publish: another peer has it, on another machine."""
        self._swarm_clock, self._read_before = SwarmClock(), False
        self._started = clock()
        self._absences: dict[str, tuple[int, float]] = {}

    async def read(self) -> None:
        """Read the records. An answer that lacks somebody proves little: a record counts until its life after its last renewal is over."""
        try:
            found = await within(RENEW_SECONDS, self._node.records(self._run.run_id))
        except Exception as error:  # a node that answers nothing any more is the watchdog's matter
            log.debug("could not read the records: %r", error)
            return
        now = self._clock()
        news = {peer: record for peer, record in found.items() if peer not in self._seen or self._seen[peer][0].time != record.time}
        fresh = [record.time for peer, record in news.items() if peer != self._node.peer_id]
        if self._read_before and (warning := self._swarm_clock.look(fresh, self._wall())):
            log.warning("%s", warning)
        self._read_before = True
        for peer, record in news.items():
            self._seen[peer] = (record, now)
            if record.bans:
                self.members.bans.hear(record.bans, rumoured=True)
            self.members.hear(peer, record.membership)
        self._seen = {peer: entry for peer, entry in self._seen.items() if peer in found or now - entry[1] < RECORD_LIFE_SECONDS}
        of_this_run = self._of_this_run()
        live = [record for record in of_this_run if not self.members.bans.discards(record.digest, record.parents)]
        self.starting_again = frozenset([record.peer_id for record in of_this_run]) - {record.peer_id for record in live}
        if live != self._live:  # who has no news keeps the list that it gave out: others keep what they made of it
            self._live, self._others = live, [record for record in live if record.schema == self._schema]
            self._peers = frozenset([record.peer_id for record in self._others])
        self._absences = {peer: entry for peer, entry in self._absences.items() if now - entry[1] < _FORGOTTEN_SECONDS}
        if own := found.get(self._node.peer_id):
            self._own_read = now
            self._look_for_a_double(own, now)

    def _look_for_a_double(self, own: PeerRecord, now: float) -> None:
        """One record may be the last word of an earlier process, stopped for a while; who goes on publishing is alive."""
        if own.time not in self._said and now - self._started >= _PREDECESSOR_SECONDS:
            self.doubled |= self._not_ours not in (None, own.time)
            self._not_ours = own.time

    def say(self, record: PeerRecord) -> None:
        """We publish this record of ourselves."""
        self._said[record.time] = None
        if len(self._said) > _OWN_RECORDS:
            del self._said[next(iter(self._said))]

    def others(self) -> Sequence[PeerRecord]:
        """Live peers of this run other than us, with the same tensors, within what an honest peer does."""
        return self._others

    def knows(self, peer: str) -> bool:
        """Whether it is one of them."""
        return peer in self._peers

    def of_other_tensors(self) -> bool:
        """Whether every other live peer trains other tensors than we: a version or method that differs here."""
        return bool(self._live) and all(record.schema != self._schema for record in self._live)

    def alone(self) -> bool:
        """No other live record for a whole record life, none that we cannot read either, and our own can be read back."""
        now = self._clock()
        reads_back = self._own_read is not None and now - self._own_read < RECORD_LIFE_SECONDS
        company = bool(self.others()) or self._waits_for_unread()
        return reads_back and not company and now - self._started >= RECORD_LIFE_SECONDS

    def _waits_for_unread(self) -> bool:
        """Whether there are live peers whose records we cannot read, and which we still take for peers of another version."""
        if not self._node.unread:
            return False
        now = self._clock()
        if self._unread_since is None:
            self._unread_since = now
            log.warning(
                "%d live peers of this run sign records that this program (%s) cannot read, a newer version perhaps: update. "
                "Not going on alone for %.0f minutes",
                len(self._node.unread), VERSION, UNREAD_PATIENCE_SECONDS / 60,
            )  # fmt: skip
        return now - self._unread_since < UNREAD_PATIENCE_SECONDS

    def missed(self, peers: Collection[str]) -> None:
        """They were expected, and stayed away."""
        for peer in peers:
            count, _ = self._absences.get(peer, (0, 0.0))
            self._absences[peer] = (count + 1, self._clock())

    def came(self, peers: Collection[str]) -> None:
        for peer in peers:
            self._absences.pop(peer, None)

    def counted_upon(self, callers: Collection[str] = (), *, left_out_too: bool = False) -> Sequence[PeerRecord]:
        """The others without those who stay away all the time, are left out, or are one stranger too many: what these promise holds
        nobody up. callers: who just said that they are there."""
        here = self.others()
        if self._absences:
            here = [record for record in here if not self._stays_away(record.peer_id, record.peer_id in callers)]
        if not left_out_too and (left_out := self._company.all_left_out()):
            here = [record for record in here if record.peer_id not in left_out]
        return self._company.counted(here)

    def untried(self) -> list[PeerRecord]:
        """Strangers that may be worth a call, and are not counted upon until they answer it."""
        return self._company.untried([record for record in self.others() if not self._company.left_out(record.peer_id)])

    def _stays_away(self, peer: str, calls: bool) -> bool:
        count, last = self._absences.get(peer, (0, 0.0))
        patience = 1 if self._company.is_stranger(peer) else PATIENT_ATTEMPTS
        if count < patience:
            return False
        pause = _FIRST_PAUSE_OF_CALLERS_SECONDS if calls else _FIRST_PAUSE_SECONDS
        return self._clock() - last < min(pause * 2 ** (count - patience), _LONGEST_PAUSE_SECONDS)

    def _of_this_run(self) -> list[PeerRecord]:
        return [
            record
            for peer, (record, _) in self._seen.items()
            if peer != self._node.peer_id
            and record.config == self._run.digest
            and not self.members.refusal(peer)
            and record.phase != LEAVING
            and record.waiting_samples <= 2 * self._run.target_batch_size
        ]
