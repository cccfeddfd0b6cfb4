"""Peers whose compute is a sleep: what they write of their work adds up."""

import json
import os
import subprocess
import sys
from collections import Counter

from benchmarks.sleeper import toy_params
from tests.conftest import ROOT


def start(folder, *flags):
    command = [
        sys.executable,
        "-m",
        "benchmarks.sleeper",
        "--output_dir",
        folder,
        "--train_batch_size",
        "4",
        "--samples_per_second",
        "200",
        *flags,
    ]
    return subprocess.Popen(
        [str(part) for part in command], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )


def work(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "work.jsonl").read_text().splitlines()]


def check_sums(events: list[dict]) -> Counter:
    """Every sample trained is final or dropped, and every contribution frozen came to one of the two ends."""
    sums = Counter()
    for event in events:
        sums[event["event"]] += event.get("samples", 0)
    assert sums["final"] + sums["dropped"] == events[-1]["trained"]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    return sums


def test_toy_parameters_are_as_many_as_asked_and_equal_at_all_peers():
    one, two = toy_params(100_000), toy_params(100_000)
    assert 99_000 < sum(parameter.numel() for parameter in one.values()) <= 100_007
    assert all(one[name].equal(two[name]) for name in one)


def test_a_sleeper_alone_counts_every_sample(tmp_path):
    with start(tmp_path / "one", "--sync", "none", "--target_batch_size", "16", "--total_samples", "64") as process:
        process.communicate(timeout=240)
    assert process.returncode == 0
    assert check_sums(work(tmp_path / "one"))["final"] == 64
