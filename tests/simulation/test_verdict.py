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


def excused(met, *, before=(), end=0, final=("theirs",)):
    """Which of these stay apart by rule; met: of each peer, whom it has met. Capitals are on the run's branch, digits behind ours.

    before: the states from which the run's branch comes; end: the samples with which the run ends: that branch has 100, the others 50. final: what was reported.
    """
    machines = [Peer(name, "theirs" if name.isupper() else "behind" if name.isdigit() else "ours", met[name]) for name in met]
    commits = {branch: SimpleNamespace(samples=100 if branch == "theirs" else 50) for branch in ("theirs", "ours", "behind")}
    checks = SimpleNamespace(stands=lambda machine: machine.branch, lineage=lambda tip: [tip, *before], commits=commits, final=final)
    verdict = Verdict(SimpleNamespace(machines=machines, checks=checks, run=SimpleNamespace(total_samples=end)))
    return {machine.peer for machine in machines if machine.branch != "theirs" and verdict._apart_by_rule(machine, ["theirs"])}


def test_two_groups_stay_apart_by_rule_only_if_some_of_both_have_not_met():
    everybody = "abcABC"
    assert not excused(dict.fromkeys(everybody, everybody)), "three and three that all have met count the same, and one side moves"
    assert excused({name: "abc" if name.islower() else "ABC" for name in everybody}) == set("abc")
    assert excused({"a": "bA", "b": "a", "A": "Ba", "B": "A"}) == {"a", "b"}, "two pairs of which one each has met the other"
    assert not excused({"a": "AB", "A": "B", "B": "A"}), "it has met nobody on its branch"


def test_who_is_behind_on_the_runs_own_branch_is_never_apart_by_rule():
    """Seed 60001448 was excused at the first look: a helper far behind had taken its own descendants for another branch."""
    met = {name: "abc" if name.islower() else "ABC" for name in "abcABC"}
    assert excused(met) == set("abc") and not excused(met, before=["ours"])


def test_who_has_the_runs_last_state_follows_nobody_that_has_not():
    """Seed 60001544. Those without it stay where they are if they are more, and follow if they are not."""
    two, one = {"a": "bA", "b": "aA", "A": "ab"}, {"a": "A", "A": "a"}
    assert excused(two, end=100) == set("ab") and not excused(two, end=100, final=()) and not excused(two, end=200) and not excused(one, end=100)


def test_who_has_met_nobody_may_stay_while_no_branch_has_most_of_the_others():
    """Found by seed 60002639: two and two had parted, and a fifth that was behind had lost the only round in which others met it."""
    parted = {"a": "b", "b": "a", "A": "B1", "B": "A1"}
    assert excused({**parted, "1": ""}) == {"1", "a", "b"}, "of four others two are on either branch"
    assert "1" not in excused({**parted, "1": "", "C": "AB"}), "of five others three are there"
    assert not excused({"a": "", "A": ""}) and not excused({"1": "", "A": "B", "B": "A"}), "all others are there"
    assert not excused({"a": "", "b": "", "c": "", "A": "", "B": ""}), "half are there, and the rest stand where it does"


def test_a_peer_has_ended_for_others_once_it_waits_for_nobody():
    """Found by seed 60003002: its last words to the server took 10 s on a slow link, in which another peer started again."""
    checks = SimpleNamespace(stands=lambda machine: "last", lineage=lambda tip: ["last"])
    verdict = Verdict(SimpleNamespace(checks=checks, tip=lambda: "last", loop=SimpleNamespace(time=lambda: 56.0)))
    verdict.ends(SimpleNamespace(peer="ann"), 49.0)
    assert verdict._came_too_late(SimpleNamespace(peer="me", booted=40.0))
