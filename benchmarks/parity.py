"""Whether a swarm learns as much from a sample as one machine does, and how much sooner two peers are there than one.

    .venv/bin/python benchmarks/parity.py [--full] [--repeats N]

* gradients: a round of `--sync gradients` against one process that takes the whole batch, over 2 and 4 peers (exact_gradients.py).
* samples: real peers learn the quickstart's digits. How many samples until 95 % of the drawn digits are read right, over those that one
  machine needs that takes the same global batch (peers times their batch), at the better of two learning rates?
* speedup: seconds until then of one peer over those of two, a core each: the same program with the same server, which has no core of its
  own and takes its time from theirs, the one peer at the batch and learning rate that bring it there soonest; counted from the first logged
  step, so without the programs' start. Beside it speedup_over_no_swarm: the same of one process that trains alone from the folder,
  which leases nothing and holds no rounds.

What is judged is what a run would export: a moving average of the weights (`--use_ema`) over about 2,048 samples, the one machine's as well
as the swarm's. A state at a constant learning rate is noise about it that a swarm averages away at its end, and one machine never.
Judged afterwards, so that judging takes no time from training, from one peer's checkpoints of about every 1,024 samples: 200 digits, drawn
in 10 steps each; between two looks the line is straight. Two seeds may differ by a fifth (benchmarks/records/log.md): a ratio from one
repeat is a rough one. Without `--full` two peers only, some 12 minutes. Four peers share two cores here: of them only samples count. Run it
alone. Prints a table and, as its last line, one JSON object; its figures are of the medians over the repeats.

With `--optimizer` two peers of 32 and one machine of 64 train with another one than AdamW, at its share of AdamW's rates (swarm/run/optimizer.py).
One that averages its steps is judged as it is, without `--use_ema`. Those that learn more slowly need a larger `--total` to come to 95 %.
"""

import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts.demo import quickstart, results, swarm_run
from scripts.demo import report as pictures
from scripts.demo.display import Display
from swarm.run.optimizer import OPTIMIZERS, default_rate

WANTED, NEAR = 0.95, 0.8
EVERY, NEVER = 1024, 1_000_000_000
AVERAGED = 2048
"""Samples over which the weights that are judged are averaged; the last of them have a weight of 63 %."""
PER_DIGIT, DRAWING_STEPS = 20, 10
SMALL_ROUNDS = ({2: 32, 4: 16}, {"target_batch_size": 448, "learning_rate": 6e-3})
HOME_ROUNDS = ({2: 128, 4: 64}, {"target_batch_size": 2048, "learning_rate": 8e-3})
"""Each peer's batch, by the number of peers, and the run. With small rounds two are there soonest; 2,048 samples a round are what a home
line carries (wan.py), and a run of some twenty rounds needs large batches. The best simulated so far (benchmarks/records/log.md)."""
SWARMS = {
    "small-rounds": ("parameters", *SMALL_ROUNDS),
    "parameters": ("parameters", *HOME_ROUNDS),
    "diloco": ("diloco", HOME_ROUNDS[0], {**HOME_ROUNDS[1], "outer_learning_rate": 1.0, "outer_momentum": 0.2}),
}
LEARNING_RATES = {64: (4e-3, 6e-3), 256: (4e-3, 8e-3)}
"""The one machine's, by its batch."""
ONE_PEER = 64, 6e-3
"""The one peer's batch and learning rate: with 32 at 3e-3 it took 79, 85 and 83 s where it takes 65, 61 and 66 s so (ae8ea03)."""
BETA2 = 0.99
WARM_UP = {64: 2048, 256: 8192}
"""Samples over which the learning rate rises, by the global batch. With it large batches bear higher rates: 64 need 18 k samples where 32
need 16 k, and 256 need 43 k samples instead of 64 k."""
TOTALS = {64: 22_528, 256: 49_152}
"""No run takes more samples than this, by its global batch."""


