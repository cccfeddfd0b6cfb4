"""Worlds with one thing in particular: what once took real processes, and no operating system is the subject of."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from peer.sync.engine.failpoints import FAILPOINTS
from peer.sync.engine.net.link import measure_link
from peer.sync.engine.net.streams import PeerLost, Streams
from peer.sync.engine.trainer.local_work import LocalWork
from peer.sync.engine.trainer.sidecar_process import CLOSE_SECONDS
from scripts.attacks.rounds import Reducer
from simulation.campaign import KINDS
from simulation.faults import Strike, parse_strikes
from simulation.machine import Process
from simulation.network import Host, Link
from simulation.records import SimNode
from simulation.world import Scenario, World, play
from swarm.bans import sign_word
from swarm.members import sign_membership
from tests.sources import parts

STRATEGIES = [name for name in parts("sync") if name != "none"]


def assert_holds(outcome):
    assert not outcome.breach, outcome.breach + "\n" + "\n".join(outcome.lines[-60:])


# With overlap all but gradients, which cannot be moved along with a new state.
@pytest.mark.parametrize(
    ("sync", "overlap"), [*((name, False) for name in STRATEGIES), *((name, True) for name in STRATEGIES if name != "gradients")]
)
def test_two_peers_of_every_strategy_average_and_account_for_every_sample(sync, overlap):
    """Each state, committed_round and sample is checked by `simulation/checks.py` as it comes; here only that there were rounds of both."""
    outcome = play(Scenario(seed=7, peers=2, hours=1.0, rounds=8, sync=sync, overlap=overlap))  # two of about one speed
    assert_holds(outcome)
    assert outcome.rounds >= 8 and outcome.committed > 0.8 and outcome.adopted["averaged"] >= 8


def test_steps_that_break_off_half_way_cost_what_is_in_no_contribution_and_no_sample(monkeypatch):
    undo, frozen = LocalWork.undo, []
    monkeypatch.setattr(LocalWork, "undo", lambda work: (frozen.append(work.frozen is not None), undo(work))[1])
    outcome = play(Scenario(seed=9, peers=2, hours=0.2, rounds=6, wire="int4", overlap=True, broken_steps=0.2))
    assert_holds(outcome)
    assert outcome.rounds >= 6 and outcome.committed > 0.8 and {*frozen} == {True, False}


TRANSFERS = ("donor_half_way", "fetch_half_way")
"""Reached only by who hands out or takes over a whole state of several chunks: one of a single chunk has no half way."""


@pytest.mark.parametrize("action", ["kill", "stop", "peer"])
def test_a_peer_that_dies_or_stands_still_at_any_failpoint_stops_nobody_and_comes_back(action):
    """The sidecar is killed, or stopped, or both processes are killed; one point after another, the trainer's two among them."""
    points = [point for point in FAILPOINTS if point not in TRANSFERS]
    strikes = tuple(
        Strike(20.0 + 32 * at, "failpoint", 1 + at % 3, {"name": point, "action": action, "seconds": 25.0}) for at, point in enumerate(points)
    )  # away for longer than a record lives, 20 s
    outcome = play(Scenario(seed=9, peers=3, hours=(20.0 + 32 * len(points)) / 3600, step_seconds=(2.0, 2.0, 2.0), strikes=strikes))
    assert_holds(outcome)
    assert outcome.failpoints == dict.fromkeys(points, 1)


def test_a_state_of_several_chunks_comes_although_who_takes_it_and_who_gives_it_die_half_way():
    strikes = "guests@10/0(peers=1,seconds=20);failpoint@10.1/2(name=fetch_half_way,action=kill,seconds=20)"
    strikes += ";guests@35/0(peers=1,seconds=15);failpoint@35.1/1(name=donor_half_way,action=kill,seconds=15)"
    outcome = play(Scenario(seed=2, peers=1, hours=0.014, chunks=2, wire="int4", strikes=parse_strikes(strikes)))
    assert_holds(outcome)
    assert outcome.failpoints == dict.fromkeys(TRANSFERS, 1)


def test_guests_follow_those_who_were_there_and_leave_in_order():
    """Six that come at once to three are more than these, and have met nobody: they made a branch of their own, which was lost with them."""
    world = World(Scenario(10, peers=3, hours=0.02, strikes=parse_strikes("guests@30/0(peers=6,seconds=30)")))
    outcome = world.play()
    assert_holds(outcome)
    assert len(world.gone) == 6 and all(guest.over for guest in world.gone)
    assert outcome.withdrawn == 0 and outcome.committed > 0.95


