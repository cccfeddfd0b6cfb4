"""Whether a swarm learns as much from a sample as one machine does, and how much sooner two peers are there than one.

    .venv/bin/python benchmarks/parity.py [--full]

* gradients: a round of `--sync gradients` against one process that takes the whole batch (exact_gradients.py).
* samples: real peers learn the quickstart's digits with each strategy. How many samples until 95 of 100 drawn digits are read right, over
  those that one machine needs that takes the same global batch (peers x 32), at the better of two learning rates?
* speedup: seconds until then of one peer with a batch of 32 on one core, over those of two peers with a core each; both counted from
  the tenth step, so without the programs' start.

Four peers share two cores here: of them only samples count. What was trained is judged afterwards, from the checkpoints of every 2,048
samples, so that judging takes no time from training; between two checkpoints the line is straight. Run it alone. Prints a table and, as
its last line, one JSON object.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks import common  # noqa: E402
from scripts.demo import quickstart, results, swarm_run  # noqa: E402
from scripts.demo.display import Display  # noqa: E402

WANTED = 0.95
BATCH = 32
EVERY = 2048
JUDGED_FROM = 14_336
LEARNING_RATES = (1e-3, 2e-3)
# The best simulated so far (docs/log.md); `diloco` was never the better one.
BEST = {
    "parameters": {"target_batch_size": 512, "learning_rate": 2e-3},
    "diloco": {"target_batch_size": 2048, "learning_rate": 2e-3, "outer_learning_rate": 1.0, "outer_momentum": 0.5},
}
BETTER = "parameters"


@dataclass(frozen=True)
class Run:
    """One training run; peers 0: one machine without a swarm."""

    name: str
    peers: int
    batch: int
    settings: Mapping[str, Any]
    total: int

    @property
    def round(self) -> int:
        return self.settings.get("target_batch_size", EVERY)


@dataclass(frozen=True)
class Learned:
    """Where a run came to WANTED; None where it never did."""

    run: Run
    samples: float | None
    seconds: float | None
    seen: list[tuple[int, float]] = field(default_factory=list)
    """(samples, share read right) of the checkpoints judged."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="both strategies, and one peer at both learning rates: about half an hour")
    full = parser.parse_args().full
    quickstart.quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        base = Path(folder)
        exact = {str(peers): gradients(peers, base / f"gradients-{peers}") for peers in (2, 4)}
        quickstart.prepare(base)
        runs = list(plan(full))
        train(base, runs)
        learned = judge_all(base, runs)
    report(learned, exact)


def plan(full: bool) -> Iterator[Run]:
    for strategy in BEST if full else (BETTER,):
        for peers in (2, 4):
            yield Run(f"{strategy}/{peers}", peers, BATCH, {"sync": strategy, **BEST[strategy]}, 40_960)
    for peers, total in ((1, 24_576), (2, 32_768), (4, 49_152)):
        for rate in LEARNING_RATES:
            if peers > 1 or full or rate == max(LEARNING_RATES):
                yield Run(f"one machine, batch {peers * BATCH}, rate {rate:g}", 0, peers * BATCH, {"learning_rate": rate}, total)


# ---------------------------------------------------------------- training


def train(base: Path, runs: Sequence[Run]) -> None:
    """Swarms one after the other, with the machine to themselves; so does the one peer whose seconds count; the others two at a time."""
    for run in runs:
        if run.peers:
            together(base, run)
        elif run.batch == BATCH:
            alone(base, run)
    with ThreadPoolExecutor(2) as two:
        list(two.map(lambda run: alone(base, run), [run for run in runs if not run.peers and run.batch != BATCH]))


def alone(base: Path, run: Run) -> None:
    """One process on one core, no swarm."""
    folder = base / slug(run)
    folder.mkdir()
    (folder / "run.toml").write_text(swarm_run.run_settings(swarm_run.Plan(base, total_samples=run.total, settings=run.settings)))
    flags = ["--config", folder / "run.toml", "--train_data_dir", base / "dataset", "--output_dir", folder / "peer-1", "--num_threads", 1]
    flags += ["--train_batch_size", run.batch, "--checkpointing_samples", EVERY, "--checkpoints_total_limit", 1000]
    command = [str(part) for part in (sys.executable, ROOT / "peer" / "finetune.py", *flags)]
    with (folder / "log").open("wb") as log:
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)


