"""Kill parts of a real swarm at random, again and again: nobody's loss may cost the others more than seconds, and no sample may be lost.

    ./scripts/soak --minutes 30          real trainers under dd-peer, which alone start what was killed; see --minutes 1 --help
    ./scripts/soak [--kills 100] [--seed 0] [--peers 4] [--sync parameters] [--record FILE]

Real peers with a real dataset server and ledger; only computing is a sleep. A kill is SIGKILL of a peer with all its processes, of
the first peer, of a sidecar, of p2pd or of the server, or SIGSTOP of a peer for some seconds. What was killed is started again; the
next kill comes when every survivor has come to a new state, so that its seconds are known. A record as JSON, a table to read; the exit
status is 0 only if every survivor went on each time, states are equal wherever parent and group are, and the ledger agrees with the
states to the sample.
"""

import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import about, argument_parser, print_table
from scripts.churn import checks
from scripts.churn.swarm import (
    BATCH,
    ROUND_SECONDS,
    SAMPLE_SECONDS,
    Peer,
    Server,
    add_record_arguments,
    conclude,
    end,
    leave,
    peer_command,
    until,
    work_folder,
)
from swarm.errors import ExitCode, UserError, run_program
from swarm.lifeline import adopt_orphans

KINDS = {"peer": 4, "first peer": 2, "sidecar": 3, "p2pd": 3, "stop": 2, "server": 2}
"""What may happen, and how often in proportion."""
START_SECONDS = 240.0
COMMIT_SECONDS = 240.0
"""A survivor that commits nothing for this long after a kill has failed, also on a machine that does much else."""
_PARTS = {"sidecar": "peer.sync.engine.trainer.sidecar", "p2pd": "hivemind_cli/p2pd"}
_MOST_RESTARTS, _RESTARTS_WITHIN_SECONDS = 4, 600.0
"""One less than a trainer forgives its sidecar."""


@dataclass
class Kill:
    number: int
    kind: str
    victim: str
    at: float
    """Seconds since the start."""
    survivors: dict[str, float | None] = field(default_factory=dict)
    """Seconds until each next committed a round; None: not within COMMIT_SECONDS."""
    victim_seconds: float | None = None
    """Until the victim committed again, its start included; None for the server, and when it was not waited for."""


