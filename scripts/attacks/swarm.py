"""An honest swarm of toy peers, a stranger that comes to it, and what became of the peers meanwhile."""

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from scripts.attacks.progress import RATE, progress
from scripts.attacks.rows import Row
from scripts.churn import checks
from scripts.churn.swarm import ROOT
from scripts.demo.processes import Program, Said, said

BESIDE_STRANGERS, BESIDE_MEMBERS = 2, 4
"""Honest peers, where the stranger is no member, and where it is one of five."""
START_SECONDS = 240.0
READY_ROUNDS = 3
_STOPPED_SECONDS = 60.0
"""A swarm that commits nothing at the end of a window, for this long or a third of it, is stopped."""
_JOIN_SECONDS = 90.0
"""A newcomer that listens and is in no round after this long does not get in: 60 s after its start it trains alone."""
_HIGH_LOSS = 0.3
"""Of a vector that turns round and keeps still, the loss is 1 on average; of one that follows, 1e-3."""


def last_word(program: Program) -> str:
    """The last line of a program's log that is for people."""
    lines = program.log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line[-200:] for line in reversed(lines) if line and not line.startswith("{")), "it said nothing")


class Toy:
    """words: what else it is told: addresses of peers, and options."""

    def __init__(self, folder: Path, strategy: str, *words: str):
        self.name, self.folder = folder.name, folder
        command = [sys.executable, "-m", "scripts.attacks.toy", str(folder), strategy, *words]
        self.program = Program(self.name, command, folder.with_suffix(".log"), {}, ROOT)

    def address(self) -> str:
        """'' until it listens."""
        return self.program.address()

    def rounds(self) -> list[Said]:
        return checks.read_rounds(self.folder)

    def losses(self, since: float, until: float = math.inf) -> list[float]:
        return [line["loss"] for line in said(self.program) if line.get("event") == "loss" and since <= line["time"] < until]

    def memory_mib(self) -> float:
        """Resident, of it and its sidecar and p2pd."""
        total = 0
        try:
            trunk = psutil.Process(self.program.pid)
            for process in [trunk, *trunk.children(recursive=True)]:
                total += process.memory_info().rss
        except psutil.Error:
            pass
        return total / 2**20


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Of a swarm. peers: honest ones; 0: two, where a member lies four. members: whether the run is for members. averaging, clip_members: the run's. rate: `Toy`'s; 0: the usual."""

    peers: int = 0
    members: bool = False
    averaging: str = "mean"
    clip_members: float | None = None
    rate: float = 0.0

    def of(self, row: Row) -> "Kind":
        """That `row` is tried on: members, where the stranger is one."""
        if row.let_in:
            return replace(self, peers=self.peers or BESIDE_MEMBERS, members=True, rate=RATE)
        return replace(self, peers=self.peers or BESIDE_STRANGERS)

    def words(self, folder: Path) -> list[str]:
        """For its programs; folder: where the host's key lies."""
        words = [f"--averaging={self.averaging}"]
        words += [f"--host_key={folder / 'host.key'}"] if self.members else []
        words += [f"--clip_members={self.clip_members}"] if self.clip_members is not None else []
        return words + ([f"--rate={self.rate}"] if self.rate else [])


