"""`python -m simulation`: play one seed, or many, and say what happened."""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.errors import run_program

if TYPE_CHECKING:
    from simulation.world import Outcome, Scenario

_SAME_SUMS = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}
"""For torch and MKL, which else add up a norm in the order that suits the processor: a breach found on an AMD one was none on an Intel one."""


def main(argv: Sequence[str]) -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings have an order, too
        os.execve(sys.executable, [sys.executable, "-m", "simulation", *argv], {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"})
    if "torch" not in sys.modules:  # which reads them once
        os.environ.update(_SAME_SUMS)
    from simulation.campaign import mixed

    parser = _parser()
    options = parser.parse_args(argv)
    if options.campaign:
        return _campaign(options)
    if options.mixed:
        return Session(options).play(mixed)
    base = _scenario(parser, options)
    if options.replay:
        base = _replay(options.replay, base)
    return Session(options).play(lambda seed: replace(base, seed=seed))


def _parser() -> argparse.ArgumentParser:
    from simulation.campaign import SYNCS, WIRES
    from simulation.faults import FAULTS

    parser = argparse.ArgumentParser(prog="python -m simulation", description="Real peers in a simulated world; a seed repeats it exactly.")
    world = parser.add_argument_group("the world")
    world.add_argument("--peers", type=int, default=8, help="peers that train (default: 8)")
    world.add_argument("--assistants", type=int, default=0, help="peers that assist, besides those that train (default: 0)")
    world.add_argument("--lease_seconds", type=float, default=60.0, help="the server's, and after them it gives what is late to others (default: 60)")
    world.add_argument("--total_samples", type=int, default=0, help="where the run ends (default: 0, nowhere)")
    world.add_argument("--min_peers", type=int, default=1, help="N peers wait for each other before they start (default: 1)")
    world.add_argument("--members", action="store_true", help="a run for members: strangers are none")
    world.add_argument("--trusted", type=int, default=0, help="in a run for members, N of the peers are trusted to average (default: 0)")
    world.add_argument("--liars", type=int, default=0, help="in a run for members, N more that sign made-up states for newcomers (default: 0)")
    world.add_argument("--two_faced", action="store_true", help="in a run for members, one more that signs two means of its share")
    world.add_argument("--wrong_mean", action="store_true", help="in a run for members, one more that gives all a wrong mean of its share")
    world.add_argument("--met_child", action="store_true", help="one more that assists honestly, and signs made-up states")
    world.add_argument("--averaging", default="mean", choices=("mean", "centered"), help="the run's (default: mean)")
    world.add_argument("--chunks", type=int, default=1, help="of a state, 4 MiB each: two cost seven times the CPU time (default: 1)")
    world.add_argument("--strangers", default="", help="who comes and means harm: 'all', or rows of scripts/strangers (docs/internals.md)")
    world.add_argument("--hours", type=float, default=1.0, help="virtual hours with faults; then all must commit within 10 minutes (default: 1)")
    world.add_argument("--rounds", type=int, default=0, help="end the faults after N rounds")
    world.add_argument("--faults", default="all", help=f"all, or some of: {', '.join((*FAULTS, 'nat'))}; or none (default: all, but for the rare)")
    world.add_argument("--fault_seconds", type=float, default=60.0, help="mean time between two faults of one kind (default: 60)")
    world.add_argument("--strikes", help="these strikes instead of drawn ones, as a breach prints them; or a file of them")
    world.add_argument("--step_seconds", default="", help="of each peer for one sample, as 0.5+0.7; drawn where it is not given")
    world.add_argument("--replay", type=Path, metavar="FOLDER", help="the peers, deaths and round lengths of a real run, from the logs in FOLDER")
    world.add_argument("--sync", default="parameters", choices=SYNCS)
    world.add_argument("--wire", default="int8", choices=WIRES)
    world.add_argument("--overlap", action="store_true", help="peers train while a round is averaged")
    world.add_argument("--mixed", action="store_true", help="each seed draws all of the above for itself, as in a campaign")
    many = parser.add_argument_group("which worlds, and how many")
    many.add_argument("--seed", type=int, default=1, help="what happens (default: 1)")
    many.add_argument("--seeds", type=int, default=1, help="play N seeds, from --seed on (default: 1)")
    many.add_argument("--until_breach", action="store_true", help="stop at the first seed that breaks something")
    many.add_argument("--cpu_seconds", type=float, default=0.0, help="begin no seed after N seconds of CPU time")
    many.add_argument("--campaign", type=Path, metavar="FILE", help="play mixed worlds until FILE has --seeds of them with --rounds rounds")
    many.add_argument("--beset", action="store_true", help="of a campaign: only worlds in which somebody means harm")
    many.add_argument("--processes", type=int, default=1, help="of a campaign (default: 1)")
    said = parser.add_argument_group("what is said")
    said.add_argument("--trace", action="store_true", help="print the last lines of what happened also where nothing broke")
    said.add_argument("--no_shrink", action="store_true", help="do not look for a smaller scenario that breaks the same promise")
    said.add_argument("--shrink_seconds", type=float, default=120.0, help="how long to look for it (default: 120)")
    return parser


def _scenario(parser: argparse.ArgumentParser, options: argparse.Namespace) -> "Scenario":
    from simulation.campaign import KINDS
    from simulation.faults import FAULTS, parse_strikes
    from simulation.world import STRANGERS, Scenario

    faults = {"all": KINDS, "none": ()}.get(options.faults) or tuple(name for name in options.faults.split(",") if name and name != "none")
    if unknown := sorted(set(faults) - {*FAULTS, "nat"}):
        parser.error(f"no such faults: {', '.join(unknown)}; there are {', '.join((*FAULTS, 'nat'))}")
    strangers = STRANGERS if options.strangers == "all" else tuple(filter(None, options.strangers.split(",")))
    if unknown := sorted(set(strangers) - set(STRANGERS)):
        parser.error(f"no such strangers: {', '.join(unknown)}; there are {', '.join(STRANGERS)}")
    strikes = None
    if options.strikes is not None:
        try:
            # A list of strikes may be longer than a file's name may be.
            strikes = parse_strikes(Path(options.strikes).read_text() if "@" not in options.strikes and options.strikes else options.strikes)
        except (OSError, ValueError) as error:
            parser.error(f"--strikes: {error}")
    try:
        steps = tuple(float(seconds) for seconds in options.step_seconds.split("+") if seconds)
    except ValueError:
        parser.error(f"--step_seconds: '{options.step_seconds}' is not a list of seconds like 0.5+0.7")
    return Scenario(
        options.seed, options.peers, options.hours, options.rounds, faults, options.fault_seconds,
        sync=options.sync, wire=options.wire, overlap=options.overlap, strikes=strikes, step_seconds=steps,
        assistants=options.assistants, lease_seconds=options.lease_seconds, strangers=strangers,
        total_samples=options.total_samples, min_peers=options.min_peers, members=options.members, trusted=options.trusted,
        averaging=options.averaging, chunks=options.chunks, liars=options.liars, two_faced=options.two_faced,
        wrong_mean=options.wrong_mean, met_child=options.met_child,
    )  # fmt: skip


def _replay(folder: Path, like: "Scenario") -> "Scenario":
    from simulation import replay
    from simulation.shrink import command

    recording = replay.read(folder)
    scenario = replay.scenario(recording, like)
    print(
        f"{folder}: {len(recording.peers)} peers, {recording.ended - recording.began:.0f} s, {recording.rounds} rounds of about "
        f"{recording.round_seconds:.1f} s, {len(scenario.strikes)} times somebody came late, died or was stopped\n  {command(scenario)}", flush=True,
    )  # fmt: skip
    return scenario


class Session:
    """Seeds that are played one after the other, and what is said of them."""

    def __init__(self, options: argparse.Namespace):
        self._options, self._began = options, time.monotonic()
        self._rounds = self._messages = 0
        self._faults: Counter[str] = Counter()
        self._failpoints: Counter[str] = Counter()
        self._committed: list[float] = []
        self._breaches: dict[int, str] = {}
        self._trace = ""

    def play(self, scenario_of: Any) -> int:
        from simulation.world import play

        options = self._options
        for seed in range(options.seed, options.seed + options.seeds):
            scenario = scenario_of(seed)
            outcome = play(scenario)
            self._count(outcome)
            if outcome.breach or options.trace:
                print("\n".join(outcome.lines))
            if outcome.breach:
                self._tell_breach(scenario, outcome)
            if (outcome.breach and options.until_breach) or (options.cpu_seconds and time.process_time() > options.cpu_seconds):
                break
        print(json.dumps(self._summary()))
        return 1 if self._breaches else 0

    def _count(self, outcome: "Outcome") -> None:
        self._rounds, self._messages, self._trace = self._rounds + outcome.rounds, self._messages + outcome.messages, outcome.trace
        self._faults.update(outcome.faults)
        self._failpoints.update(outcome.failpoints)
        self._committed.append(outcome.committed)
        print(
            f"seed {outcome.seed}: {outcome.rounds} rounds in {outcome.virtual_seconds / 3600:.2f} h, slowest commit "
            f"{outcome.slowest_commit_seconds} s, {outcome.adopted}, faults {sum(outcome.faults.values())}, apart {outcome.apart}, "
            f"withdrawn {outcome.withdrawn}, buried {outcome.buried}, trace {outcome.trace[:16]}", flush=True,
        )  # fmt: skip

    def _tell_breach(self, scenario: "Scenario", outcome: "Outcome") -> None:
        from simulation.shrink import Shrinking, command, promise
        from simulation.world import play

        self._breaches[outcome.seed] = promise(outcome.breach)
        print(f"BREACH with seed {outcome.seed}: {outcome.breach}\n  {command(scenario)}", flush=True)
        if self._options.no_shrink:
            return
        shrinking = Shrinking(scenario, outcome, self._options.shrink_seconds, play)
        shrinking.run()
        small, after = shrinking.scenario, shrinking.outcome
        if small == scenario:
            print(f"none of {shrinking.tried} smaller scenarios breaks the same promise")
            return
        print("\n".join(["", *after.lines]))
        print(
            f"the same promise, after {shrinking.tried} smaller scenarios: {small.peers} peers, {len(after.strikes)} strikes, "
            f"{after.virtual_seconds:.0f} s, {len(after.lines)} lines above\nBREACH: {after.breach}\n  {command(small)}", flush=True,
        )  # fmt: skip

    def _summary(self) -> dict[str, Any]:
        options, seconds = self._options, time.monotonic() - self._began
        return {
            "rounds": self._rounds, "rounds_per_minute": round(60 * self._rounds / seconds, 1),
            "committed": round(sum(self._committed) / len(self._committed), 4), "breaches": len(self._breaches),
            "seed": options.seed, "seeds": len(self._committed), "peers": options.peers, "messages": self._messages,
            "faults": dict(self._faults), "failpoints": dict(self._failpoints), "broken_seeds": list(self._breaches),
            "promises": list(self._breaches.values()), "seconds": round(seconds, 1), "trace": self._trace,
        }  # fmt: skip


def _campaign(options: argparse.Namespace) -> int:
    from simulation.campaign import campaign, commit, read, summary

    began, rounds, played = time.monotonic(), 0, 0
    for line in campaign(options.campaign, options.seed, options.seeds, options.rounds, options.processes, beset=options.beset):
        rounds, played = rounds + line["rounds"], played + 1
        if line["breach"]:
            print(f"BREACH with seed {line['seed']}: {line['breach']}\n  python -m simulation --mixed --seed {line['seed']}", flush=True)
        elif played % 50 == 0:
            print(f"{played} seeds, {rounds} rounds in {time.monotonic() - began:.0f} s", flush=True)
    total = summary(read(options.campaign))
    seconds = time.monotonic() - began
    print(json.dumps({**total, "seed": options.seed, "commit": commit(), "rounds_per_minute": round(60 * rounds / seconds, 1), "seconds": round(seconds, 1)}))
    return 1 if total["breaches"] else 0


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
