"""Worlds with one thing in particular: what once took real processes, and no operating system is the subject of."""

import pytest

from peer import rooms
from peer.sync.engine.failpoints import FAILPOINTS
from simulation.faults import Strike
from simulation.world import Scenario, World, play

STRATEGIES = [name for name in rooms.parts("sync") if name != "none"]


# With overlap all but gradients, which cannot be moved along with a new state.
@pytest.mark.parametrize(
    ("sync", "overlap"), [*((name, False) for name in STRATEGIES), *((name, True) for name in STRATEGIES if name != "gradients")]
)
def test_two_peers_of_every_strategy_average_and_account_for_every_sample(sync, overlap):
    """Each state, committed_round and sample is checked by `simulation/checks.py` as it comes; here only that there were rounds of both."""
    outcome = play(Scenario(seed=7, peers=2, hours=1.0, rounds=8, sync=sync, overlap=overlap))
    assert not outcome.breach, outcome.breach + "\n" + "\n".join(outcome.lines[-60:])
    assert outcome.rounds >= 8 and outcome.committed > 0.8 and outcome.adopted["averaged"] >= 8


TRANSFERS = ("donor_half_way", "fetch_half_way")
"""Reached only by who hands out or takes over a whole state: states here are of one chunk, so that there is no half way."""


@pytest.mark.parametrize("action", ["kill", "stop", "peer"])
def test_a_peer_that_dies_or_stands_still_at_any_failpoint_stops_nobody_and_comes_back(action):
    """The sidecar is killed, or stopped, or both processes are killed; one point after another, the trainer's two among them."""
    points = [point for point in FAILPOINTS if point not in TRANSFERS]
    strikes = tuple(
        Strike(20.0 + 30 * at, "failpoint", 1 + at % 3, {"name": point, "action": action, "seconds": 15.0}) for at, point in enumerate(points)
    )
    outcome = play(Scenario(seed=8, peers=3, hours=(20.0 + 30 * len(points)) / 3600, strikes=strikes))
    assert not outcome.breach, outcome.breach + "\n" + "\n".join(outcome.lines[-60:])
    assert outcome.failpoints == dict.fromkeys(points, 1)


class BehindRouters(World):
    """Nobody can dial anybody, as when all peers that could be dialled were replaced."""

    def add_peer(self):
        machine = super().add_peer()
        machine.link.behind_nat = True
        return machine


def test_peers_that_nobody_can_dial_come_together_once_somebody_assists():
    outcome = BehindRouters(Scenario(seed=1, peers=3, hours=0.03)).play()
    assert not outcome.breach, outcome.breach + "\n" + "\n".join(outcome.lines[-60:])
    assert outcome.adopted["averaged"] >= 3