@dataclass(frozen=True)
class Run:
    """One training run; peers 0: one machine without a swarm, 1: a swarm of one."""

    name: str
    peers: int
    batch: int
    """Of each peer."""
    settings: Mapping[str, Any]
    wanted: float = WANTED
    """The share of digits read right that counts."""
    longest: int = 0
    """Samples that it takes at most; 0: what TOTALS says."""

    @property
    def global_batch(self) -> int:
        return max(1, self.peers) * self.batch

    @property
    def total(self) -> int:
        return self.longest or TOTALS[self.global_batch]

    @property
    def round(self) -> int:
        return self.settings["target_batch_size"]

    @property
    def step(self) -> int:
        """Samples of a global step: one machine's is its batch, a swarm's a round."""
        return self.round if self.peers else self.batch

    def flags(self) -> tuple[str, ...]:
        """Of every peer: by itself each would write a checkpoint after each round, which here is a second."""
        averaged = (
            ()
            if OPTIMIZERS[self.settings.get("optimizer", "adamw")].averages
            else ("--use_ema", "--ema_decay", str(math.exp(-self.step / AVERAGED)))
        )
        return *averaged, "--checkpointing_steps", str(NEVER)

    def saving(self) -> tuple[str, ...]:
        """Of the peer whose checkpoints are judged."""
        return "--checkpointing_steps", str(max(1, EVERY // self.step)), "--checkpoints_total_limit", "1000"


@dataclass(frozen=True)
class Learned:
    """Where a run came to the share that was wanted; None where it never did."""

    run: Run
    samples: float | None
    seconds: float | None
    seen: list[tuple[int, float]] = field(default_factory=list)
    """(samples, share read right) of the checkpoints judged."""


def main() -> None:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--full", action="store_true", help="four peers, too: about half an hour")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="train everything N times, each time with another seed [1]")
    parser.add_argument("--only", choices=tuple(SWARMS), help="these rounds alone; speedup is of the small ones")
    parser.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        help="another one than AdamW, at its share of AdamW's rates: samples of small rounds alone",
    )
    parser.add_argument(
        "--wanted", type=float, default=WANTED, metavar="SHARE", help=f"the share of digits read right that counts [{WANTED}]"
    )
    parser.add_argument(
        "--total", type=int, default=0, metavar="SAMPLES", help="train each run on N samples [as many as AdamW needs, and some]"
    )
    args = parser.parse_args()
    quickstart.quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        base = Path(folder)
        exact = {str(peers): gradients(peers, base / f"gradients-{peers}") for peers in (2, 4) if not args.optimizer}
        quickstart.prepare(base)
        runs = [run for repeat in range(args.repeats) for run in plan(args.full, repeat, args.only)]
        if args.optimizer:
            runs = [stepped_by(args.optimizer, run) for run in runs if run.global_batch == 64 and run.peers != 1]
        runs = [replace(run, wanted=args.wanted, longest=args.total) for run in runs]
        train(base, runs)
        learned = judge_all(base, runs)
    report(learned, exact)


def plan(full: bool, repeat: int = 0, only: str | None = None) -> Iterator[Run]:
    """only: the rounds to try."""
    seed, batches, names = 42 + repeat, set(), [only] if only else list(SWARMS)
    for name in names:
        strategy, batch_of, settings = SWARMS[name]
        for peers in (2, 4) if full else (2,):
            yield run_of(f"{name}/{peers}", peers, batch_of[peers], seed, sync=strategy, **settings)
            batches.add(peers * batch_of[peers])
    if "small-rounds" in names:
        strategy, _, settings = SWARMS["small-rounds"]
        batch, rate = ONE_PEER
        yield run_of(f"one peer, batch {batch}", 1, batch, seed, sync=strategy, **{**settings, "learning_rate": rate})
    for batch in sorted(batches):
        for rate in LEARNING_RATES[batch]:
            yield run_of(f"one machine, batch {batch}, rate {rate:g}", 0, batch, seed, learning_rate=rate, target_batch_size=EVERY)


def stepped_by(optimizer: str, run: Run) -> Run:
    facts, settings = OPTIMIZERS[optimizer], {**run.settings, "optimizer": optimizer}
    settings["learning_rate"] = default_rate(optimizer, settings["learning_rate"])
    if "adam_beta2" not in facts.reads:
        del settings["adam_beta2"]
    return replace(run, settings=settings)


def run_of(name: str, peers: int, batch: int, seed: int, **settings: Any) -> Run:
    return Run(name, peers, batch, {"seed": seed, "adam_beta2": BETA2, "lr_warmup_samples": WARM_UP[max(1, peers) * batch], **settings})


# ---------------------------------------------------------------- training


def train(base: Path, runs: Sequence[Run]) -> None:
    """Swarms have the machine to themselves, one after the other. Of one machine's runs there are always two, a core each as well."""
    for run in runs:
        if run.peers:
            together(base, run)
    with ThreadPoolExecutor(2) as two:
        list(two.map(lambda run: alone(base, run), [run for run in runs if not run.peers]))


def alone(base: Path, run: Run) -> None:
    """One process on one core, no swarm."""
    folder = base / slug(run)
    folder.mkdir()
    (folder / "run.toml").write_text(swarm_run.run_settings(swarm_run.Plan(base, total_samples=run.total, settings=run.settings)))
    flags = ["--config", folder / "run.toml", "--train_data_dir", base / "dataset", "--output_dir", folder / "peer-1", "--num_threads", 1]
    flags += ["--train_batch_size", run.batch, *run.flags(), *run.saving()]
    command = [str(part) for part in (sys.executable, common.ROOT / "peer" / "finetune.py", *flags)]
    with (folder / "log").open("wb") as log:
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)


