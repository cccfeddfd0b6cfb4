"""Let strangers loose on real swarms, one for every row of the table of attacks, and say what each of them costs.

    ./scripts/strangers                        every row of strangers, in about 20 minutes
    ./scripts/strangers --all --pairs 1        strangers on runs for members, members that lie, and a server: about an hour on two cores
    ./scripts/strangers --all --rows member-nan,audited-sign-flip --pairs 1
    ./scripts/strangers --rows nan,long-header [--seconds 60] [--pairs 1]
    ./scripts/strangers --members              the same on runs for members, which the stranger is none of
    ./scripts/strangers --peers 4 --averaging centered --rows opposite,sign-flip
                                               one of five that lies in an open run, where it is as good as a member
    ./scripts/strangers --list                 the rows, and what each stranger does

What is measured. A row's stranger is a process of its own that knows one peer's address (or a server's URL; rows that say so: and has a
token), draws its values from the seed that is printed, and attacks a swarm of real peers: trainers with real sidecars and p2pd's on
loopback, whose model is a vector of 0.6 MB and whose computing is a sleep. A round takes one to two seconds. Rounds count for
--seconds (180) from the stranger's arrival. `rounds_ratio` is the rounds that an honest peer came to in that time over those that
a peer came to, in the very same seconds, in a swarm beside it that nobody disturbed.

Why that is fair. All swarms of a wave, and the undisturbed one, share the cores and begin alike, so that whatever else the machine does
slows both sides. Swarms share nothing else. A row that is `heavy` costs the machine itself and would slow the undisturbed
swarm, too: such rows run in a wave of their own, and are held against the faster of the undisturbed swarms of all waves.

What is reduced, and when. A pair is one wave with, beside one without. A row's ratio is the median of three pairs; where three do not
fit into --minutes (20) on this machine, fewer are run, and the first line says how many: two cores carry 10 swarms at a time, so that
24 rows with a rate take four waves of four minutes, which is one pair. `--pairs 3 --minutes 60` is the full thing there; 16 cores do it in 20.
The other rows have an outcome instead of a rate, and are tried once. A row that stores records counts as broken if no node answered any of them.

Members that lie are one of five, in a run for members with receipts, its clip and average those of a new run (--averaging, --clip_members). The
undisturbed swarm has the four honest ones. `progress_lost` is the share of its progress that they lack (progress.py), at most 0.1;
`banned_after_rounds`: until all have a proof, at most 20; `reported_after_rounds`: until a helper with --audit 1 names the liar, at most 50.
Half a minute shows that a row works, and little of its cost: a stretched mean first speeds the others up, and then destroys the model.

`ended` names the rows whose stranger ended, stopped or corrupted a run: an honest process that is gone, a made-up state taken, replicas
that differ, a loss that grew, no round at the end of the window, a newcomer led astray, a server's run over. `beyond` are rows of which a figure is above its bound
(memory, connections, milliseconds, progress). The last line is JSON; the exit status is 0 when `ended` names only what is left to
memberships, nothing is beyond, the other rows keep 0.8 of the rounds, and with --all those of strangers 0.95 in the median.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if sys.path and sys.path[0] != str(ROOT):
    sys.path[0] = str(ROOT)

from benchmarks.common import about  # noqa: E402
from scripts.attacks.hosted import Outcome, try_all  # noqa: E402
from scripts.attacks.progress import lost  # noqa: E402
from scripts.attacks.rows import ROWS, Row  # noqa: E402
from scripts.attacks.swarm import BESIDE_MEMBERS, BESIDE_STRANGERS, START_SECONDS, Kind, Swarm, end_swarms  # noqa: E402
from scripts.churn.swarm import add_record_arguments, work_folder  # noqa: E402
from scripts.demo.processes import end_all  # noqa: E402
from swarm.errors import UserError, run_program  # noqa: E402
from swarm.lifeline import adopt_orphans  # noqa: E402

RATIO, MEDIAN = 0.8, 0.95
_SWARMS_A_CORE = 5
"""A swarm of two peers with its stranger takes a fifth of a core; a heavy row's stranger as much as its swarm."""
_WAVE_SECONDS = 75.0
"""What a wave takes besides its window, on two cores."""
_HOSTED = ("ledger", "open server", "shard")
_HOSTED_SECONDS = 150.0
_WITH_MEMBERS = ("swarm", "newcomer", "lookup")
"""What is tried on a run for members: `dd-export` would be a stranger itself."""
_PEEK_SECONDS = 0.5
_SHOWN = ("newcomer_seconds", "asked", "answered")
"""Figures without a bound that a row's line shows."""
Say = Callable[[str], None]
_USUAL = Kind()


