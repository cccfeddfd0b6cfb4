"""Worlds with one thing in particular: what once took real processes, and no operating system is the subject of."""

import pytest

from peer import rooms
from peer.sync.engine.failpoints import FAILPOINTS
from simulation.faults import Strike
from simulation.world import Scenario, World, play
from swarm.bans import sign_word

STRATEGIES = [name for name in rooms.parts("sync") if name != "none"]


# With overlap all but gradients, which cannot be moved along with a new state.
@pytest.mark.parametrize(
    ("sync", "overlap"), [*((name, False) for name in STRATEGIES), *((name, True) for name in STRATEGIES if name != "gradients")]
)
def test_two_peers_of_every_strategy_average_and_account_for_every_sample(sync, overlap):
    """Each state, committed_round and sample is checked by `simulation/checks.py` as it comes; here only that there were rounds of both."""
    outcome = play(Scenario(seed=7, peers=2, hours=1.0, rounds=8, sync=sync, overlap=overlap))  # two of about one speed
    assert not outcome.breach, outcome.breach + "\n" + "\n".join(outcome.lines[-60:])
    assert outcome.rounds >= 8 and outcome.committed > 0.8 and outcome.adopted["averaged"] >= 8


TRANSFERS = ("donor_half_way", "fetch_half_way")
"""Reached only by who hands out or takes over a whole state: states here are of one chunk, so that there is no half way."""


@pytest.mark.parametrize("action", ["kill", "stop", "peer"])
def test_a_peer_that_dies_or_stands_still_at_any_failpoint_stops_nobody_and_comes_back(action):
    """The sidecar is killed, or stopped, or both processes are killed; one point after another, the trainer's two among them."""
    points = [point for point in FAILPOINTS if point not in TRANSFERS]
    strikes = tuple(
        Strike(20.0 + 60 * at, "failpoint", 1 + at % 3, {"name": point, "action": action, "seconds": 30.0}) for at, point in enumerate(points)
    )
    outcome = play(Scenario(seed=8, peers=3, hours=(20.0 + 60 * len(points)) / 3600, strikes=strikes))
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


class Judged(World):
    """A minute after its begin the host bans a peer, which its owner does not start again."""

    def __init__(self, scenario):
        super().__init__(scenario)
        self.later(60.0, self.judge)
        self.ended = ""

    def judge(self):
        self.bad = self.machines[1]
        self.server.bans.hear([sign_word(self.server.dataset.key, self.run, self.bad.peer, banned=True, reason="it lies", clock=self.loop.time)])

    def failed(self, machine, error):
        if machine is not self.bad:
            return super().failed(machine, error)
        self.ended = error.message
        machine.kill()
        self.machines.remove(machine)
        self.gone.append(machine)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_peer_that_the_host_bans_ends_with_the_reason_and_the_others_go_on(seed):
    """It hears so from the server or from a peer, whichever comes first; what it had leased is trained by others, and every sample is accounted for."""
    world = Judged(Scenario(seed=seed, peers=4, hours=0.1))
    outcome = world.play()
    assert not outcome.breach, outcome.breach + "\n" + "\n".join(outcome.lines[-60:])
    assert "banned this peer: it lies" in world.ended
    lineage = world.checks.lineage(world._tip())[:3]
    assert all(world.bad.peer not in {peer for peer, *_ in world.checks.commits[digest].members} for digest in lineage)