def together(base: Path, run: Run) -> None:
    """A dataset server and real peers on this machine, the first of which writes checkpoints as the one machine does."""
    folder = base / slug(run)
    folder.mkdir()
    for shared in ("dataset", "base"):
        (folder / shared).symlink_to(base / shared)
    display = Display()
    plan = swarm_run.Plan(
        folder, run.peers, run.total, run.round, batch=run.batch, settings=run.settings, peer_flags=run.flags(),
        first_peer_flags=run.saving(), core_each=run.peers <= 2,
    )  # fmt: skip
    with on_cores(run.peers), display, swarm_run.SwarmRun(plan, display) as swarm:
        swarm.run()


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """This process, and all that it starts, on no more than `count` cores."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(usual)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)


def slug(run: Run) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in run.name) + f"-{run.settings['seed']}"


# ---------------------------------------------------------------- judging


def judge_all(base: Path, runs: Sequence[Run]) -> list[Learned]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as two:
        return list(two.map(judge, [base] * len(runs), runs))


def judge(base: Path, run: Run) -> Learned:
    """Looks at the first peer's checkpoints until one has enough of the digits right; at every second one while that is far."""
    import torch

    from peer.loop.train import load_result
    from peer.methods import full
    from peer.models import stable_diffusion
    from peer.results import checkpoint
    from scripts.demo.digits import Judge
    from swarm.run_config import RunConfig

    torch.set_num_threads(1)
    config = RunConfig()
    model = stable_diffusion.load(base / "base", torch.device("cpu"), config)
    params = full.build(config).attach(model)
    the_judge, seen, due = Judge.from_real_digits(), [], TOTALS[run.global_batch] * 5 // 8
    for path in checkpoint.Checkpoints(base / slug(run) / "peer-1", 1000).paths():
        samples = checkpoint.about(path)["samples"]
        if samples < due:
            continue
        load_result(params, checkpoint.read(path))
        share = read_right(model.pipeline, the_judge)
        seen.append((samples, (path / "manifest.json").stat().st_mtime, share))
        due = next_look(samples, share)
        if share >= run.wanted:
            break
    at = crossing([(samples, share) for samples, _, share in seen], run.wanted)
    when = crossing([(moment, share) for _, moment, share in seen], run.wanted)
    began = min(results.read_lines(path)[0]["time"] for path in (base / slug(run)).glob("peer-*/metrics.jsonl"))
    return Learned(run, at, when and when - began, [(samples, share) for samples, _, share in seen])


