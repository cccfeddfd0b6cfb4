"""benchmarks/cpu.py: what it compares on which machine, and what it says when a process of it fails."""

import sys

import pytest

from benchmarks import cpu
from swarm.errors import UserError


def test_what_cannot_be_compared_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(cpu, "library", lambda patterns: "")
    reasons = {comparison.name: comparison.why_not for comparison in cpu.comparisons(1, "29 M", "", free_bytes=0)}
    assert {name for name, why_not in reasons.items() if not why_not} == {"fp32 -> bf16, 29 M", "fp32 -> bf16, 1 M"}
    assert reasons["fp32 -> bf16, 446 M"] == "there is less than 18 GiB of free memory"
    assert reasons["malloc -> tcmalloc"] == "libtcmalloc is not installed"
    monkeypatch.setattr(cpu, "library", lambda patterns: "/lib/libtcmalloc.so.4")
    assert not any(comparison.why_not for comparison in cpu.comparisons(2, "29 M", sys.executable, free_bytes=32 << 30))


def test_ranks_that_are_compared_with_one_share_its_cores_and_batch():
    (ranked,) = (one for one in cpu.comparisons(8, "29 M", "", free_bytes=0) if one.after.ranks > 1)
    assert ranked.after.ranks * ranked.after.threads == ranked.before.threads == 8
    assert ranked.after.ranks * ranked.after.batch == ranked.before.batch


def test_turns_begin_with_one_way_and_then_with_the_other(monkeypatch):
    asked = []

    class Workers:
        def __init__(self, setting):
            self.setting = setting

        def seconds_of(self, steps):
            asked.append((self.setting, steps))
            return {"before": 2.0, "after": 1.0}[self.setting]

        def close(self):
            asked.append((self.setting, "closed"))

    monkeypatch.setattr(cpu, "Workers", Workers)
    assert cpu.compare(cpu.Comparison("", "before", "after"), repeats=2, steps=3) == [(2.0, 1.0)] * 2
    assert asked[2:6] == [("after", 3), ("before", 3), ("before", 3), ("after", 3)] and {steps for _, steps in asked[:2]} == {1}
    assert asked[6:] == [("before", "closed"), ("after", "closed")]


def test_a_process_that_fails_is_an_error_with_its_last_words():
    workers = cpu.Workers(cpu.Setting(1, size="no such size"))
    try:
        with pytest.raises(UserError, match=r"A process of the benchmark failed: (.|\n)*KeyError: 'no such size'"):
            workers.seconds_of(1)
    finally:
        workers.close()