class Swarm:
    """Honest peers that average before anybody comes; `row`: what then comes, None: nobody."""

    def __init__(self, folder: Path, kind: Kind, row: Row | None = None, seed: int = 0):
        self.row, self.seed, self._folder, self._kind = row, seed, folder, kind
        self._let_in = row is not None and row.let_in
        self.name = row.id if row else "control"
        self._strategy = row.strategy if row else "parameters"
        folder.mkdir(parents=True, exist_ok=True)
        self._toys = [self._toy("peer-1")]
        self.stranger: Program | None = None
        self.victim: Program | None = None
        self.newcomer: Toy | None = None
        self.helper: Program | None = None
        self.broken = ""
        """Why the row could not be tried: then it says nothing."""
        self.began = 0.0
        """When the stranger arrived, by time.time()."""
        self._memory = self._listens_since = 0.0

    def _toy(self, name: str, *words: str) -> Toy:
        return Toy(self._folder / name, self._strategy, *words, *self._kind.words(self._folder))

    # ---------------------------------------------------------------- life

    def tend(self) -> bool:
        """Start whoever is missing; whether all average together."""
        address, count = self._toys[0].address(), self._kind.peers
        if address and len(self._toys) < count:
            self._toys += [self._toy(f"peer-{number}", address) for number in range(len(self._toys) + 1, count + 1)]
        if address and self.row and self.row.audited and self.helper is None:
            command = [sys.executable, "-m", "scripts.attacks.helper", str(self._folder / "helper"), address, *self._kind.words(self._folder)]
            self.helper = Program("helper", command, self._folder / "helper.log", {}, ROOT)
        together = [sum(len(line["members"]) == count for line in toy.rounds()) for toy in self._toys]
        return len(together) == count and min(together) >= READY_ROUNDS and (self.helper is None or bool(self.helper.address()))

    def let_in(self, seconds: float) -> None:
        """A stranger that knows one peer's address. Without a row: nobody comes, and the window begins."""
        self._memory = self.memory_mib()
        if self.row is None:
            self.began = time.time()
            return
        address = self._toys[self.seed % len(self._toys)].address()
        if self.row.trains:
            self.stranger = self._toy("stranger", address, self.row.trains).program
            return
        command = [sys.executable, "-m", "scripts.attacks.stranger", self.row.id, str(self._folder / "stranger"), "--address", address]
        command += ["--seed", str(self.seed), "--seconds", str(seconds + START_SECONDS)]
        command += ["--host_key", str(self._folder / "host.key")] if self._let_in else []
        self.stranger = Program("stranger", command, self._folder / "stranger.log", {}, ROOT)

    def watch(self) -> None:
        """See whether the stranger has arrived; what meets it then comes a moment later."""
        if self.stranger is None:
            return
        if (status := self.stranger.ended()) is not None:
            self.broken = f"the stranger ended by itself, with status {status}: {last_word(self.stranger)}"
            return
        if not self.began and not self._arrived():
            return
        self.began = self.began or time.time()
        if time.time() < self.began + 3:
            return
        if self.row.kind == "newcomer" and self.newcomer is None:
            self.newcomer = self._toy("newcomer", self._toys[0].address())
        if self.newcomer and not self._listens_since and self.newcomer.address():
            self._listens_since = time.time()
        if self.row.kind in ("lookup", "export") and self.victim is None:
            rest = [self._run_id()] if self.row.kind == "lookup" else []
            command = [sys.executable, "-m", "scripts.attacks.victims", self.row.kind, self._toys[0].address(), *rest]
            self.victim = Program("victim", command, self._folder / "victim.log", {}, ROOT)

    def _arrived(self) -> bool:
        """Where it is no member, many an attack never comes to its beginning; it tries from the moment in which it knows the run."""
        if self.row.trains:
            return bool(checks.read_rounds(self._folder / "stranger"))
        events = {line.get("event") for line in said(self.stranger)}
        return "arrived" in events or (self._kind.members and not self._let_in and "came" in events)

    def _run_id(self) -> str:
        """As a newcomer has it from its host, and not from anybody in the swarm."""
        return next(line["run_id"] for line in said(self._toys[0].program) if line.get("event") == "run")

    def over(self, seconds: float) -> bool:
        if self.broken:
            return True
        if self.victim is not None:
            return self.victim.ended() is not None
        if self.newcomer and self._newcomer_joined() is None and time.time() < (self._listens_since or time.time()) + _JOIN_SECONDS:
            return False
        return bool(self.began) and time.time() >= self.began + seconds

    @property
    def programs(self) -> list[Program]:
        toys = [*self._toys, *([self.newcomer] if self.newcomer else [])]
        return [*(toy.program for toy in toys), *filter(None, (self.stranger, self.victim, self.helper))]

    def end(self) -> None:
        for program in self.programs:
            program.kill_tree()

    # ---------------------------------------------------------------- what became of it

    def memory_mib(self) -> float:
        return sum(toy.memory_mib() for toy in self._toys)

    def grown_mib(self) -> float:
        """How much more memory its peers take than before anybody came."""
        return self.memory_mib() - self._memory

    def rounds_within(self, begin: float, end: float) -> float:
        """Rounds that an honest peer came to, on average."""
        forged = self.forged()
        counts = [sum(begin <= line["time"] < end and line["digest"] not in forged for line in toy.rounds()) for toy in self._toys]
        return statistics.mean(counts)

    def forged(self) -> set[str]:
        """Digests of the states that the stranger says it made up."""
        return {line["digest"] for line in said(self.stranger) if line.get("event") == "forged"} if self.stranger else set()

    def loss(self, since: float) -> float:
        """The worst peer's, in the middle of what it said; infinite when one said nothing."""
        return max((statistics.median(toy.losses(since) or [float("inf")]) for toy in self._toys), default=0.0)

    def progress(self, since: float, until: float) -> float:
        """Of the honest peers: see `progress.py`."""
        return progress(toy.losses(since, until) for toy in self._toys)

    def figures(self, end: float, undisturbed_mib: float) -> dict[str, float]:
        figures = {"grown_mib": round(self.grown_mib() - undisturbed_mib)}
        for line in said(self.stranger) if self.stranger else []:
            if line.get("event") == "figures" and "knocks" in line:
                figures["knocks_a_minute"] = round(60 * line["knocks"] / max(end - self.began, 1), 1)
        figures |= self._stored()
        if (joined := self._newcomer_joined()) is not None:
            figures["newcomer_seconds"] = round(joined, 1)
        if lies := self._lies():
            proven = max((at or end for at in self._proven()), default=end)
            figures["banned_after_rounds"] = round(self.rounds_within(min(lies), proven), 1)
        if self.helper is not None:
            reported = min((at for at, peer in self._reports() if peer in self._liars()), default=end)
            figures["reported_after_rounds"] = round(self.rounds_within(self.began, reported), 1)
        return figures

    def _stored(self) -> dict[str, float]:
        """How many questions to store a record the stranger has asked, and how many were answered, as it said last."""
        told = [line for line in said(self.stranger) if line.get("event") == "stored"] if self.stranger else []
        return {name: told[-1][name] for name in ("asked", "answered")} if told else {}

    def unheard(self) -> str:
        """Why a row that stores records attacked nothing. Where only members are heard, one that came may never have begun."""
        if not self.row.stores or self._stored().get("answered") or not any(line.get("event") == "arrived" for line in said(self.stranger)):
            return ""
        return f"none of its {self._stored().get('asked', 0)} questions to store a record was answered"

    def reasons(self, end: float, control_loss: float, control_moves: bool) -> list[str]:
        """Why this row's stranger ended, stopped or corrupted the run; nothing when it did not."""
        found = [f"{toy.name} ended: {last_word(toy.program)}" for toy in self._toys if toy.program.ended() is not None]
        lines = [line for toy in self._toys for line in toy.rounds()]
        if taken := [line["digest"][:8] for line in lines if line["digest"] in self.forged()]:
            found.append(f"took made-up states {len(taken)} times, first {taken[0]}")
        found += self._unproven() if self._must_prove() else [f"replicas split: {text}" for text in checks.unequal_states(lines)[:1]]
        found += self._unreported()
        last = max(end - max(_STOPPED_SECONDS, (end - self.began) / 3), self.began)
        loss = self.loss(last)
        if control_moves and end - last >= _STOPPED_SECONDS / 2 and not self.rounds_within(last, end):
            found.append(f"no round in the last {end - last:.0f} s")
        if loss > max(_HIGH_LOSS, 10 * control_loss):
            found.append(f"loss {loss:.2g} (without {control_loss:.2g})")
        return found + self._misled()

    def _must_prove(self) -> bool:
        """Whether what it does is a lie that members can prove."""
        return self.row.figure == "banned_after_rounds"

    def _lies(self) -> list[float]:
        """When the stranger gave a member a wrong mean, by time.time()."""
        return [line["time"] for line in said(self.stranger) if line.get("event") == "lied"] if self.stranger else []

    def _proven(self) -> list[float]:
        """When each honest peer had a proof of that; 0 for one that has none."""
        proofs = [toy.folder / "state" / "proofs.json" for toy in self._toys]
        return [path.stat().st_mtime if path.exists() else 0.0 for path in proofs]

    def _unproven(self) -> list[str]:
        """A lie parts the members for a round. What must not be is that somebody has no proof of it."""
        if not self._lies():
            return ["the stranger came to no lie"]
        return [f"{toy.name} has no proof" for toy, proven in zip(self._toys, self._proven(), strict=True) if not proven]

    def _liars(self) -> set[str]:
        """The stranger's peer ids."""
        trainer = self.stranger.address().rpartition("/")[2]
        return {peer for line in said(self.stranger) for peer in line.get("peers", ())} | {trainer}

    def _reports(self) -> list[tuple[float, str]]:
        """Whom the helper reported, and when."""
        return [(line["time"], line["peer"]) for line in said(self.helper) if line.get("event") == "reported"] if self.helper else []

    def _unreported(self) -> list[str]:
        """What is wrong with the helper's reports: it must name the liar, and nobody else."""
        if self.helper is None:
            return []
        named = {peer for _, peer in self._reports()}
        found = [f"the helper reported the honest {peer[-6:]}" for peer in sorted(named - self._liars())]
        return found if named & self._liars() else [*found, f"the helper did not report the liar: {last_word(self.helper)}"]

    def _misled(self) -> list[str]:
        """What the newcomer or the program that met the stranger was led to."""
        if self.newcomer is not None and self._newcomer_joined() is None:
            own = len(self.newcomer.rounds())
            return [f"the newcomer averaged with nobody: {own} rounds of its own; {last_word(self.newcomer.program)}"]
        for line in said(self.victim) if self.victim else []:
            made_up = self.forged() | {told["model_digest"] for told in said(self.stranger) if "model_digest" in told}
            if made_up & {line.get("digest"), line.get("model_digest")}:
                return [f"{self.victim.name} took what the stranger made up"]
            if line.get("error"):
                return [f"{self.row.kind} failed: {line['error']}"[:200]]
            return []
        return [f"{self.row.kind} said nothing: {last_word(self.victim)}"] if self.victim else []

    def _newcomer_joined(self) -> float | None:
        """Seconds that the newcomer listened until it was in a round whose state an honest peer holds; None: it was in none."""
        if self.newcomer is None:
            return None
        honest = {line["digest"] for toy in self._toys for line in toy.rounds()}
        times = [line["time"] for line in self.newcomer.rounds() if line["how"] == "averaged" and line["digest"] in honest]
        return times[0] - self._listens_since if times else None


def end_swarms(swarms: Sequence[Swarm]) -> None:
    for swarm in swarms:
        swarm.end()