def next_look(samples: int, share: float) -> int:
    """When to look again; a quarter of EVERY less, for peers' rounds do not end at equal counts."""
    return samples + (EVERY if share >= NEAR else 2 * EVERY) - EVERY // 4


def read_right(pipeline: Any, the_judge: Any) -> float:
    """The share of drawn digits that the judge reads as the digit asked for; every call starts from the same noise."""
    drawn = pictures.draw_with(pipeline, per_digit=PER_DIGIT, steps=DRAWING_STEPS, batch=100)
    return float((the_judge.read(drawn) == pictures.asked_digits(PER_DIGIT)).mean())


def crossing(points: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """Where the line through the points (x, y) first comes to y = wanted; None where it does not. The first point may be there already."""
    before: tuple[float, float] | None = None
    for x, y in points:
        if y >= wanted:
            return x if before is None else before[0] + (x - before[0]) * (wanted - before[1]) / (y - before[1])
        before = x, y
    return None


# ---------------------------------------------------------------- the figures


def gradients(peers: int, folder: Path) -> float:
    from benchmarks.exact_gradients import max_relative_difference

    return max_relative_difference(peers, folder)


def report(learned: Sequence[Learned], exact: Mapping[str, float]) -> None:
    for peers, found in exact.items():
        print(f"gradients, {peers} peers and one more from round 10 on: parameters differ by {found:.1e} after 20 rounds")
    usual = medians(learned)
    ratios = {one.run.name: ratio(one.samples, best(usual, "samples", 0, one.run.global_batch)) for one in usual if one.run.peers > 1}
    common.print_table([row(one, ratios.get(one.run.name)) for one in learned])
    one_machine, one_peer = (best(usual, "seconds", peers) for peers in (0, 1))
    two_peers = min((one.seconds for one in usual if one.run.peers == 2 and one.seconds), default=None)
    common.print_result({
        "gradients_max_relative_difference": exact,
        "samples_ratio": ratios,
        "speedup": ratio(one_peer, two_peers),
        "speedup_over_no_swarm": ratio(one_machine, two_peers),
    })  # fmt: skip


def medians(learned: Sequence[Learned]) -> list[Learned]:
    """One for each name, over the repeats; a run that never came there took longest."""
    found = []
    for name in dict.fromkeys(one.run.name for one in learned):
        same = [one for one in learned if one.run.name == name]
        samples, seconds = (statistics.median(getattr(one, what) or math.inf for one in same) for what in ("samples", "seconds"))
        found.append(Learned(same[0].run, samples if samples < math.inf else None, seconds if seconds < math.inf else None))
    return found


def best(learned: Sequence[Learned], what: str, peers: int, batch: int | None = None) -> float | None:
    """The fewest samples or seconds of one machine (peers 0) or one peer (1), with this batch or any."""
    found = [getattr(one, what) for one in learned if one.run.peers == peers and batch in (None, one.run.batch)]
    return min((value for value in found if value is not None), default=None)


def ratio(above: float | None, below: float | None) -> float | None:
    return round(above / below, 3) if above and below else None


def row(one: Learned, samples_ratio: float | None) -> dict[str, Any]:
    settings = one.run.settings
    return {
        "run": one.run.name,
        "rate": settings["learning_rate"],
        "batch": one.run.batch,
        "seed": settings["seed"],
        "round": one.run.round if one.run.peers else "",
        "samples": "never" if one.samples is None else round(one.samples),
        "seconds": "" if one.seconds is None else round(one.seconds),
        "ratio": "" if samples_ratio is None else samples_ratio,
        "read right": " ".join(f"{share:.0%}" for _, share in one.seen[-6:]),
    }


if __name__ == "__main__":
    main()
