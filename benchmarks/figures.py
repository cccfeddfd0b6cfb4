"""What this project claims in figures: runs each claim's command, and writes figures.md beside it.

    ./benchmarks/all                all of them, one after the other: some eight hours on two cores; run it alone
    ./benchmarks/all --only wan     one of them
    ./benchmarks/all --list         their names and commands

`wan` needs root: it makes network namespaces. What was not run again keeps its last figure, with the commit and machine that it is of.
Ends with 1 where a command failed or a goal was missed.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, about, argument_parser
from swarm import files
from swarm.errors import ExitCode, UserError, run_program

RECORD, PAGE = ROOT / "benchmarks/records/figures.json", ROOT / "benchmarks/figures.md"
PYTHON = ".venv/bin/python"
HEAD = """# Figures

One command for each claim. `benchmarks/all` runs them and writes this page. [RESULTS.md](RESULTS.md) has the history, also what got worse.

| claim | command | figure | goal | met | minutes | commit and day | machine |
|---|---|---|---|---|---|---|---|
"""
Said = Mapping[str, Any]
"""A program's last line."""


@dataclass(frozen=True)
class Claim:
    """figure: of a program's last line, for people; met: whether it is what `goal` says. {folder} in a command: a folder of this run's own."""

    text: str
    command: str
    goal: str
    figure: Callable[[Said], str]
    met: Callable[[Said], bool]
    file: str = ""
    """In {folder}, where the program writes what others say in their last line."""


CLAIMS: Mapping[str, Claim] = {
    "quickstart": Claim(
        "Peers come and are killed, and the model learns",
        "./scripts/quickstart --churn --folder {folder}/quickstart",
        "95 % of the drawn digits read right, all replicas equal",
        lambda said: (
            f"{said['digit_accuracy']:.0%}, digests {'equal' if said['digests_equal'] else 'NOT equal'} in {said['rounds']} rounds"
        ),
        lambda said: said["digit_accuracy"] >= 0.95 and said["digests_equal"],
        "quickstart/result.json",
    ),
    "soak": Claim(
        "100 kills lose no sample and count none twice",
        "./scripts/soak --kills 100 --peers 4 --seed 5 --record {folder}/soak.json",
        "all holds",
        lambda said: (
            f"{said['samples']:,} samples, {said['keys_counted']:,} counted; next commit after {said['survivor_seconds']['median']} s (median)"
        ),
        lambda said: said["holds"],
        "soak.json",
    ),
    "averaging": Claim(
        "Averaging is faster than stock hivemind's",
        f"{PYTHON} benchmarks/averaging.py",
        "2.0 times its throughput in fp16",
        lambda said: ", ".join(f"{case}: {value:.2f}" for case, value in said["throughput_by_case"].items()),
        lambda said: said["ratio_throughput_fp16"] >= 2.0 and said["digests_equal"],
    ),
    "wan": Claim(
        "Home lines (100 Mbit/s, 40 ms) keep the cards busy",
        f"sudo {PYTHON} benchmarks/wan.py --only diloco/int4/overlap",
        "utilisation 0.97 with two peers",
        lambda said: ", ".join(f"{row}: {value:.3f}" for row, value in said["utilisation"].items()),
        lambda said: said["utilisation"]["diloco/int4/overlap"] >= 0.97,
    ),
    "parity": Claim(
        "A swarm needs no more samples than one machine",
        f"{PYTHON} benchmarks/parity.py --repeats 3",
        "1.05 times at most with rounds of 2,048",
        lambda said: ", ".join(f"{row}: {value:.2f}" for row, value in said["samples_ratio"].items()),
        lambda said: max(value for row, value in said["samples_ratio"].items() if not row.startswith("small")) <= 1.05,
    ),
    "join": Claim(
        "A newcomer contributes soon, also when its donor dies",
        f"sudo {PYTHON} benchmarks/join.py",
        "1.25 times the download, and 15 s",
        lambda said: (
            f"{said['seconds_to_first_contribution']:.0f} s (aim {said['seconds_aim']:.0f}); with the donor killed {said['ratio_with_donor_killed']:.2f} of the download's time"
        ),
        lambda said: said["seconds_to_first_contribution"] <= said["seconds_aim"],
    ),
    "strangers": Claim(
        "Strangers change nothing",
        "./scripts/strangers --members --pairs 3 --minutes 90",
        "0.95 of the rounds beside an attacker without membership (median), nothing broken",
        lambda said: f"{statistics.median(said['rounds_ratio'].values()):.2f} in the median of {len(said['rounds_ratio'])} attacks",
        lambda said: said["holds"] and statistics.median(said["rounds_ratio"].values()) >= 0.95,
    ),
    "simulator": Claim(
        "No promise breaks with faults of every kind",
        f"{PYTHON} -m simulation --mixed --seeds 200 --seed 50000",
        "0 breaches",
        lambda said: f"{said['breaches']} in {said['rounds']:,} rounds of {said['seeds']} seeds",
        lambda said: said["breaches"] == 0,
    ),
    "mutants": Claim(
        "The simulator finds mistakes that were made on purpose",
        "./scripts/mutants",
        "all of them, each within 60 s",
        lambda said: ", not ".join([f"{said['found']} of {said['of']}", *(one["name"] for one in said["mutations"] if not one["promise"])]),
        lambda said: said["found"] == said["of"],
    ),
    "fuzz": Claim(
        "No parser falls over what strangers send",
        "./scripts/fuzz",
        "no crash",
        lambda said: f"{said['faults']} in {said['cases']:,} cases for {said['parsers']} parsers",
        lambda said: said["faults"] == 0,
    ),
    "full_size": Claim(
        "Stable Diffusion 1.5 trains at its full size on two CPUs",
        f"{PYTHON} benchmarks/full_size.py",
        "digests equal, 20 GiB at most",
        lambda said: f"{said['peak_gib']:.1f} GiB for all peers of a swarm, {said['seconds_per_step']:.0f} s a step",
        lambda said: said["digests_equal"] and said["loads"] and said["peak_gib"] <= 20,
    ),
    "device_memory": Claim(
        "The count of a card's memory is right",
        f"{PYTHON} benchmarks/device_memory.py",
        "within 10 % of what real steps take",
        lambda said: f"{min(said['checked'].values()):.2f} to {max(said['checked'].values()):.2f} of the count",
        lambda said: all(0.9 <= value <= 1.1 for value in said["checked"].values()),
    ),
}