class Soak:
    """One run: `story` makes the kills, `verdict` checks what is left."""

    def __init__(self, folder: Path, *, peers: int, seed: int, sync: str, say: Callable[[str], None] = print):
        self._folder, self._say = folder, say
        self._rng = random.Random(seed)
        self._kinds = self._rng.sample(list(KINDS), len(KINDS))
        self._server = Server(folder, target=int(peers * ROUND_SECONDS / SAMPLE_SECONDS), sync=sync)
        self._server_down_until = 0.0
        self._peers: list[Peer] = []
        self._num_peers = peers
        self._began = time.time()
        self._lost_sidecars: dict[str, list[float]] = {}
        self._struck: dict[str, float] = {}
        """When each was a victim last."""
        self.kills: list[Kill] = []
        self.faults: list[str] = []

    # ---------------------------------------------------------------- the story

    def story(self, kills: int) -> None:
        self._server.wait()
        for number in range(self._num_peers):
            folder = self._folder / f"peer-{number + 1}"
            self._peers.append(Peer(folder.name, folder, peer_command(self._server, folder)))
        self._until("first rounds of all", lambda: all(peer.up for peer in self._peers), START_SECONDS)
        for number in range(1, kills + 1):
            self._pause(self._rng.uniform(0, 1.5 * ROUND_SECONDS))
            self._one(number)
        self._until("rounds of all after the last kill", lambda: all(map(self._well, self._peers)), START_SECONDS)
        self.faults += leave(self._peers, self._server)

    def _one(self, number: int) -> None:
        kind, victim = self._choose()
        survivors = [peer for peer in self._peers if self._well(peer) and peer is not victim]
        now = time.time()
        if victim is not None:
            self._struck[victim.name] = now
        kill = Kill(number, kind, victim.name if victim else "server", round(now - self._began, 1))
        self.kills.append(kill)
        self._strike(kind, victim)
        self._until(
            "commit of every survivor",
            lambda: all(peer.commits_since(now) or not peer.up for peer in survivors),
            COMMIT_SECONDS,
        )
        kill.survivors = {peer.name: _first(peer.commits_since(now), now) for peer in survivors}
        # One time in three the next kill comes while this one's victim is still away.
        if victim is not None and self._rng.random() < 2 / 3:
            self._until(f"return of {victim.name}", lambda: victim.up and bool(victim.commits_since(now)), START_SECONDS)
            kill.victim_seconds = _first(victim.commits_since(now), now)
        self._say(f"{kill.at:7.1f} s  {number:3} {kind:10} {kill.victim:8} {_shown(kill)}")

    def _well(self, peer: Peer) -> bool:
        """Whether it runs and has come to a state since it was a victim."""
        return peer.up and bool(peer.commits_since(self._struck.get(peer.name, 0.0)))

    def _choose(self) -> tuple[str, Peer | None]:
        """What happens to whom; at least one peer that is up is left alone."""
        self._until("two peers that are up", lambda: sum(peer.up for peer in self._peers) >= 2, START_SECONDS)
        up = [peer for peer in self._peers if peer.up]
        while True:
            # Each kind once, so that a short soak is not all of one; then by chance.
            kind = self._kinds.pop() if self._kinds else self._rng.choices(list(KINDS), list(KINDS.values()))[0]
            if kind == "server":
                return kind, None
            victims = [peer for peer in (self._peers[:1] if kind == "first peer" else up) if peer in up and self._can_lose(kind, peer)]
            if victims:
                return kind, self._rng.choice(victims)

    def _can_lose(self, kind: str, peer: Peer) -> bool:
        """A peer has no p2pd while the sidecar that it lost in the kill before is being started again."""
        return kind not in _PARTS or (not self._worn(peer) and bool(peer.family(_PARTS[kind])))

    def _worn(self, peer: Peer) -> bool:
        lost = [when for when in self._lost_sidecars.get(peer.name, []) if when > max(peer.born, time.time() - _RESTARTS_WITHIN_SECONDS)]
        return len(lost) >= _MOST_RESTARTS

    def _strike(self, kind: str, victim: Peer | None) -> None:
        away = self._rng.uniform(0, 4)
        if victim is None:
            self._server.kill()
            self._server_down_until = time.monotonic() + away
        elif kind in _PARTS:
            self._lost_sidecars.setdefault(victim.name, []).append(time.time())
            if not victim.kill_part(_PARTS[kind]):
                self.faults.append(f"{victim.name} had no {kind} to kill")
        elif kind == "stop":
            victim.send(signal.SIGSTOP)
            self._pause(self._rng.uniform(3, 15))
            victim.send(signal.SIGCONT)
        else:
            victim.kill()
            victim.down_until = time.monotonic() + away

    def _tend(self) -> None:
        """Start again what was killed, and what ended by itself, which is a fault."""
        now = time.monotonic()
        if self._server_down_until and now >= self._server_down_until:
            self._server_down_until = 0.0
            self._server.start()
        for peer in self._peers:
            if peer.down_until:
                if now >= peer.down_until and not self._server_down_until:
                    peer.start()
            elif peer.program.ended() is not None and not peer.rounds():
                reason = f"{peer.name} ended before its first round, with status {peer.program.ended()}: {peer.program.last_words(2)}"
                raise UserError(reason, fix=f"See {peer.program.log}.", code=ExitCode.FAILED)
            elif peer.program.ended() is not None:
                self.faults.append(f"{peer.name} ended by itself with status {peer.program.ended()}: {peer.program.last_words(2)}")
                peer.down_until = now + 1

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tend()
            time.sleep(0.1)

    def _until(self, what: str, true: Callable[[], bool], seconds: float) -> None:
        """Wait; what does not come in time is a fault, and the story goes on."""
        if not until(true, self._tend, seconds):
            self.faults.append(f"no {what} within {seconds:.0f} s (after kill {len(self.kills)})")

    def close(self) -> None:
        self.faults += end(self._peers, self._server)

    # ---------------------------------------------------------------- the verdict

    def verdict(self) -> dict[str, Any]:
        rounds = [line for peer in self._peers for line in peer.rounds()]
        chain, keys, repeated = checks.read_ledger(self._server.ledger)
        faults = {
            "survivors": [f"kill {k.number}: {name} did not go on" for k in self.kills for name, s in k.survivors.items() if s is None],
            "story": self.faults,
            **checks.faults_of(rounds, self._server.ledger),
        }
        seconds = sorted(s for kill in self.kills for s in kill.survivors.values() if s is not None)
        return {
            "holds": not any(faults.values()),
            "faults": faults,
            "kills": len(self.kills),
            "survivor_seconds": {"median": _quantile(seconds, 0.5), "p90": _quantile(seconds, 0.9), "worst": _quantile(seconds, 1.0)},
            "rounds": chain[-1]["round"] if chain else 0,
            "samples": chain[-1]["samples"] if chain else 0,
            "keys_counted": sum(len(keys.get((peer, number), ())) for state in chain for peer, number, _ in state["members"]),
            "repeated": sum(repeated.get((peer, number), 0) for state in chain for peer, number, _ in state["members"]),
            "seconds": round(time.time() - self._began),
            "records": [asdict(kill) for kill in self.kills],
        }