@pytest.mark.parametrize("back", [False, True])
def test_a_crowd_goes_on_from_the_state_of_those_who_all_left_as_it_came(back):
    """They fetch it while its makers are killed 1.5 s apart, some of them beside the last of these. Makers that come back have met none of them,
    and may stay on a branch of their own: the next test but one."""
    world = World(Scenario(11, peers=3, hours=0.03, strikes=parse_strikes(f"crowd@40/0(peers=3,apart=1.5,seconds=30,back={back})")))
    outcome = world.play()
    assert_holds(outcome)
    makers, crowd = [({machine.peer for machine in world.machines + world.gone if (machine.number <= 3) is there}) for there in (True, False)]
    assert {machine.peer for machine in world.gone} == (set() if back else makers) and len(crowd) == 3
    members = [{peer for peer, *_ in world.checks.commits[digest].members} for digest in reversed(world.checks.lineage(world.tip()))]
    assert members[0] <= makers and crowd <= members[-1] and crowd in members
    assert back or not (outcome.withdrawn or outcome.apart)


def test_three_and_three_that_were_cut_off_from_each_other_come_together():
    """All have met each other, so that both sides count the same: the one that moves is told by figures that are equal everywhere."""
    outcome = play(Scenario(1, peers=6, hours=0.025, strikes=parse_strikes("partition@40/0(peers=1+2+3,seconds=40)")))
    assert_holds(outcome)
    assert outcome.withdrawn and not outcome.apart


def test_in_a_run_for_members_the_server_brings_two_groups_together_that_never_met():
    """Three made the newest state and were killed; three newcomers went on from it. In an open run they stay apart."""
    scenario = Scenario(7, peers=3, hours=0.03, strikes=parse_strikes("crowd@40/0(peers=3,apart=1.5,seconds=30,back=True)"))
    apart, together = play(scenario), play(replace(scenario, members=True))
    assert_holds(apart)
    assert_holds(together)
    assert apart.apart == 3 and together.apart == 0 and together.withdrawn


class Hangs(World):
    """Each sidecar of a guest hangs as soon as it is told to end."""

    def __init__(self, scenario):
        super().__init__(scenario)
        said, self.hung = self.checks.said, {}

        def hang(machine, kind, values, buffers):
            said(machine, kind, values, buffers)
            if kind == "close" and machine.number > scenario.peers:
                machine.sidecar.stop()
                self.hung[machine] = self.loop.time()

        self.checks.said = hang
        ends = self.verdict.ends

        def ended(machine, waited_until):
            self.hung[machine] = self.loop.time() - self.hung[machine]
            ends(machine, waited_until)

        self.verdict.ends = ended


def test_a_peer_whose_sidecar_hangs_as_it_leaves_kills_it_and_ends():
    world = Hangs(Scenario(10, peers=2, hours=0.02, strikes=parse_strikes("guests@20/0(peers=1,seconds=30)")))
    outcome = world.play()
    assert_holds(outcome)
    (guest,) = world.gone
    assert guest.over and CLOSE_SECONDS <= world.hung[guest] < CLOSE_SECONDS + 1
    assert any("the swarm process did not end by itself" in line for line in outcome.lines)


class Measures(World):
    """Somebody who does not take part measures the link of the first peer three times, the third time after a minute."""

    def __init__(self, scenario):
        super().__init__(scenario)
        self.found, self.process = [], Process(SimpleNamespace(short="asker", world=self), "asker")
        self.later(20.0, lambda: self.process.spawn(self.measure()))

    async def measure(self):
        host = Host("Qmasker", Link(100.0, 100.0, 0.01), owner=self.process)
        self.network.hosts[host.peer] = host
        streams = Streams(SimNode(self.network, self.records, host, self.server.wall))
        for pause in (0.0, 60.0, 0.0):
            try:
                self.found.append(await measure_link(streams, self.machines[0].peer))
            except PeerLost as error:
                self.found.append(str(error))
            await asyncio.sleep(pause)


