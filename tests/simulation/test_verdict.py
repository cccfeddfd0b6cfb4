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