def _first(times: Sequence[float], since: float) -> float | None:
    return round(times[0] - since, 1) if times else None


def _shown(kill: Kill) -> str:
    survivors = " ".join(f"{name[-1]}:{'never' if seconds is None else seconds}" for name, seconds in kill.survivors.items())
    return f"{survivors}   itself: {'-' if kill.victim_seconds is None else kill.victim_seconds}"


def _quantile(values: Sequence[float], share: float) -> float | None:
    return values[min(int(share * len(values)), len(values) - 1)] if values else None


def summary(kills: Sequence[Kill]) -> list[dict[str, Any]]:
    """One row per kind of kill."""
    rows = []
    for kind in KINDS:
        mine = [kill for kill in kills if kill.kind == kind]
        seconds = sorted(s for kill in mine for s in kill.survivors.values() if s is not None)
        own = sorted(kill.victim_seconds for kill in mine if kill.victim_seconds is not None)
        values = (_quantile(seconds, 0.5), _quantile(seconds, 0.9), _quantile(seconds, 1.0), _quantile(own, 0.5), _quantile(own, 1.0))
        names = ("survivors, median s", "90 %", "worst", "victim, median s", "worst itself")
        shown = {name: "-" if value is None else value for name, value in zip(names, values, strict=True)}
        rows.append({"killed": kind, "times": len(mine), **shown})
    return rows


def main(argv: Sequence[str]) -> int:
    if any(flag.startswith("--minutes") for flag in argv):
        from scripts.churn import supervised

        return supervised.main(argv)
    parser = argument_parser(__doc__, "soak")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--sync", default="parameters", help="the run's strategy")
    add_record_arguments(parser)
    args = parser.parse_args(argv)
    adopt_orphans()
    print(f"{args.peers} peers, rounds of about {ROUND_SECONDS} s, steps of {BATCH * SAMPLE_SECONDS} s; seed {args.seed}", flush=True)
    with work_folder(args.keep) as folder:
        soak = Soak(folder, peers=args.peers, seed=args.seed, sync=args.sync, say=lambda text: print(text, flush=True))
        try:
            soak.story(args.kills)
        finally:
            soak.close()
        verdict = {"peers": args.peers, "seed": args.seed, "sync": args.sync, **soak.verdict(), "about": about()}
    print_table(summary(soak.kills))
    counts = f"{verdict['kills']} kills, {verdict['rounds']} rounds, {verdict['samples']} samples, {verdict['repeated']} of them twice in an outage"
    return conclude(verdict, counts, args.record)


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