class Siege:
    """Waves of rows, and what became of them."""

    def __init__(self, folder: Path, *, seconds: float, seed: int, say: Say, kind: Kind = _USUAL, least_median: float = 0.0):
        """least_median: what the median of the rows of strangers must keep of the rounds."""
        self._folder, self._seconds, self._seed, self._say, self._kind = folder, seconds, seed, say, kind
        self._least_median = least_median
        self.pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """By row: rounds with, and without."""
        self.reasons: dict[str, list[str]] = defaultdict(list)
        self.figures: dict[str, dict[str, float]] = defaultdict(dict)
        self._lost: dict[str, list[float]] = defaultdict(list)
        """By row of a member, and pair: the share of the progress."""
        self.broken: dict[str, str] = {}
        self._undisturbed: list[float] = []
        """Rounds of the swarms that nobody came to, by wave."""

    def wave(self, number: int, pair: int, rows: Sequence[Row]) -> None:
        """These rows at once, all of one kind, beside a swarm of that kind that nobody comes to."""
        place, kind = self._folder / f"wave-{number}", self._kind.of(rows[0])
        swarms = [Swarm(place / row.id, kind, row, self._seed + pair) for row in rows]
        control = Swarm(place / "control", kind)
        everybody = [control, *swarms]
        try:
            self._until("averages together", everybody, lambda swarm: swarm.tend(), START_SECONDS)
            for swarm in everybody:
                if not swarm.broken:
                    swarm.let_in(self._seconds)
            self._until("has its window behind it", everybody, self._window, self._seconds + START_SECONDS)
            for swarm in swarms:
                self._judge(swarm, control)
            if not (control.broken or rows[0].let_in):
                self._undisturbed.append(control.rounds_within(control.began, control.began + self._seconds))
        finally:
            end_swarms(everybody)

    def _window(self, swarm: Swarm) -> bool:
        swarm.watch()
        return swarm.over(self._seconds)

    def _until(self, what: str, swarms: Sequence[Swarm], true: Callable[[Swarm], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        # All are asked each time: asking is what drives them.
        while not all([swarm.broken or true(swarm) for swarm in swarms]):
            time.sleep(_PEEK_SECONDS)
            for swarm in swarms if time.monotonic() > deadline else ():
                if not true(swarm):
                    swarm.broken = swarm.broken or f"not within {seconds:.0f} s: {what}"

    def _judge(self, swarm: Swarm, control: Swarm) -> None:
        row = swarm.row
        if control.broken:
            return self._give_up(row, f"the undisturbed swarm: {control.broken}; try --at_once with fewer")
        if why := swarm.broken or swarm.unheard():
            return self._give_up(row, why)
        end = min(time.time(), swarm.began + self._seconds)
        with_, without = (some.rounds_within(swarm.began, end) for some in (swarm, control))
        if row.heavy:
            without = max([without, *self._undisturbed])
        if row.kind in ("swarm", "newcomer"):
            self.pairs[row.id].append((with_, without))
        reasons = swarm.reasons(end, control.loss(swarm.began), without > 0)
        self.reasons[row.id] += reasons
        self.figures[row.id] |= swarm.figures(end, control.grown_mib()) | {"loss": swarm.loss(swarm.began), "loss_without": control.loss(swarm.began)}
        if row.let_in:
            self._lost[row.id].append(lost(*(some.progress(swarm.began, end) for some in (swarm, control))))
            self.figures[row.id]["progress_lost"] = round(statistics.median(self._lost[row.id]), 3)
        self._say(_line(row, f"{with_:5.1f} of {without:5.1f} rounds", reasons, self.figures[row.id]))

    def _give_up(self, row: Row, why: str) -> None:
        self.broken[row.id] = why
        self._say(f"{row.id:20} COULD NOT BE TRIED: {why}")

    def hosted(self, rows: Sequence[Row]) -> None:
        """The rows with an outcome at a server or a program."""

        def tell(row: str, outcome: Outcome) -> None:
            if outcome.broken:
                return self._give_up(ROWS[row], outcome.broken)
            self.reasons[row], self.figures[row] = outcome.reasons, outcome.figures
            self._say(_line(ROWS[row], "", outcome.reasons, outcome.figures) + ("" if outcome.reasons else f"  ({outcome.how[:160]})"))

        try_all(rows, self._folder / "hosted", self._seed, tell)

    def verdict(self) -> dict[str, Any]:
        ratios = {row: statistics.median(_ratio(*pair) for pair in pairs) for row, pairs in self.pairs.items()}
        ended = [row for row, reasons in self.reasons.items() if reasons]
        beyond = {row: some[0] for row in self.figures if (some := _beyond(ROWS[row], self.figures[row]))}
        open_run = not self._kind.members and self._kind.averaging == "mean"
        excused = {row.id for row in ROWS.values() if row.members and open_run}
        outsiders = [ratio for row, ratio in ratios.items() if not ROWS[row].let_in]
        median = statistics.median(outsiders) if outsiders else None
        slow = [row for row, ratio in ratios.items() if ratio < RATIO and row not in excused]
        few = median is not None and median < self._least_median
        return {
            "members": self._kind.members,
            "averaging": self._kind.averaging,
            "rounds_ratio": {row: round(ratio, 3) for row, ratio in ratios.items()},
            "rounds_median": round(median, 3) if outsiders else None,
            **{name: self._of_each(name) for name in ("progress_lost", "banned_after_rounds", "reported_after_rounds")},
            "ended": ended,
            "beyond": beyond,
            "broken": self.broken,
            "holds": not (slow or beyond or self.broken or few) and excused.issuperset(ended),
            "why": {row: reasons[:3] for row, reasons in self.reasons.items() if reasons},
            "figures": {row: figures for row, figures in self.figures.items() if figures},
        }

    def _of_each(self, figure: str) -> dict[str, float]:
        """The figure of each row that has it."""
        return {row: figures[figure] for row, figures in self.figures.items() if figure in figures}


def _ratio(with_: float, without: float) -> float:
    return with_ / without if without else 0.0


def _beyond(row: Row, figures: dict[str, float]) -> list[float]:
    """The figures that are above their bounds, the row's own first."""
    return [figures[name] for name, bound in row.bounds().items() if figures.get(name, 0.0) > bound]


def _line(row: Row, rounds: str, reasons: Sequence[str], figures: dict[str, float]) -> str:
    shown = "  ".join(f"{name} {value:g}" for name, value in figures.items() if name in row.bounds() or name in _SHOWN)
    return f"{row.id:20} {rounds:24} {shown}" + (f"  ENDED: {reasons[0]}" if reasons else "")


def waves_of(rows: Sequence[Row], at_once: int) -> list[list[Row]]:
    """At most `at_once` swarms at a time, the undisturbed one included. Apart from the others: the heavy rows, half as many at a time, and those of
    members, a third as many, since each swarm has more than twice as many peers."""
    waves = []
    for let_in, heavy, size in ((False, False, 1), (False, True, 2), (True, False, 3)):
        some = [row for row in rows if row.kind not in _HOSTED and (row.let_in, row.heavy) == (let_in, heavy)]
        most = max(at_once // size - 1, 1)
        count = math.ceil(len(some) / most)
        waves += [some[number::count] for number in range(count)]
    return waves


def chosen(names: str, *, everything: bool = False) -> list[Row]:
    """Named, or all: those of members only where `everything` is meant. Raises UserError."""
    if unknown := [name for name in names.split(",") if name and name not in ROWS]:
        raise UserError(f"There is no row {', '.join(unknown)}.", fix=f"There are: {', '.join(ROWS)}.")
    named = [ROWS[name] for name in names.split(",") if name]
    return named or [row for row in ROWS.values() if everything or not row.let_in]


def how_many_pairs(asked: int, minutes: float, waves: int, seconds: float, hosted: bool) -> int:
    """As many as fit into the time, and at least one."""
    left = 60 * minutes - hosted * _HOSTED_SECONDS
    return max(1, min(asked, int(left // (max(waves, 1) * (seconds + _WAVE_SECONDS)))))


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    if args.list:
        for row in ROWS.values():
            print(f"{row.id:20} {row.does}{' (only memberships end it)' if row.members else ''}")
        return 0
    members, kinds = args.members or args.all, _WITH_MEMBERS + (_HOSTED if args.all else ())
    rows = [row for row in chosen(args.rows, everything=args.all) if not members or row.kind in kinds]
    at_once = args.at_once or max(2, _SWARMS_A_CORE * len(os.sched_getaffinity(0)))
    waves, hosted = waves_of(rows, at_once), [row for row in rows if row.kind in _HOSTED]
    pairs = how_many_pairs(args.pairs, args.minutes, len(waves), args.seconds, bool(hosted))
    minutes = (pairs * len(waves) * (args.seconds + _WAVE_SECONDS) + bool(hosted) * _HOSTED_SECONDS) / 60
    say: Say = lambda text: print(text, flush=True)  # noqa: E731
    say(
        f"{len(rows)} rows; seed {args.seed}; windows of {args.seconds:g} s in {len(waves)} waves of up to {at_once} swarms; "
        f"{pairs} of the {args.pairs} pairs fit into {args.minutes:g} min: about {minutes:.0f}"
    )
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # all that was started is ended on the way out
    began = time.monotonic()
    with work_folder(args.keep) as folder:
        kind = Kind(peers=args.peers, members=members, averaging=args.averaging, clip_members=args.clip_members)
        siege = Siege(folder, seconds=args.seconds, seed=args.seed, say=say, kind=kind, least_median=MEDIAN if args.all else 0.0)
        try:
            for pair in range(pairs):
                for number, some in enumerate(waves):
                    siege.wave(pair * len(waves) + number + 1, pair, some)
            siege.hosted(hosted)
        finally:
            end_all([], seconds=0)
    told = {
        "seconds": args.seconds,
        "pairs": pairs,
        "peers": args.peers or BESIDE_STRANGERS,
        "peers_beside_members": args.peers or BESIDE_MEMBERS,
        "seed": args.seed,
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    verdict = {**siege.verdict(), **told, "about": about()}
    if args.record:
        args.record.write_text(json.dumps(verdict) + "\n", encoding="utf-8")
    say(json.dumps(verdict))
    return 0 if verdict["holds"] else 1


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="strangers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="ids with commas between them [all]")
    parser.add_argument("--all", action="store_true", help="every row: of strangers and of members, in runs for members, and at a server")
    parser.add_argument("--list", action="store_true", help="say what rows there are, and end")
    parser.add_argument("--seconds", type=float, default=180.0, help="from a stranger's arrival [180]")
    parser.add_argument("--pairs", type=int, default=3, help="N pairs of runs, with and without the attacker; their median counts [3]")
    parser.add_argument("--minutes", type=float, default=20.0, help="run fewer pairs if these take longer than N minutes [20]")
    parser.add_argument("--at_once", type=int, default=0, help="swarms at a time [5 per core]")
    parser.add_argument("--peers", type=int, default=0, help="honest peers of a swarm [2, and 4 where a member lies]")
    parser.add_argument("--members", action="store_true", help="runs for members, and the stranger is not a member; without the rows that need a server")
    parser.add_argument("--averaging", choices=("mean", "centered"), default="mean", help="the runs' [mean]")
    parser.add_argument("--clip_members", type=float, help="the runs' [that of a new run]; 0: nobody is clipped")
    parser.add_argument("--seed", type=int, default=0)
    add_record_arguments(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
