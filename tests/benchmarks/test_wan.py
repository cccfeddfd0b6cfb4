"""The arithmetic of utilisation, and one real row at a size that takes seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import wan
from benchmarks.links import Traffic
from tests import warm
from tests.warm import Warm

ROW = wan.Row("diloco", "int8", True, 2)
real = pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/dev/net/tun"), reason="needs root and /dev/net/tun")


def line(number: int, *members) -> dict:
    return {"round": number, "samples": 100 * number, "members": [list(member) for member in members]}


def test_joint_rounds_begin_with_the_first_of_all_peers_each_once():
    rounds = [line(1, ("a", 1, 10)), line(2, ("a", 2, 10), ("b", 1, 10)), line(2, ("a", 2, 10), ("b", 1, 10)), line(3, ("a", 3, 10))]
    assert [found["round"] for found in wan.joint(rounds, 2)] == [2, 3]
    assert wan.joint(rounds[:1], 2) == []


def test_utilisation_counts_committed_work_between_the_first_and_the_last_contribution():
    events = [{"event": "frozen", "number": n, "samples": 40, "time": 10.0 * n} for n in (1, 2, 3, 4)]
    rounds = [line(1, ("a", 1, 40)), line(2, ("a", 2, 40)), line(3, ("a", 4, 40))]  # the third was dropped
    assert wan.utilisation("a", events, rounds, samples_per_second=5.0) == pytest.approx(80 / 5 / 30)
    assert wan.utilisation("b", events, rounds, samples_per_second=5.0) == 0.0


def test_utilisation_of_epochs_counts_all_samples_between_them():
    events = [{"event": "epoch", "time": 5.0, "trained": 10}, {"event": "epoch", "time": 9.0, "trained": 28}]
    assert wan.epochs_utilisation(events, samples_per_second=6.0) == pytest.approx(0.75)
    assert wan.epochs_utilisation(events[:1], samples_per_second=6.0) == 0.0


def test_bytes_per_sample_are_of_the_real_model():
    found = wan.line_of(ROW, [0.9, 0.7], Traffic(50.0, 100.0, 0, 1.0, 0.0), 1000, 1000.0, whole=True)
    assert found["valid"] == "yes"
    assert found["bytes_per_sample"] == 50_000 * wan.SCALE
    assert (found["utilisation"], found["worst peer"]) == (0.8, 0.7)


@pytest.mark.parametrize(
    ("busiest", "late", "whole", "fault"),
    [(850.0, 1.0, True, "hub at 85%"), (100.0, 30.0, True, "30 ms late"), (100.0, 1.0, False, "too long")],
)
def test_a_row_that_says_nothing_of_the_peers_is_marked_invalid(busiest, late, whole, fault):
    found = wan.line_of(ROW, [0.9], Traffic(50.0, busiest, 0, late, 0.0), 1000, 1000.0, whole=whole)
    assert found["valid"].startswith("no: ") and fault in found["valid"]


def test_every_row_has_a_key_of_its_own():
    for rows in (wan.ROWS, wan.FULL_ROWS):
        keys = [row.key for row in rows]
        assert len(set(keys)) == len(keys)
    assert "diloco/int4/overlap" in [row.key for row in wan.ROWS]
    assert not [row for row in wan.FULL_ROWS if row.sync == "gradients" and row.overlap]


class Forked:
    """What `wan` asks of `subprocess`: its peers are forked, each into its network."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    @staticmethod
    def Popen(command, *, cwd, stdin, stdout, stderr):
        *within, namespace, python = command[:5]
        assert within == ["ip", "netns", "exec"] and python == sys.executable and stdout is stderr
        return Warm(command[5:], cwd, Path(stdout.name), namespace=namespace)


@pytest.mark.swarm
@pytest.mark.timeout(900)
@real
def test_a_real_row_ends_with_its_figures(monkeypatch):
    monkeypatch.setattr(wan, "subprocess", Forked)
    monkeypatch.setattr(wan, "SCALE", 500)
    monkeypatch.setattr(wan, "ROUND_SAMPLES", 6000)  # two seconds of two peers
    monkeypatch.setattr(wan, "BATCH", 150)
    monkeypatch.setattr(wan, "ROUNDS", 1)
    monkeypatch.setattr(wan, "ROW_SECONDS", 250.0)
    found = wan.measure(wan.Row("diloco", "int4", True, 2), most_megabits=10_000.0)
    assert 0 < found["worst peer"] <= found["utilisation"]
    assert found["samples"] > 0 and found["bytes_per_sample"] > 0


def test_the_peer_of_stock_hivemind_can_be_started():
    help_ = warm.run("import runpy; runpy.run_module('benchmarks.hivemind_peer', run_name='__main__')", "--help")
    assert help_.returncode == 0 and "--samples_per_second" in help_.stdout, help_.stderr