def together(base: Path, run: Run) -> None:
    """A dataset server and real peers on this machine; only the first one's checkpoints are kept."""
    folder = base / slug(run)
    folder.mkdir()
    for shared in ("dataset", "base"):
        (folder / shared).symlink_to(base / shared)
    display = Display()
    flags = ("--checkpointing_rounds", str(max(1, EVERY // run.round)), "--checkpoints_total_limit", "1000")
    plan = swarm_run.Plan(folder, run.peers, run.total, run.round, batch=run.batch, settings=run.settings, peer_flags=flags)
    with display, swarm_run.SwarmRun(plan, display) as swarm:
        swarm.run()


def slug(run: Run) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in run.name)


# ---------------------------------------------------------------- judging


def judge_all(base: Path, runs: Sequence[Run]) -> list[Learned]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as two:
        return list(two.map(judge, [base] * len(runs), runs))


def judge(base: Path, run: Run) -> Learned:
    """The first checkpoints' pictures until one has WANTED of them right."""
    import torch

    from peer import checkpoint
    from peer.methods import full
    from peer.models import stable_diffusion
    from peer.train import load_params
    from scripts.demo import report as pictures
    from scripts.demo.digits import Judge

    torch.set_num_threads(1)
    model = stable_diffusion.load(base / "base", torch.device("cpu"))
    params = full.Full().attach(model)
    the_judge, seen = Judge.from_real_digits(), []
    for path in checkpoint.Checkpoints(base / slug(run) / "peer-1", 1000).paths():
        samples = checkpoint.about(path)["samples"]
        if samples < JUDGED_FROM:
            continue
        load_params(params, checkpoint.read(path)["params"])
        read = the_judge.read(pictures.draw_with(model.pipeline, batch=100))
        seen.append((samples, (path / "manifest.json").stat().st_mtime, float((read == pictures.asked_digits()).mean())))
        if seen[-1][2] >= WANTED:
            break
    at = crossing([(samples, share) for samples, _, share in seen], WANTED)
    when = crossing([(moment, share) for _, moment, share in seen], WANTED)
    began = min(results.read_lines(path)[0]["time"] for path in (base / slug(run)).glob("peer-*/metrics.jsonl"))
    return Learned(run, at, when and when - began, [(samples, share) for samples, _, share in seen])


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
    alone_at = {peers: best(learned, peers * BATCH, "samples") for peers in (2, 4)}
    ratios = {one.run.name: ratio(one.samples, alone_at[one.run.peers]) for one in learned if one.run.peers}
    common.print_table([row(one, ratios.get(one.run.name)) for one in learned])
    two = next(one for one in learned if one.run.name == f"{BETTER}/2")
    speedup = ratio(best(learned, BATCH, "seconds"), two.seconds)
    common.print_result({"gradients_max_relative_difference": exact, "samples_ratio": ratios, "speedup": speedup})


def best(learned: Sequence[Learned], batch: int, what: str) -> float | None:
    """The fewest samples or seconds of one machine with this batch."""
    found = [getattr(one, what) for one in learned if not one.run.peers and one.run.batch == batch]
    return min((value for value in found if value is not None), default=None)


def ratio(above: float | None, below: float | None) -> float | None:
    return round(above / below, 3) if above and below else None


def row(one: Learned, samples_ratio: float | None) -> dict[str, Any]:
    settings = one.run.settings
    return {
        "run": one.run.name,
        "rate": settings["learning_rate"],
        "round": one.run.round if one.run.peers else "",
        "samples": "never" if one.samples is None else round(one.samples),
        "seconds": "" if one.seconds is None else round(one.seconds),
        "ratio": "" if samples_ratio is None else samples_ratio,
        "read right": " ".join(f"{share:.0%}" for _, share in one.seen),
    }


if __name__ == "__main__":
    main()
