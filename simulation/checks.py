"""What must hold whatever happens (docs/internals.md), checked at the moment when something is said, adopted or reported."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from torch import Tensor

from peer.loop.accounts import Accounts
from peer.sync.engine.net.messages import read_header
from peer.sync.engine.state import Header, hash_chunks, state_digest
from peer.sync.engine.vectors import SharedBuffer
from simulation.arithmetic import Arithmetic
from simulation.ledger_checks import LedgerChecks
from simulation.lies import Lies, Made
from simulation.misled import MOST_LED_SECONDS, Company, Misled
from swarm.digest import digest_bytes

if TYPE_CHECKING:
    from simulation.machine import Machine
    from simulation.server import Server
    from simulation.world import World


STREAMS_PER_PEER = 32
"""Sixteen that a peer may open to us (net/streams.py), and as many of ours to it."""
MOST_FILES = 160
"""On a peer's disk: two files a shard of the dataset, a state and a mean of each of the last rounds, some that are small."""
MESSAGES_PER_ROUND = 10
"""Of a peer with each other one, in a world without faults; 3 to 4 are usual."""
_HEARD_SECONDS = 600.0
"""Within this each peer that is there hears that a state is discarded: a server may be away for three minutes, and a partition lasts up to five."""


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
        """By parent, members, and in a run for members the group's name, which is in the state there: closed again, it is another group."""
        self._made_by: dict[str, str] = {}
        """Of each state: the name of the group that made it."""
        self._averaged: set[str] = set()
        self._void: set[str] = set()
        """Groups whose whole mean somebody has; and those whose mean, as somebody knows, nobody has or will have."""
        self._offers: dict[tuple[str, int], tuple[bytes, int]] = {}
        self._stands: dict[str, tuple[int, str]] = {}
        self._holders: dict[str, set[str]] = {}
        """Of each state: who has adopted it, or one that descends from it."""
        self._rotted: set[tuple[str, str]] = set()
        """Peers and states that they had, and lost: with their disk, or before it had them."""
        self.arithmetic: Arithmetic | None = None
        self.ledger = LedgerChecks(self, world.loop.time)
        self._told: dict[str, tuple[dict[str, Any], tuple[bytes, ...], Header]] = {}
        """Of each state that a trainer was told of: its header as it was said, the hashes of its bytes, and its header."""
        self.lies = Lies()
        self.forged: dict[str, bool] = {}
        """Digests of the states that strangers made up, and whether members did."""
        self.forged_by_met: set[str] = set()
        """Digests of the states that a liar made up. Honest peers have met it."""
        self.company = Company(world.strangers, lambda digest: not self.discarded.keys().isdisjoint(self.lineage(digest)))
        self.discarded: dict[str, float] = {}
        """Digests of the states that the host has discarded, and when."""
        self.buried: set[str] = set()
        """Those of them that the server discarded by itself."""
        self.final: dict[str, int] = {}
        """Digests of the states that were reported as final, and how often."""
        self.round = 0
        self.adopted = {"averaged": 0, "solo": 0, "fetched": 0}
        self._end: Breach | Misled | None = None

    def breach(self, what: str, machine: "Machine | None" = None, error: BaseException | None = None) -> None:
        """Noted once, and raised by the world at its next look: from wherever it was seen, a loop's callback or a thread."""
        who = f"{machine.short}: " if machine else ""
        self._ends(Breach(f"{self._world.loop.time():.3f} {who}{what}"), error)

    def _ends(self, end: Breach | Misled, cause: BaseException | None = None) -> None:
        if self._end is None:
            self._end = end
            end.__cause__ = cause
            self._world.stop()

    def raise_if_broken(self) -> None:
        if self._end is not None:
            raise self._end

    # ------------------------------------------------------------- what is adopted

    def appended(self, machine: "Machine", path: str, data: bytes) -> None:
        if not path.endswith("/rounds.jsonl"):
            return
        line = json.loads(data)
        members = tuple((peer, number, samples) for peer, number, samples in line["members"])
        self.adopted[line["how"]] += 1
        if line["digest"] in self.forged:
            self._follows_liars(machine, line["digest"])
        if line["digest"] in self.forged_by_met:
            self._commit_forged(line["digest"], line["parent"], line["round"], line["samples"], members)
        else:
            self._commit(machine, line["digest"], line["parent"], line["round"], line["samples"], members)
        boots, before = self._stands.get(machine.peer, (0, ""))
        if boots == id(machine.sidecar) and self._is_ancestor(line["digest"], before):
            self.breach(f"went back from {before[:8]} to its ancestor {line['digest'][:8]}", machine)
        self._stands[machine.peer] = (id(machine.sidecar), line["digest"])
        digest = line["digest"]
        while digest in self.commits:
            holders = self._holders.setdefault(digest, set())
            self._rotted.discard((machine.peer, digest))
            if machine.peer in holders:
                break
            holders.add(machine.peer)
            digest = self.commits[digest].parent

    def _follows_liars(self, machine: "Machine", digest: str) -> None:
        what, now = f"adopted the state {digest[:8]}, which a stranger made up", self._world.loop.time()
        if not self.forged[digest]:
            self.breach(what, machine)
        elif broken := self.company.breaks(machine, self._world.live, self._left_of_lineage(machine), now):
            self.breach(f"{what}, {broken}", machine)
        else:
            self._ends(Misled(f"{now:.3f} {machine.short}: {what}"))

    def _left_of_lineage(self, machine: "Machine") -> list[str]:
        """What it stands on, without what the host has discarded and all that follows that."""
        lineage = self.lineage(self.stands(machine))
        gone = [at for at, digest in enumerate(lineage) if digest in self.discarded]
        return lineage[gone[-1] + 1 :] if gone else lineage

    def _commit(self, machine: "Machine", digest: str, parent: str, number: int, samples: int, members: tuple) -> None:
        known = self.commits.get(digest)
        if known is not None:
            if (known.parent, known.round, known.samples, known.members) != (parent, number, samples, members):
                self.breach(f"two stories of the state {digest[:8]}", machine)
            return
        if not number:
            return
        group = self._made_by.get(digest, "") if self._world.run.members_of else ""
        other = self._of_group.setdefault((parent, members, group), digest)
        if other != digest and not self.lies.may_differ((parent, members)):
            self.breach(f"one group made two states of {parent[:8]}: {other[:8]} and {digest[:8]}", machine)
        elif other != digest and (wrong := self.lies.parts((parent, members))):
            self.breach(wrong, machine)
        if wrong := self.lies.takes((parent, members)):
            self.breach(wrong, machine)
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
            if self._world.run.members_of and peer in self._world.strangers:
                self.breach(f"{peer[-6:]} is no member, and is in the state {digest[:8]}", machine)
            offer = self._offers.get((peer, contribution))
            if peer not in self._world.strangers and (offer is None or offer[1] != count):
                self.breach(f"contribution {contribution} of {peer[-6:]} has {count} samples in {digest[:8]}, not those it was offered with", machine)
        if gone := self._discarded_long_ago(parent):
            self.breach(f"the state {digest[:8]} was made on {gone[:8]}, which the host had discarded {_HEARD_SECONDS:.0f} s before", machine)
        self.commits[digest] = Commit(digest, parent, number, samples, members, included)
        self.round = max(self.round, number)
        self._world.committed(self.commits[digest])

    def _commit_forged(self, digest: str, parent: str, number: int, samples: int, members: tuple) -> None:
        """By one whom they have met: peers may follow for a while, and of its figures nothing is said."""
        before = self.commits.get(parent)
        included = (before.included if before else {}) | {peer: contribution for peer, contribution, _ in members}
        self.commits.setdefault(digest, Commit(digest, parent, number, samples, members, included))

    def led(self) -> None:
        """A liar that all have met leads never most of the honest peers, and nobody for long beside two others that stand elsewhere."""
        world, now = self._world, self._world.loop.time()
        led = {machine.peer for machine in world.live if not self.forged_by_met.isdisjoint(self.lineage(self.stands(machine)))}
        if 2 * len(led) > len(world.machines):
            self.breach(f"{len(led)} of {len(world.machines)} honest peers follow what one made up whom they have met")
        for machine in world.live:
            if (seconds := self.company.led_for(machine, led, now)) > MOST_LED_SECONDS:
                self.breach(f"follows for {seconds:.0f} s what one made up whom it has met, though two others are live elsewhere", machine)

    def buries(self, digest: str) -> None:
        """The server discards a state by itself: only one that a wrong mean has made."""
        commit = self.commits.get(digest)
        self.buried.add(digest)
        if commit is None or not self.lies.made((commit.parent, commit.members)):
            self.breach(f"the server discards the state {digest[:8]}, and no liar made it")

    def is_buried(self, digest: str) -> bool:
        """Whether a wrong mean made it, or a state before it, as the server has found."""
        return bool(self.buried) and not self.buried.isdisjoint(self.lineage(digest))

    def unburied(self, server: "Server") -> set[str]:
        """States that a wrong mean made of which the server has a proof, and that it has neither discarded nor left to the host."""
        left, found = server.book.wrong.all(), set()
        for proof in server.proven.wrong_means:
            parent, members, *_ = json.loads(proof.group)
            digest = self._of_group.get((parent, tuple(map(tuple, members)), digest_bytes(proof.group.encode())))
            if digest is not None and digest not in self.buried and "left to you" not in left.get(proof.accused, ""):
                found.add(digest)
        return found

    def _discarded_long_ago(self, digest: str) -> str:
        """The discarded state, if any, that `digest` is or descends from, of which everybody must have heard."""
        known = {one for one, at in self.discarded.items() if self._world.loop.time() - at > _HEARD_SECONDS}
        return next((one for one in self.lineage(digest) if one in known), "") if known else ""

    def closings(self, said: Mapping[str, Any]) -> None:
        """What a peer's log line says beside its text: a group was averaged in, or is void; a peer is proven to have lied."""
        if "proven" in said and (wrong := self.lies.proves(said["proven"], self._world.strangers)):
            self.breach(wrong)
        if "averaged" in said:
            self._averaged.add(said["averaged"])
            self._made_by[said["made"]] = said["averaged"]
        self._void |= {said["void"]} if "void" in said else set()
        if ("averaged" in said or "void" in said) and not self._averaged.isdisjoint(self._void):
            self.breach("a group was closed again, and somebody has the mean of its first closing")

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
            if values["samples"] != len(self.ledger.keys.get((machine.peer, values["number"]), ())):
                self.breach(f"contribution {values['number']} has other samples than were registered", machine)
            if self._offers.setdefault((machine.peer, values["number"]), content) != content:
                self.breach(f"the bytes of contribution {values['number']} changed", machine)
            if self.arithmetic is not None:
                self.arithmetic.offered(machine.peer, values["number"], buffers[0].bytes(), values["receipt"])

    def told(self, machine: "Machine", kind: str, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        """By the sidecar."""
        if kind == "final":
            self.reported(machine, values["digest"])
        if kind == "rebase":
            self._rebases(machine, values["digest"], values["header"], buffers[0].bytes())

    def _rebases(self, machine: "Machine", digest: str, said: dict[str, Any], data: Tensor) -> None:
        hashes = tuple(hash_chunks(data))
        if self._told.get(digest, ())[:2] != (said, hashes):  # once for all trainers: the digest says what both are
            header = read_header(said)
            if state_digest(header, hashes) != digest:
                self.breach(f"the bytes of the state {digest[:8]} are not those of its digest", machine)
            self._told[digest] = said, hashes, header
        wrong = self.arithmetic.rebased(digest, self.header(digest), data) if self.arithmetic is not None else ""
        if wrong and digest not in self.forged_by_met and not self.lies.may_differ(_made(self.header(digest))):
            self.breach(wrong, machine)

    def header(self, digest: str) -> Header:
        """Of a state that a trainer was told of."""
        return self._told[digest][2]

    def reported(self, machine: "Machine", digest: str) -> None:
        """As final."""
        self.final[digest] = self.final.get(digest, 0) + 1
        if digest not in self.commits:
            self.breach(f"reports the state {digest[:8]}, which nobody adopted", machine)
        elif digest in self.lineage(self.stands(machine)) and digest not in self._on_disk(machine):
            # Of a branch that it has left since, it may only now come to say so: a trainer that is stopped takes no messages.
            self.breach(f"reports the state {digest[:8]}, which its disk may lose", machine)

    def _on_disk(self, machine: "Machine") -> set[str]:
        """What this machine has even if it loses power: the states that are flushed, and those before them."""
        kept = {path[-18:-6] for path in machine.disk.flushed() if path.endswith(".state")}
        return {ancestor for state in self.commits if state[:12] in kept for ancestor in self.lineage(state)}

    def died(self, machine: "Machine") -> None:
        """Trainer and sidecar at once: what was not on the disk yet is gone with them."""
        on_disk = self._on_disk(machine)
        self._rotted |= {(machine.peer, digest) for digest, holders in self._holders.items() if machine.peer in holders and digest not in on_disk}

    def done(self, machine: "Machine", number: int) -> None:
        """The trainer takes its contribution for done."""
        lineages = (self.commits[digest] for digest in reversed(self.final) if digest in self.commits)  # the newest are the likely ones
        if not any(commit.included.get(machine.peer, 0) >= number and self._holds(commit, machine.peer, number) for commit in lineages):
            self.breach(f"contribution {number} is taken for done, and is in no state that was reported", machine)

    def lost(self, machine: "Machine", number: int, digest: str) -> None:
        """The trainer, which stands on the state `digest`, gives up its contribution."""
        commit = self.commits.get(digest)
        if commit is not None and self._holds(commit, machine.peer, number):
            self.breach(f"contribution {number} is given up, and is in the state {digest[:8]}", machine)

    def _holds(self, commit: Commit, peer: str, number: int) -> bool:
        while commit is not None:
            if any((peer, number) == member[:2] for member in commit.members):
                return True
            commit = self.commits.get(commit.parent)
        return False

    def accounts(self, machine: "Machine", accounts: Accounts) -> None:
        """Every sample that this trainer drew is open, in a contribution, or was reported."""
        state, drawn = accounts.state_dict(), machine.source.held
        held = [*state["open"], *[key for keys in state["contributions"].values() for key in keys], *state["aside"]]
        if len(set(held)) != len(held) or set(held) != drawn:
            self.breach(f"{len(drawn)} samples drawn and not reported, {len(held)} held", machine)

    def books(self, machine: "Machine", accounts: Accounts, numbers: Collection[int]) -> None:
        """The trainer's work has these contributions, and the books no others: else their samples are never reported."""
        if set(accounts.state_dict()["contributions"]) != set(numbers):
            self.breach("the books have other contributions than the trainer's work", machine)

    def left(self, machine: "Machine", accounts: Accounts, included: Collection[int]) -> None:
        """Its trainer leaves in order: what it drew is done, goes back, or is in the state on which it ends. included: contributions that are."""
        there = {key for number, keys in accounts.state_dict()["contributions"].items() if number in included for key in keys}
        if left := machine.source.held - there:
            self.breach(f"left with {len(left)} samples that are in no state, and not given back", machine)

    # ------------------------------------------------------------- bounds

    def bounds(self, machine: "Machine") -> None:
        """What a peer holds at any moment: streams and tasks for each other peer, files of a few states and of the dataset."""
        others = len(self._world.network.hosts)
        streams = len(machine.host.pipes) if machine.host is not None else 0
        tasks = max((sum(not task.done() for task in process.tasks) for process in (machine.trainer, machine.sidecar) if process), default=0)
        files = len(machine.disk.names)
        for what, number, most in (("streams", streams, STREAMS_PER_PEER * others), ("tasks", tasks, STREAMS_PER_PEER * others + 8), ("files", files, MOST_FILES)):
            if number > most:
                self.breach(f"{number} {what}, at most {most} are allowed", machine)

    def traffic(self, messages: int, rounds: int, peers: int) -> None:
        """Of a world without faults."""
        most = (rounds + 5) * peers * peers * MESSAGES_PER_ROUND
        if messages > most:
            self.breach(f"{messages} messages in {rounds} rounds of {peers} peers, at most {most} are allowed")

    def saved(self, machine: "Machine") -> None:
        """A state is on its disk: what it would go on from is that one, however many samples one of a branch that lost had."""
        states = [path for path in machine.disk.names if path.startswith("/state/") and path.endswith(".state")]
        samples = [path.rsplit("samples-", 1)[1][:16] for path in states]
        if states and samples[-1] != max(samples):
            self.breach(f"would go on from {states[samples.index(max(samples))]}, and saved {states[-1]} last", machine)

    def is_lost(self, digest: str, gone: Collection[str]) -> bool:
        """Whether the state was adopted, and nobody has it any more but those that are gone."""
        return digest in self._holders and all(peer in gone or (peer, digest) in self._rotted for peer in self._holders[digest])

    def rotted(self, machine: "Machine", path: str) -> None:
        """That file of its disk is damaged."""
        self._rotted |= {(machine.peer, digest) for digest in self.commits if path.endswith(f"-{digest[:12]}.state")}

def _made(header: Header) -> Made:
    return next(iter(header.parents), ""), tuple((member.peer, member.number, member.samples) for member in header.members)
