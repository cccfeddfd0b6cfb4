"""Strikes are written down and played again, and a scenario that breaks a promise is made smaller by what its worlds do."""

import asyncio
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from simulation.__main__ import _parser, _scenario
from simulation.assistant import Assistant
from simulation.campaign import mixed
from simulation.faults import FAULTS, Strike, parse_strikes, written
from simulation.shrink import Shrinking, command, promise
from simulation.world import Outcome, Scenario, World, play

LINES = "kill@12.5/3(seconds=10,back=True);sidecar@20/1;partition@40.125/0(peers=1+3,seconds=15);stop@41/2(what=both,seconds=8)"


def test_strikes_are_read_as_they_are_written():
    strikes = parse_strikes(LINES)
    assert written(strikes) == LINES
    assert strikes[0] == Strike(12.5, "kill", 3, {"seconds": 10.0, "back": True}) and strikes[2].values["peers"] == (1, 3)


@pytest.mark.parametrize("line", ["flood@1/2", "kill@1/2", "kill@1/2(seconds=ten,back=True)", "kill", "kill@1/2(seconds=1)"])
def test_what_is_no_strike_is_refused(line):
    with pytest.raises(ValueError):
        parse_strikes(line)


def test_the_worlds_of_simulation_coverage_are_understood():
    """One of its strikes had values that its fault no longer has: the script ended after its first world, and nobody saw."""
    script = Path("scripts/simulation-coverage").read_text(encoding="utf-8")
    worlds = [shlex.split(line) for line in re.findall(r"^play ((?:'[^']*'|[^'\n])*)$", script, re.MULTILINE)]
    shared = shlex.split(re.search(r"^set -- (.*)$", script, re.MULTILINE)[1])
    told = [[one for word in words for one in (shared if word == "$@" else [word])] for words in worlds]
    assert len(told) == 6
    for words in told[1:]:  # the first is mixed
        _scenario(_parser(), _parser().parse_args(words))


def test_every_fault_draws_what_its_strikes_are_described_by():
    world = World(Scenario(1, peers=1))
    for name, fault in FAULTS.items():
        values = {} if name == "partition" else fault.draw(world.rng, world)
        assert set(values) <= set(fault.dice) == set(fault.values)
    world.loop.close()


@pytest.mark.parametrize(("state", "total"), [("running", 120), ("paused", 120), ("ended", 0)])
def test_a_run_is_extended_only_until_its_server_says_that_it_is_over(state, total):
    """Found by seeds 60000468 and 60003717: all who trained had heard so and were leaving, and nobody was left to make the added rounds."""
    orders, run = SimpleNamespace(total=0), SimpleNamespace(total_samples=100, target_batch_size=10)
    server = SimpleNamespace(orders=orders, book=SimpleNamespace(state=state))
    world = SimpleNamespace(run=run, machines=[], server=server, struck=lambda strike: None)
    asyncio.run(FAULTS["extend"].befall(world, None, Strike(1.0, "extend", 0, {"rounds": 2})))
    assert orders.total == total


def test_the_strikes_of_a_world_make_the_same_world_again():
    scenario = Scenario(21, peers=3, hours=0.03, faults=("kill", "power", "partition", "reset", "clock", "failpoint", "nat"), fault_seconds=20)
    drawn = play(scenario)
    assert len(drawn.strikes) > 5 and drawn.rounds > 3 and not drawn.breach
    told = play(replace(scenario, faults=("nat",), strikes=parse_strikes(written(drawn.strikes))))
    assert (told.rounds, told.strikes, told.adopted) == (drawn.rounds, drawn.strikes, drawn.adopted)


def test_a_peer_that_falls_or_is_cut_off_at_a_point_comes_back():
    there = ("mean_complete,action=power", "rebased,action=peer", "first_part_sent,action=cut", "frozen,action=stop", "joined,action=fail")
    strikes = ";".join(f"failpoint@{15 * number}/{1 + number % 3}(name={what},seconds=14)" for number, what in enumerate(there, 1))
    world = World(Scenario(4, peers=3, hours=0.04, strikes=parse_strikes(strikes)))
    outcome = world.play()
    assert outcome.failpoints == dict.fromkeys(("mean_complete", "rebased", "first_part_sent", "frozen", "joined"), 1) and not outcome.breach
    assert not world.network.cut_off


def test_a_peer_that_two_strikes_cut_off_is_back_when_both_have_ended():
    strikes = "failpoint@20/1(name=first_part_sent,action=cut,seconds=60);failpoint@40/1(name=frozen,action=cut,seconds=70)"
    world, seen = World(Scenario(3, peers=3, hours=0.04, strikes=parse_strikes(strikes))), {}
    for at in (60.0, 85.0, 115.0):
        world.later(at, lambda at=at: seen.update({at: world.network.reaches_server(world.machines[0].peer)}))
    outcome = world.play()
    assert not outcome.breach and outcome.failpoints == {"first_part_sent": 1, "frozen": 1}
    assert seen == {60.0: False, 85.0: False, 115.0: True}


def test_a_strike_that_ends_undoes_no_other_one():
    """A `handover` ends within a partition, and another one and a partition while a peer is cut off."""
    strikes = "partition@20/0(peers=1,seconds=30);handover@21/1(seconds=4)"
    strikes += ";failpoint@60/1(name=first_part_sent,action=cut,seconds=60);partition@80/0(peers=2,seconds=10);handover@82/1(seconds=8)"
    world, seen = World(Scenario(1, peers=3, hours=0.04, strikes=parse_strikes(strikes))), {}

    def look(at):
        peers, net = [machine.peer for machine in world.machines], world.network
        pairs = {(one + 1, other + 1) for one in range(3) for other in range(one) if net.parted(peers[one], peers[other])}
        seen[at] = pairs, [net.reaches_server(peer) for peer in peers]

    for at in (30.0, 85.0, 95.0, 130.0):
        world.later(at, lambda at=at: look(at))
    outcome = world.play()
    assert not outcome.breach and outcome.failpoints["first_part_sent"] == 1
    first_alone = {(2, 1), (3, 1)}, [False, True, True]
    assert seen == {30.0: first_alone, 85.0: (first_alone[0] | {(3, 2)}, [False, False, True]), 95.0: first_alone, 130.0: (set(), [True] * 3)}


