"""What is said of a world once its last fault is over."""

from types import SimpleNamespace

import pytest

from simulation.verdict import Verdict


@pytest.mark.parametrize(("ended", "too_late"), [({}, False), ({"me": 90.0}, False), ({"ann": 49.0}, True), ({"ann": 49.0, "bob": 50.0}, False)])
def test_who_comes_back_when_all_others_have_ended_may_end_short_of_the_runs_end(ended, too_late):
    """Found by seed 31000478: a peer on a slow machine that started again, for its state was discarded, 6 s after the others had ended."""
    verdict = Verdict(SimpleNamespace())
    verdict._ended = ended
    assert verdict._came_too_late(SimpleNamespace(peer="me", booted=40.0)) is too_late


class Peer:
    def __init__(self, name, branch, met):
        self.peer, self.branch, self._met = name, branch, met

    def met(self):
        return self._met


def excused(met):
    """Which of these stay apart by rule; met: of each peer, whom it has met. Capitals are on the run's branch."""
    machines = [Peer(name, "theirs" if name.isupper() else "ours", met[name]) for name in met]
    verdict = Verdict(SimpleNamespace(machines=machines, checks=SimpleNamespace(stands=lambda machine: machine.branch)))
    return {machine.peer for machine in machines if machine.branch == "ours" and verdict._apart_by_rule(machine, ["theirs"])}


def test_two_groups_stay_apart_by_rule_only_if_some_of_both_have_not_met():
    everybody = "abcABC"
    assert not excused(dict.fromkeys(everybody, everybody)), "three and three that all have met count the same, and one side moves"
    assert excused({name: "abc" if name.islower() else "ABC" for name in everybody}) == set("abc")
    assert excused({"a": "bA", "b": "a", "A": "Ba", "B": "A"}) == {"a", "b"}, "two pairs of which one each has met the other"
    assert not excused({"a": "AB", "A": "B", "B": "A"}), "it has met nobody on its branch"