def test_a_peers_link_may_be_measured_again_after_a_virtual_minute():
    world = Measures(Scenario(2, peers=2, hours=0.04, faults=()))
    assert_holds(world.play())
    first, refused, again = world.found
    assert first.up > 0 and "others have measured" in refused and again.up > 0


class BehindRouters(World):
    """Nobody can dial anybody, as when all peers that could be dialled were replaced."""

    def add_peer(self):
        machine = super().add_peer()
        machine.link.behind_nat = True
        return machine


def test_peers_that_nobody_can_dial_come_together_once_somebody_assists():
    outcome = BehindRouters(Scenario(seed=1, peers=3, hours=0.015)).play()
    assert_holds(outcome)
    assert outcome.adopted["averaged"] >= 3


def test_assistants_that_were_cut_off_together_follow_who_went_on():
    """One trains, and two that assist kept each other on the state on which a minute's partition had found them."""
    outcome = play(Scenario(3, peers=1, assistants=2, hours=0.03, strikes=parse_strikes("partition@40/0(peers=2+3,seconds=60)")))
    assert_holds(outcome)
    assert outcome.withdrawn == outcome.apart == 0 and outcome.rounds > 50


def test_a_gap_in_what_the_server_knows_is_closed_by_those_who_come_back():
    world = World(Scenario(5, peers=1, hours=0.03, strikes=parse_strikes("relief@30/0(rounds=12,seconds=20)")))
    outcome, book = world.play(), world.server.book
    assert_holds(outcome)
    told = [state.round for state in book.tree]  # in the order in which the server heard of them
    late = [number for at, number in enumerate(told) if number < max(told[: at + 1])]
    assert late and all(contribution.counted for contribution in book._contributions.values() if contribution.number <= late[0])


def test_a_run_ends_for_all_who_are_there_and_for_who_comes_later():
    world = World(Scenario(3, peers=3, hours=0.2, total_samples=120, strikes=parse_strikes("extend@20/0(rounds=2)"), assistants=1))
    outcome = world.play()
    assert_holds(outcome)
    assert all(machine.over for machine in world.machines[:4]) and 120 + 2 * 12 == world.server.end.total <= world.server.book.counted_samples
    assert "is over" in world.machines[4].failure.message


@pytest.mark.parametrize("how", ["bit", "line", "end"])
def test_a_damaged_state_is_passed_over_and_the_one_before_it_goes_on(how):
    outcome = play(Scenario(2, peers=1, hours=0.02, strikes=parse_strikes(f"rot@30/1(what=.state,how={how},seconds=1)")))
    assert_holds(outcome)
    assert any("ignored samples-" in line for line in outcome.lines)


@pytest.mark.parametrize("then", [";rot@45/1(what=/bans.json,how=end,seconds=1)", ";server@30.2/0(seconds=30)"])
def test_what_the_host_discards_is_in_no_later_state(then):
    """In the first row all hear of it at once, and what the server noted of it is damaged later."""
    world = World(Scenario(4, peers=3, hours=0.02, assistants=1, step_seconds=(1.0, 1.0, 1.0), strikes=parse_strikes(f"discard@30/0{then}")))
    outcome = world.play()
    assert_holds(outcome)
    (forged,) = world.server.bans.discarded
    assert forged not in world.checks.lineage(world.tip()) and world.server.book.tree.get(forged) is None


class Judged(World):
    """Half a minute after its begin the host bans a peer, which its owner does not start again."""

    def __init__(self, scenario):
        super().__init__(scenario)
        self.later(30.0, self.judge)
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
    world = Judged(Scenario(seed=seed, peers=4, hours=0.012))
    outcome = world.play()
    assert not outcome.breach, outcome.breach + "\n" + "\n".join(outcome.lines[-60:])
    assert "banned this peer: it lies" in world.ended
    lineage = world.checks.lineage(world.tip())[:3]
    assert all(world.bad.peer not in {peer for peer, *_ in world.checks.commits[digest].members} for digest in lineage)


HARMFUL = ("made-up-state", "nan", "absent", "silent", "stalling-leaders", "slot-hog", "record-flood")


def test_in_a_run_for_members_strangers_cost_no_round():
    """Members commit what they do beside nobody, but for the chance of a world in which other messages are on their way: three worlds."""
    alone, beset = (
        [play(Scenario(seed=seed, peers=3, hours=0.02, faults=(), members=True, strangers=rows)) for seed in (2, 3, 4)] for rows in ((), HARMFUL)
    )
    for outcome in alone + beset:
        assert_holds(outcome)
    assert sum(outcome.rounds for outcome in beset) >= 0.9 * sum(outcome.rounds for outcome in alone) > 45
    assert sum(outcome.adopted["solo"] for outcome in beset) <= sum(outcome.adopted["solo"] for outcome in alone) + 1