def test_a_partition_may_put_the_server_with_either_side_and_ends_no_other_one():
    strikes = "partition@20/0(peers=0+1,seconds=40);partition@30/0(peers=3,seconds=10)"
    world, seen = World(Scenario(3, peers=3, hours=0.03, strikes=parse_strikes(strikes))), {}
    for at in (25.0, 35.0, 50.0, 70.0):
        world.later(at, lambda at=at: seen.update({at: [world.network.reaches_server(machine.peer) for machine in world.machines]}))
    outcome = world.play()
    assert not outcome.breach and written(outcome.strikes) == strikes
    assert seen == {25.0: [True, False, False], 35.0: [True, False, False], 50.0: [True, False, False], 70.0: [True] * 3}


def test_drawn_partitions_put_all_assistants_on_one_side_the_server_on_either_and_some_are_long():
    world = World(Scenario(5, peers=2, assistants=2, faults=()))
    world.machines = [*(SimpleNamespace(number=number) for number in (1, 2)), *(Assistant(world, f"Qm{number}", number) for number in (3, 4))]
    drawn = [FAULTS["partition"].draw(world.rng, world) for _ in range(200)]
    sides = [strike["peers"] for strike in drawn]
    assert 30 < sum(set(side) - {0} == {3, 4} for side in sides) < 100 and 30 < sum(0 in side for side in sides) < 100
    assert {strike["seconds"] for strike in drawn} == {3.0, 15.0, 60.0, 300.0}
    world.loop.close()


def test_a_machine_that_sleeps_is_not_woken_by_the_end_of_another_strike():
    strikes = parse_strikes("sleep@20/1(seconds=60);stop@25/1(what=both,seconds=8)")
    world, seen = World(Scenario(3, peers=3, hours=0.03, strikes=strikes)), {}
    for at in (30.0, 35.0, 75.0, 85.0):
        world.later(at, lambda at=at: seen.update({at: (world.machines[0].trainer.stopped, world.machines[0].sidecar.stopped)}))
    assert not world.play().breach
    assert seen == {30.0: (True, True), 35.0: (True, True), 75.0: (True, True), 85.0: (False, False)}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("12.345 abc123: contribution 7 of ff00aa is twice in the lineage of 0123abcd", "9.1 beef00: contribution 12 of ab12cd is twice in the lineage of 98765432", True),
        ("600.1 600 s after the last fault not all have committed: a at b", "99.2 600 s after the last fault not all have committed: c", True),
        ("12.3 abc123: the bytes of contribution 3 changed", "12.3 abc123: two stories of the state 01234567", False),
    ],
)  # fmt: skip
def test_a_promise_is_known_by_its_words(one, other, same):
    assert (promise(one) == promise(other)) is same and promise(one)


def breaks_if(needed):
    """Worlds that break when all of these strikes happen in them."""

    def play(scenario):
        there = {strike.fault for strike in scenario.strikes or ()}
        breach = "5.0 aaaaaa: the bytes of contribution 1 changed" if needed <= there and scenario.peers >= 2 else ""
        return Outcome(scenario.seed, breach=breach, strikes=scenario.strikes or (), virtual_seconds=90.0)

    return play


def test_a_scenario_is_shrunk_to_the_strikes_and_peers_that_it_needs():
    strikes = parse_strikes(LINES) + parse_strikes("power@60/4(seconds=5);disk@61/1(seconds=2);clock@62/2(skew=1)")
    scenario = Scenario(4, peers=5, hours=0.1, faults=("kill", "nat"), sync="diloco", overlap=True)
    outcome = Outcome(4, breach="77.0 bbbbbb: the bytes of contribution 3 changed", strikes=strikes, virtual_seconds=90.0)
    shrinking = Shrinking(scenario, outcome, 60, breaks_if({"sidecar", "power"}))
    shrinking.run()
    small = shrinking.scenario
    assert [strike.fault for strike in small.strikes] == ["sidecar", "power"] and small.peers == 2 and small.hours == 0.025
    assert small.faults == () and small.sync == "parameters" and not small.overlap
    assert "--strikes 'sidecar@20/1;power@60/" in command(small)


def test_the_line_that_is_printed_plays_the_same_scenario():
    parser, strikes = _parser(), parse_strikes(LINES)
    mixtures = [mixed(seed) for seed in range(300)]
    for scenario in (*mixtures, *(replace(one, strikes=strikes, fault_seconds=60.0, liars=2, step_seconds=(0.5, 0.7)) for one in mixtures[:20])):
        words = shlex.split(command(scenario))
        assert words[:3] == ["python", "-m", "simulation"] and _scenario(parser, parser.parse_args(words[3:])) == scenario


def test_shrinking_keeps_to_its_time_and_to_what_breaks():
    now = iter(range(100))
    scenario = Scenario(4, peers=5, strikes=parse_strikes(LINES))
    outcome = Outcome(4, breach="77.0 bbbbbb: another promise", strikes=scenario.strikes, virtual_seconds=90.0)
    shrinking = Shrinking(scenario, outcome, 20, breaks_if(set()), clock=lambda: float(next(now)))
    shrinking.run()
    assert shrinking.scenario == scenario and 0 < shrinking.tried < 20