def run(name: str, claim: Claim) -> dict[str, Any]:
    """What to keep of one claim. Raises UserError when the program fails, or its last line is no JSON."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="figures-") as folder:
        command = claim.command.format(folder=folder).split()
        if command[0] == "sudo" and os.geteuid() == 0:  # many containers have no sudo
            del command[0]
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        except FileNotFoundError:
            raise UserError(f"{name}: there is no '{command[0]}' here.", fix="Install it, or run this as root.", code=ExitCode.FAILED) from None
        last = (done.stdout.strip().splitlines() or [""])[-1]
        told = Path(folder, claim.file)
        said_in = told.read_text(encoding="utf-8") if claim.file and told.is_file() else last
    try:
        said = json.loads(said_in)
        kept = {"figure": claim.figure(said), "met": done.returncode == 0 and claim.met(said)}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{name}: '{claim.command}' ended with {done.returncode} and said: {last[:200]}", fix="Run it by itself.", code=ExitCode.FAILED
        ) from None
    here = about()
    machine = f"{here['cores']} cores, {here['cpu']}, torch {here['torch']}"
    return {
        **kept,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "commit": here["commit"],
        "day": date.today().isoformat(),
        "machine": machine,
    }


def page(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """figures.md, of what is kept of each claim."""
    rows = []
    for name, claim in CLAIMS.items():
        one = kept.get(name)
        told: list[Any] = ["not run yet", claim.goal, "", "", "", ""]
        if one:
            met = "yes" if one["met"] else "**no**"
            told = [one["figure"], claim.goal, met, one["minutes"], f"{one['commit']}, {one['day']}", one["machine"]]
        command = f"`{claim.command.format(folder='FOLDER')}`"
        rows.append(f"| {' | '.join(map(str, [claim.text, command, *told]))} |\n")
    return HEAD + "".join(rows)


def main(argv: Sequence[str]) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(CLAIMS), metavar="NAME", help="run these; --list names them")
    parser.add_argument("--list", action="store_true", help="print names and commands, run nothing")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    flags = parser.parse_args(argv)
    if flags.list:
        for name, claim in CLAIMS.items():
            print(f"{name:14} {claim.command.format(folder='FOLDER')}")
        return 0
    failed = []
    for name in flags.only or CLAIMS:
        print(f"{name}: {CLAIMS[name].command.format(folder='FOLDER')}", flush=True)
        try:
            one = run(name, CLAIMS[name])
        except UserError as error:  # the others may do
            print(f"error: {error.message}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        kept = {**(json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}), name: one}
        files.replace(RECORD, (json.dumps(kept, indent=1, sort_keys=True) + "\n").encode())
        files.replace(PAGE, page(kept).encode())
        print(f"  {one['figure']} (goal: {CLAIMS[name].goal}; {'met' if one['met'] else 'NOT met'}) after {one['minutes']} min", flush=True)
        failed += [] if one["met"] else [name]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv))
