"""How often an audit (`--audit 1`) reports an honest member, and how soon a liar: the rule of peer/audit/tally.py on drawn changes of the loss.

    .venv/bin/python benchmarks/false_reports.py [--runs 200] [--rounds 1000]

Each run has six members, of whom one is measured a round. Five kinds of honest members, three of liars among four honest ones. Some minutes
of one core. Prints a table and, as its last line, one JSON object.
"""

import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import argument_parser, print_result
from peer.audit.tally import Tally

Draw = Callable[[random.Random, int], float]
"""What one contribution of member number n does to the loss."""
HONEST: Mapping[str, Draw] = {
    "far from the end": lambda rng, n: rng.gauss(-0.01 * (1 + 0.06 * n), 0.004),
    "at the end, where each alone makes it worse": lambda rng, n: rng.gauss(0.002 * (1 + 0.1 * n), 0.001),
    "with rounds that go wrong": lambda rng, n: rng.gauss(-0.001, 0.002) + (0.05 if rng.random() < 0.05 else 0.0),
    "that learn nothing": lambda rng, n: rng.gauss(0.0, 0.003),
    "with heavy tails": lambda rng, n: 0.002 * rng.gauss(0, 1) / max(abs(rng.gauss(0, 1)), 0.1),
}
LIES: Mapping[str, Draw] = {
    "turned round": lambda rng, n: rng.gauss(0.012, 0.004),
    "ten times too long": lambda rng, n: rng.gauss(0.3, 0.1),
    "by chance": lambda rng, n: rng.gauss(0.01, 0.002),
}


def audited(rng: random.Random, members: Mapping[str, Callable[[], float]], rounds: int, each_round: int = 1) -> dict[str, int]:
    """Who was reported, and after which round. members: peer -> a draw of what its next contribution does to the loss."""
    tally, seen = Tally(), {}
    for number in range(1, rounds + 1):
        for peer in sorted(members, key=lambda peer: rng.random() ** (1 + tally.rounds(peer)) ** 2)[-each_round:]:
            tally.add(peer, members[peer]())
        for found in tally.findings():
            if found.reported:
                seen.setdefault(found.peer, number)
    return seen


def honest(kind: str, seed: int, rounds: int, members: int = 6) -> dict[str, int]:
    rng = random.Random(seed)
    return audited(rng, {f"Qm{n}": lambda n=n: HONEST[kind](rng, n) for n in range(members)}, rounds)


def lied(lie: str, seed: int, rounds: int = 50) -> dict[str, int]:
    """A liar among four honest members."""
    rng = random.Random(seed)
    members = {f"Qm{n}": lambda n=n: HONEST["far from the end"](rng, n) for n in range(4)}
    return audited(rng, {**members, "liar": lambda: LIES[lie](rng, 0)}, rounds)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1000)
    args = parser.parse_args()
    wrong = {kind: sum(bool(honest(kind, seed, args.rounds)) for seed in range(args.runs)) for kind in HONEST}
    found = {lie: [lied(lie, seed) for seed in range(args.runs)] for lie in LIES}
    print(f"runs of {args.rounds} rounds in which an honest member was reported, of {args.runs}:")
    for kind, count in wrong.items():
        print(f"  {kind:46}{count:6}")
    print("runs of 50 rounds in which the liar was reported, its median round, and runs in which another was:")
    rows = {}
    for lie, runs in found.items():
        rounds = [run["liar"] for run in runs if "liar" in run]
        rows[lie] = {"found": len(rounds), "median_round": median(rounds) if rounds else None, "others": sum(bool(run.keys() - {"liar"}) for run in runs)}
        print(f"  {lie:46}{rows[lie]['found']:6}{rows[lie]['median_round'] or 0:6.0f}{rows[lie]['others']:6}")
    print_result({"runs": args.runs, "rounds": args.rounds, "honest": wrong, "liars": rows})


if __name__ == "__main__":
    main()
