"""What must hold once the last fault is over: all commit, on one lineage; or all end, where the run does (docs/internals.md)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm.errors import ExitCode

if TYPE_CHECKING:
    from simulation.machine import Machine
    from simulation.world import World

_RECENT_ROUNDS = 12
"""How many rounds behind the newest state a peer may be: it fetches while the others go on."""
_EXCUSED_AFTER_SECONDS = 400.0
"""A peer may be apart by rule, or not yet have moved: until then the rules that wait have let it (R8 and R6 within 2 minutes, `IDLE_SECONDS` of 300)."""
_HEARD_SECONDS = 10.0
"""In which a peer that starts has joined, and the others have read its record."""
_SHOWN_SECONDS = 15
"""Within which of a proof the server is shown the state that the wrong mean made: a sidecar says one thing a second."""


class Verdict:
    """apart: how many peers ended on a branch of their own, by the rule that lets them."""

    def __init__(self, world: "World"):
        self._world = world
        self.apart = 0
        self._ended_apart: set[str] = set()
        self._ended_without: set[str] = set()
        self._ended: dict[str, float] = {}
        """Of each peer that ended by itself: until when it waited for those behind."""

    async def all_commit(self) -> None:
        """Liveness: with no more faults every peer commits within the bound, and all that may come to one lineage do."""
        world, checks = self._world, self._world.checks
        differs, began, lowest = "", world.loop.time(), {machine.peer: self._round_of(machine) for machine in world.machines}
        while True:
            await world.look()
            for machine in world.machines:  # whose state was discarded begins again below where it stood
                lowest[machine.peer] = min(lowest[machine.peer], self._round_of(machine))
            recent = checks.lineage(world.tip())[:_RECENT_ROUNDS]
            behind = [machine for machine in world.machines if checks.stands(machine) not in recent]
            idle = [machine for machine in world.machines if self._round_of(machine) < lowest[machine.peer] + 3 or not machine.alive]
            waited = world.loop.time() - began
            excused = waited >= _EXCUSED_AFTER_SECONDS and all(self._apart_by_rule(machine, recent) for machine in behind)
            if not idle and (not behind or (excused and not self._server_says_where())):
                gone = {machine.peer for machine in world.gone} | world.strangers
                differs = "" if behind else checks.ledger.agrees(world.server.book, recent, gone)
                if not differs:
                    self.apart = len(behind)
                    checks.ledger.whole(world.server.book)
                    return
            if waited > world.scenario.calm_seconds:
                stands = ", ".join(f"{m.short} at {checks.stands(m)[:8]} of round {self._round_of(m)}" for m in world.machines)
                what = f"ledger and states differ: {differs}" if differs else f"not all have committed: {stands}"
                checks.breach(f"{world.scenario.calm_seconds:.0f} s after the last fault {what}")

    async def all_buried(self) -> None:
        """Without faults: of each wrong mean that the server has a proof of, it is shown the state soon, and discards it."""
        world, checks = self._world, self._world.checks
        stays = checks.unburied(world.server)
        for _ in range(_SHOWN_SECONDS if stays else 0):
            await world.look()
        if stays := stays & checks.unburied(world.server):
            checks.breach(f"a wrong mean is proven, and the state {min(stays)[:8]} that it made stays")

    def ends(self, machine: "Machine", waited_until: float) -> None:
        """It ends by itself. waited_until: when it stopped waiting for those behind. Whether it is apart by rule shows now: those whom it has met there
        may still end elsewhere."""
        world, checks = self._world, self._world.checks
        self._ended[machine.peer] = waited_until
        self._ended_apart.discard(machine.peer)
        lineage = checks.lineage(world.tip())
        if checks.stands(machine) not in lineage and self._apart_by_rule(machine, lineage):
            self._ended_apart.add(machine.peer)

    def ends_without(self, machine: "Machine") -> None:
        """It ends since the run is over and nobody who is left has the last state: without faults nobody does."""
        world, checks = self._world, self._world.checks
        self._ended_without.add(machine.peer)
        there = [other for other in world.machines if other.alive and world.loop.time() - other.booted > _HEARD_SECONDS]
        if world.calm and (givers := [other.short for other in there if checks.stands(other) == world.tip()]):
            checks.breach(f"it ended without the run's last state, which {', '.join(givers)} could give it", machine)

    async def all_end(self) -> None:
        """The same where a run ends: all end by themselves, on its last state or on one from before its end was put off, but for those
        that stay apart. Who comes later is told so."""
        world, checks = self._world, self._world.checks
        began, patience = world.loop.time(), world.scenario.calm_seconds
        while not world.is_over():
            await world.look()
            if world.loop.time() - began > patience:
                checks.breach(f"{patience:.0f} s after the last fault the run goes on: {', '.join(m.short for m in world.machines if not m.over)} do")
        tip = world.tip()
        lineage = checks.lineage(tip)
        for machine in world.machines:
            commit = checks.commits.get(checks.stands(machine))
            ended = commit is not None and commit.samples >= world.run.total_samples
            if machine.peer in self._ended_apart or (ended and commit.digest not in lineage and self._apart_by_rule(machine, lineage)):
                self.apart += 1
            elif machine.peer in self._ended_without or checks.is_buried(checks.stands(machine)):
                continue  # a wrong mean made its last state, as the server heard when it had ended
            elif commit.digest not in lineage if ended else not self._came_too_late(machine):
                checks.breach(f"ended on round {self._round_of(machine)}, which is none of the run's last states", machine)
        if self.apart:
            return checks.ledger.whole(world.server.book)
        if differs := checks.ledger.agrees(world.server.book, lineage, {machine.peer for machine in world.gone} | world.strangers):
            checks.breach(f"ledger and states differ at the run's end: {differs}")
        checks.ledger.whole(world.server.book)
        if checks.commits[tip].samples < world.server.end.total:
            return  # the host put the end off when all had gone
        if checks.is_buried(tip):
            return  # a wrong mean made it, as the server heard when all had gone: the run goes on from before it
        late, began = world.add_peer(), world.loop.time()
        while late.alive and world.loop.time() - began < patience:
            await world.look()
        if late.failure is None or late.failure.code != ExitCode.OVER:
            checks.breach(f"came when the run was over, and {late.failure or 'waits'}", late)

    def _came_too_late(self, machine: "Machine") -> bool:
        """Whether all others had stopped waiting before they can have heard that it is back: nobody is left to give it the last state."""
        others = [at for peer, at in self._ended.items() if peer != machine.peer]
        return bool(others) and max(others) < machine.booted + _HEARD_SECONDS

    def _round_of(self, machine: "Machine") -> int:
        checks = self._world.checks
        commit = checks.commits.get(checks.stands(machine))
        return commit.round if commit else 0

    def _server_says_where(self) -> bool:
        """Whether two groups that never met come together by the server's word (R8): it needs a minute or two, and they have the whole bound."""
        world = self._world
        return bool(world.run.members_of) and world.server.bans.countersigned in world.checks.lineage(world.tip())

    def _apart_by_rule(self, machine: "Machine", branch: Sequence[str]) -> bool:
        """Whether it may stay on its branch: two groups may stay apart if some of both have not met (docs/internals.md).

        Where all have met each other, both sides count the same, and one side moves: also three against three. But who is at the run's end
        follows nobody who is not; and who is behind the others on their own branch follows them.
        """
        world, checks = self._world, self._world.checks
        if branch and checks.stands(machine) in checks.lineage(branch[0]):
            return False
        met = {other.peer: set(other.met()) for other in world.machines}
        there = [other.peer for other in world.machines if checks.stands(other) in branch]
        here = [peer for peer in met if peer not in there]
        ours, theirs = (sum(peer in met[machine.peer] for peer in side) for side in (here, there))
        if all(one in met[other] and other in met[one] for one in here for other in there):
            return bool(branch) and self._is_at_the_end(branch[0]) and not self._is_at_the_end(checks.stands(machine)) and ours + 1 > theirs
        if not met[machine.peer] & met.keys():
            return self._sees_no_majority(machine, here, there)
        return ours > 0 and ours + 1 >= theirs

    def _is_at_the_end(self, digest: str) -> bool:
        """Whether it has all of the run's samples, and somebody has reported it as final: before, those who have it follow others as ever."""
        checks = self._world.checks
        return digest in checks.final and 0 < self._world.run.total_samples <= checks.commits[digest].samples

    def _sees_no_majority(self, machine: "Machine", here: Sequence[str], there: Sequence[str]) -> bool:
        """Whether one that has met nobody may stay by R5: neither more than half of the others are there, nor more than on its side with it.
        Half are enough if the rest stand where it does."""
        stands, others = self._world.checks.stands, len(here) + len(there) - 1
        alike = all(stands(other) == stands(machine) for other in self._world.machines if other.peer in here)
        return len(there) <= len(here) and (2 * len(there) < others or (2 * len(there) == others and not alike))
