"""When a peer may follow members that lie to a state that they made up, and when that breaks a promise (docs/decisions/0026).

Among liars alone nobody can know better. Promised is: nobody else leads a peer while somebody is live whom it has met, or who sealed what its
certificate is of, nor for ALONE_SECONDS after that; nor while a signer is live of the strongest certificate that honest peers show it, if
these answer. Whom it sees is taken from its node, whom it has met and its certificate from its disk: not from what it made of them.
"""

import functools
import json
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from peer.sync.engine.certificate import Certificate, strongest
from peer.sync.engine.net.messages import CERTIFICATE, read
from peer.sync.engine.round.evidence import ANSWER_SECONDS
from peer.sync.engine.round.heads import ALONE_SECONDS

if TYPE_CHECKING:
    from simulation.machine import Machine

_SURE_SECONDS = 15.0
"""A record counts for 20 s after it was read, and a look at the others may come some seconds late."""
_ALL_ANSWER = {"guests", "clock", "answers", "ledger", "server", "pause", "extend", "discard"}
"""Faults beside which each peer that is live answers. Who is asked while it is stopped or cut off has shown nothing, for a minute."""
MOST_LED_SECONDS = 120.0
"""For which one that it has met may lead a peer (R2, R6) while it sees two others that are elsewhere, and that it has met: R4 brings it back."""
_ASKED_SECONDS = 2 * ANSWER_SECONDS
"""Who has been there for this long has been asked what it can show, and has answered."""


class Misled(Exception):
    """A peer has followed liars where nothing is promised. What comes of that state is the liars': the world ends here."""


class Company:
    """Who each peer could go by. strangers: those that lie. discards: whether a state is, or descends from, one that the host has discarded: a
    certificate of it says nothing any more."""

    def __init__(self, strangers: Collection[str], discards: Callable[[str], bool] = lambda digest: False):
        self._strangers, self._discards = strangers, discards
        self._last: dict[str, tuple[int, float]] = {}
        """Of each peer: in which process of it somebody was live last, and when; at first, when that process began."""
        self._own: dict[str, Certificate | None] = {}
        """The certificate of each, as it was before it adopted what it stands on now."""
        self._led_since: dict[str, float] = {}

    def look(self, machines: Sequence["Machine"], now: float) -> None:
        for machine in machines:
            self._own[machine.peer] = _certificate(machine)
            process, _ = self._last.get(machine.peer, (0, now))
            if process != id(machine.sidecar) or self._live(machine, now):
                self._last[machine.peer] = id(machine.sidecar), now

    def breaks(self, machine: "Machine", others: Sequence["Machine"], lineage: Sequence[str], now: float) -> str:
        """Why this peer, which stands on `lineage`, must not follow strangers now; '' where it may. others: who is honest."""
        live, hosts = self._live(machine, now), machine.world.network.hosts
        if live and machine.link.behind_nat and all(hosts[peer].link.behind_nat for peer in live):
            return ""  # R7: without somebody that can be dialled there is no round
        if machine.world.faults_done.keys() <= _ALL_ANSWER:
            live |= self._sealed(machine, others, now)
        if live:
            return f"though {', '.join(sorted(peer[-6:] for peer in live))} is live"
        own, (_, since) = self._before(machine), self._last.get(machine.peer, (0, 0.0))
        if own is not None and own.peers - {machine.peer} and own.made.digest in lineage and now - since < ALONE_SECONDS:
            return f"{now - since:.0f} s after somebody was live whom it could go by"
        return ""

    def led_for(self, machine: "Machine", led: Collection[str], now: float) -> float:
        """For how many seconds it has been one of those that are led while it saw two others that it has met."""
        elsewhere = self._there(machine, now) & (set(machine.met()) - set(led))
        if machine.peer not in led or len(elsewhere) < 2:
            self._led_since.pop(machine.peer, None)
            return 0.0
        return now - self._led_since.setdefault(machine.peer, now)

    def _before(self, machine: "Machine") -> Certificate | None:
        return self._valid(self._own.get(machine.peer))

    def _valid(self, certificate: Certificate | None) -> Certificate | None:
        return certificate if certificate is not None and not self._discards(certificate.made.digest) else None

    def _live(self, machine: "Machine", now: float) -> set[str]:
        """Whom it sees that it has met, or whose seal is in its certificate."""
        own = self._before(machine)
        return self._there(machine, now) & {*machine.met(), *(own.peers if own is not None else ())}

    def _sealed(self, machine: "Machine", others: Sequence["Machine"], now: float) -> set[str]:
        """Signers that it sees of the strongest certificate that it is shown."""
        asked = self._there(machine, now, _ASKED_SECONDS) | self._asked_with_strangers(machine, now)
        shown = [self._before(machine), *(self._valid(_certificate(other)) for other in others if other.peer in asked)]
        best = strongest([certificate for certificate in shown if certificate is not None])
        return asked & best.peers if best is not None else set()

    def _asked_with_strangers(self, machine: "Machine", now: float) -> set[str]:
        """Those that it saw no later than any that lies: nobody's vote counts before all who were there with it were asked."""
        seen = machine.node.seen if machine.node is not None else {}
        first = min((record.since for peer, record in seen.items() if peer in self._strangers), default=-1.0)
        return {peer for peer in self._there(machine, now) if seen[peer].since <= first}

    def _there(self, machine: "Machine", now: float, for_seconds: float = 0.0) -> set[str]:
        seen = machine.node.seen if machine.node is not None else {}
        there = {peer for peer, record in seen.items() if now - record.read < _SURE_SECONDS and now - record.since >= for_seconds}
        return there - self._strangers - {machine.peer}


def _certificate(machine: "Machine") -> Certificate | None:
    try:
        return _read((machine.disk.root() / "state" / "certificate.json").read_text())
    except FileNotFoundError:
        return None


@functools.lru_cache(256)  # each peer's is looked at every second, and is another one after a round
def _read(text: str) -> Certificate | None:
    try:
        return read(CERTIFICATE, json.loads(text))
    except ValueError:  # damaged
        return None