NEWCOMERS = "guests@40/0(peers=1,seconds=20);guests@70/0(peers=2,seconds=20)"


def test_newcomers_take_what_the_members_have_certified_though_most_who_are_live_lie():
    """Three that average, four that lie, and who comes has met nobody. Without certificates it takes what the four made up."""
    world = World(Scenario(seed=3, peers=3, hours=0.026, members=True, liars=4, strikes=parse_strikes(NEWCOMERS)))
    outcome = world.play()
    assert_holds(outcome)
    assert len(world.strangers) == 4 and len(world.checks.forged) > 10 and len(world.gone) == 3
    rounds = [world.checks.commits[digest].members for digest in world.checks.lineage(world.tip())]
    handed_on = {word.about for versions in world.records._versions.values() for version in versions for word in version.record.bans}
    assert handed_on and {*handed_on, world.server.bans.countersigned} <= {*world.checks.lineage(world.tip())}
    guests = {guest.peer for guest in world.gone}
    assert guests <= {peer for members in rounds for peer, *_ in members}, "they came to those who average, and averaged with them"


def test_a_peer_cut_off_with_members_that_lie_waits_for_its_company():
    """Two that lie show that they stand after all that is certified. For 50 s it sees nobody else; before, they led it after 20."""
    strikes = parse_strikes("partition@65/0(peers=2+3,seconds=50)")
    outcome = play(Scenario(seed=3, peers=3, hours=0.035, members=True, liars=2, strikes=strikes))
    assert_holds(outcome)
    assert not outcome.misled and outcome.adopted["solo"] > 0 and outcome.apart == 0


class Renewing(World):
    """The server renews all memberships, once."""

    renewed: ClassVar[dict[str, int]] = {}

    def add_peer(self):
        machine = super().add_peer()
        self.later(30.0, lambda: self.renew(machine))
        return machine

    def renew(self, machine):
        machine.sync._members.own = new = sign_membership(self.server.dataset.key, self.run, machine.peer, lambda: machine.wall() + 3600)
        self.renewed[machine.peer] = new.until


def test_a_renewed_membership_comes_from_the_trainer_into_the_peers_record():
    world = Renewing(Scenario(seed=9, peers=3, hours=0.012, faults=(), members=True))
    assert_holds(world.play())
    shown = {peer: versions[-1].record.membership.until for peer, versions in world.records._versions.items()}
    assert len(shown) == 3 and shown == world.renewed


def test_with_a_server_that_is_away_for_seconds_some_have_a_receipt_and_the_others_weigh_no_more():
    """Bits are compared with what the weights by receipts make (`simulation/arithmetic.py`)."""
    world = World(Scenario(18, peers=4, hours=0.02, members=True, strikes=parse_strikes("server@40/0(seconds=7);server@55/0(seconds=7)")))
    outcome = world.play()
    assert_holds(outcome)
    assert outcome.rounds > 10 and world.checks.arithmetic.lessened > 0 and outcome.committed > 0.9


def test_where_the_host_trusts_three_of_five_every_promise_holds_with_all_faults():
    """They die, are cut off and come back, as the others do: whoever is there goes on without them."""
    outcome = play(Scenario(seed=2, peers=5, hours=0.08, faults=KINDS, members=True, trusted=3))
    assert_holds(outcome)
    assert outcome.rounds > 5 and len(outcome.faults) > 10


def test_a_reducer_that_lies_is_found_out_by_the_length_of_its_means(monkeypatch):
    """In an open run, and without anybody whom the host trusts."""
    reduced = []
    take_part = Reducer._take_part

    async def noting(self, guest):
        await take_part(self, guest)
        reduced.extend(part for parts, _ in list(self._shares.values())[-1:] for part in parts)

    monkeypatch.setattr(Reducer, "_take_part", noting)
    world = World(Scenario(seed=7, peers=3, hours=0.01, faults=(), strangers=("wrong-means",)))
    assert_holds(world.play())
    assert reduced and len(world.checks.commits) > 12
