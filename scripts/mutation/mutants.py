"""Break the engine on purpose, one small change after the other, and let the simulator look for it.

    ./scripts/mutants [--only NAME] [--seconds 60] [--list]

Each mutation of `mutations.py` is made in a copy of the tree, never in the tree itself. Then worlds are played on one core, mixed ones unless it
names others, from seed 1 on, until one breaks a promise that it keeps without the mutation, or until the seconds of CPU time are over. A table to
read, then one line of JSON; the exit status is 1 unless all are found.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.mutation.mutations import MUTATIONS, Mutation
from swarm.errors import UserError, run_program

ROOT = Path(__file__).resolve().parents[2]
PLAYED = ("swarm", "peer", "datasetserver", "simulation", "scripts")
"""What a world is made of."""
_WALL_FACTOR, _WALL_SECONDS = 6, 120
"""On a machine that does much else. Beyond that the mutated engine hangs, which is no breach: a person would not know why."""


@dataclass(frozen=True)
class Found:
    """promise: which was broken, '' when none was; seconds: of CPU time, until then."""

    name: str
    promise: str
    seed: int
    seconds: float
    rounds: int
    note: str = ""


class Player:
    """Plays seeds of worlds in a tree, on one core."""

    def __init__(self, core: int):
        self._core = core
        self._without: dict[tuple[int, Sequence[str]], str] = {}

    def look_for(self, mutation: Mutation, seconds: float) -> Found:
        with mutated(mutation) as tree:
            seed, used, rounds = 1, 0.0, 0
            while True:
                try:
                    took, summary = self._play(tree, seed, seconds - used, *mutation.world)
                except subprocess.TimeoutExpired:
                    return Found(mutation.name, "", seed, round(seconds, 1), rounds, "it hangs")
                used, rounds = used + took, rounds + summary["rounds"]
                if not summary["breaches"]:
                    return Found(mutation.name, "", seed, round(used, 1), rounds)
                seed, promise = summary["broken_seeds"][0], summary["promises"][0]
                if broken := re.search("(Attribute|Name|Type|UnboundLocal)Error", promise):
                    raise UserError(f"The mutation {mutation.name} leaves no engine to run: {promise}.", fix=f"Mend its {broken[0]}: it names what is not there.")
                if self._breaks_anyway(seed, mutation.world) != promise:
                    return Found(mutation.name, promise, seed, round(used, 1), rounds)
                if used >= seconds:
                    return Found(mutation.name, "", seed, round(used, 1), rounds)
                seed += 1

    def _breaks_anyway(self, seed: int, world: Sequence[str]) -> str:
        """What the engine as it is breaks with that seed; '' as it should be."""
        if (seed, world) not in self._without:
            _, summary = self._play(ROOT, seed, 600, *world, "--seeds", "1")
            self._without[seed, world] = (summary["promises"] or [""])[0]
        return self._without[seed, world]

    def _play(self, tree: Path, seed: int, seconds: float, *options: str) -> tuple[float, dict[str, Any]]:
        """CPU seconds, and what the last line of the simulator says. Raises subprocess.TimeoutExpired, UserError."""
        words = ["--seed", str(seed), "--seeds", "1000000", "--until_breach", "--no_shrink", "--cpu_seconds", str(seconds), *options]
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        before = _cpu_seconds()
        ended = subprocess.run(
            [sys.executable, "-m", "simulation", *words], cwd=tree, env=environment, capture_output=True, text=True,
            timeout=_WALL_FACTOR * seconds + _WALL_SECONDS, preexec_fn=lambda: os.sched_setaffinity(0, {self._core}),
        )  # fmt: skip
        last = (ended.stdout.splitlines() or [""])[-1]
        if not last.startswith("{"):
            raise UserError(f"The simulator ended with status {ended.returncode}: {ended.stderr.strip()[-2000:]}", fix=f"See {tree}.")
        return _cpu_seconds() - before, json.loads(last)


def _cpu_seconds() -> float:
    """Of the processes that ran so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def mutated(mutation: Mutation, root: Path = ROOT) -> Iterator[Path]:
    """A copy of what is played, with that one change. Raises UserError when its place is gone."""
    path, text = mutation.apply(root)
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        for name in PLAYED:
            shutil.copytree(root / name, tree / name)  # with what is compiled of it: files keep their times, and compiling takes 3 s
        (tree / path).write_text(text, encoding="utf-8")
        yield tree


def table(found: Iterable[Found]) -> Iterator[str]:
    yield f"{'mutation':28} {'found':5} {'seed':>5} {'CPU s':>6} {'rounds':>6}  by"
    for one in found:
        by = one.promise or one.note or "-"
        yield f"{one.name:28} {'yes' if one.promise else 'NO':5} {one.seed:5} {one.seconds:6.1f} {one.rounds:6}  {by}"


def _chosen(names: Sequence[str]) -> list[Mutation]:
    known = {mutation.name: mutation for mutation in MUTATIONS}
    if unknown := sorted(set(names) - known.keys()):
        raise UserError(f"No such mutations: {', '.join(unknown)}.", fix=f"There are {', '.join(known)}.")
    return [known[name] for name in names] if names else list(MUTATIONS)


def main(argv: Sequence[str], look_for: Callable[[Mutation, float], Found] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this one; may be given several times")
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU time for each (default: 60)")
    parser.add_argument("--list", action="store_true", help="only say which there are, and what each breaks")
    options = parser.parse_args(argv)
    chosen = _chosen(options.only)
    for mutation in chosen:
        mutation.apply(ROOT)  # all of their places are there before minutes are spent on the first one
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name:28} {mutation.breaks}")
        return 0
    look_for = look_for or Player(max(os.sched_getaffinity(0))).look_for
    found = []
    for mutation in chosen:
        found.append(look_for(mutation, options.seconds))
        print("\n".join(list(table(found))[len(found) > 1 and len(found) :]), flush=True)
    count = sum(bool(one.promise) for one in found)
    print(json.dumps({"found": count, "of": len(found), "seconds": options.seconds, "mutations": [asdict(one) for one in found]}))
    return 0 if count == len(found) else 1


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
