"""What must hold whatever happens (docs/protocol.md), checked at the moment when something is said, adopted or reported."""

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from peer.loop.accounts import Accounts
from peer.sync.engine.vectors import SharedBuffer

if TYPE_CHECKING:
    from simulation.machine import Machine
    from simulation.world import World


class Breach(Exception):
    """A promise is broken."""


@dataclass(frozen=True)
class Commit:
    """A state that somebody adopted. included: peer -> its last contribution in it."""

    digest: str
    parent: str
    round: int
    samples: int
    members: tuple[tuple[str, int, int], ...]
    included: dict[str, int] = field(compare=False)


class Checks:
    def __init__(self, world: "World"):
        self._world = world
        self.commits: dict[str, Commit] = {}
        self._of_group: dict[tuple, str] = {}
        self._offers: dict[tuple[str, int], tuple[bytes, int]] = {}
        self._stands: dict[str, tuple[int, str]] = {}
        self.settled: dict[str, int] = {}
        """Digests of the states that were reported as final, and how often."""
        self.round = 0
        self.adopted = {"averaged": 0, "solo": 0, "fetched": 0}
        self._failure: Breach | None = None

    def breach(self, what: str, machine: "Machine | None" = None, error: BaseException | None = None) -> None:
        """Noted once, and raised by the world at its next look: from wherever it was seen, a loop's callback or a thread."""
        if self._failure is None:
            who = f"{machine.short}: " if machine else ""
            self._failure = Breach(f"{self._world.loop.time():.3f} {who}{what}")
            self._failure.__cause__ = error
            self._world.stop()

    def raise_if_broken(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------- what is adopted

    def appended(self, machine: "Machine", path: str, data: bytes) -> None:
        if not path.endswith("/rounds.jsonl"):
            return
        line = json.loads(data)
        members = tuple((peer, number, samples) for peer, number, samples in line["members"])
        self.adopted[line["how"]] += 1
        self._commit(machine, line["digest"], line["parent"], line["round"], line["samples"], members)
        boots, before = self._stands.get(machine.peer, (0, ""))
        if boots == id(machine.sidecar) and self._is_ancestor(line["digest"], before):
            self.breach(f"went back from {before[:8]} to its ancestor {line['digest'][:8]}", machine)
        self._stands[machine.peer] = (id(machine.sidecar), line["digest"])

    def _commit(self, machine: "Machine", digest: str, parent: str, number: int, samples: int, members: tuple) -> None:
        known = self.commits.get(digest)
        if known is not None:
            if (known.parent, known.round, known.samples, known.members) != (parent, number, samples, members):
                self.breach(f"two stories of the state {digest[:8]}", machine)
            return
        if not number:
            return
        other = self._of_group.setdefault((parent, members), digest)
        if other != digest:
            self.breach(f"one group made two states of {parent[:8]}: {other[:8]} and {digest[:8]}", machine)
        before = self.commits.get(parent)
        included = dict(before.included) if before else {}
        if number > 1 and before is None:
            self.breach(f"the parent {parent[:8]} of {digest[:8]} was never adopted by anybody", machine)
        if samples != (before.samples if before else 0) + sum(m[2] for m in members):
            self.breach(f"the state {digest[:8]} has {samples} samples, not those of its parent and members", machine)
        for peer, contribution, count in members:
            if included.get(peer, 0) >= contribution:
                self.breach(f"contribution {contribution} of {peer[-6:]} is twice in the lineage of {digest[:8]}", machine)
            included[peer] = contribution
            offer = self._offers.get((peer, contribution))
            if offer is None or offer[1] != count:
                self.breach(f"contribution {contribution} of {peer[-6:]} has {count} samples in {digest[:8]}, not those it was offered with", machine)
        self.commits[digest] = Commit(digest, parent, number, samples, members, included)
        self.round = max(self.round, number)
        self._world.committed(self.commits[digest])

    def _is_ancestor(self, digest: str, of: str) -> bool:
        commit, tip = self.commits.get(digest), self.commits.get(of)
        floor = commit.round if commit else 0
        while tip is not None and tip.round > floor:
            of = tip.parent
            if of == digest:
                return True
            tip = self.commits.get(of)
        return False

    def stands(self, machine: "Machine") -> str:
        """The digest of the state that it adopted last; '' before the first one."""
        return self._stands.get(machine.peer, (0, ""))[1]

    def lineage(self, digest: str) -> list[str]:
        """Of a state, itself first."""
        found = []
        while digest in self.commits:
            found.append(digest)
            digest = self.commits[digest].parent
        return found

    # ------------------------------------------------------------- what trainer and sidecar say

    def said(self, machine: "Machine", kind: str, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        """By the trainer."""
        if kind == "offer":
            content = (blake2b(bytes(buffers[0].bytes().numpy()), digest_size=16).digest(), values["samples"])
            if self._offers.setdefault((machine.peer, values["number"]), content) != content:
                self.breach(f"the bytes of contribution {values['number']} changed", machine)

    def told(self, machine: "Machine", kind: str, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        """By the sidecar."""
        if kind == "settled":
            digest = values["settlement"]["digest"]
            self.settled[digest] = self.settled.get(digest, 0) + 1
            if digest not in self.commits:
                self.breach(f"reports the state {digest[:8]}, which nobody adopted", machine)

    def accounts(self, machine: "Machine", accounts: Accounts) -> None:
        """Every sample that this trainer drew is open, in a contribution, or was reported."""
        state, source = accounts.state_dict(), machine.source
        held = [*state["open"], *(key for keys in state["contributions"].values() for key in keys), *state["aside"]]
        reported = len(source.acknowledged) + len(source.given_back)
        if len(set(held)) != len(held) or len(held) + reported != source.drawn_since_boot:
            self.breach(f"{source.drawn_since_boot} samples drawn, {len(held)} held, {reported} reported", machine)
