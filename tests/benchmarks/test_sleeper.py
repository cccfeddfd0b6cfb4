"""Peers whose compute is a sleep: what they write of their work adds up."""

import json
from collections import Counter

from benchmarks.sleeper import toy_params
from tests.conftest import ROOT
from tests.warm import Warm


def start(folder, *flags):
    words = ["-m", "benchmarks.sleeper", "--output_dir", folder, "--train_batch_size", 4, "--samples_per_second", 200, *flags]
    return Warm(words, ROOT, folder.with_suffix(".log"), sidecars=0)


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
    assert start(tmp_path / "one", "--sync", "none", "--target_batch_size", "16", "--total_samples", "64").wait(240) == 0
    assert check_sums(work(tmp_path / "one"))["final"] == 64
