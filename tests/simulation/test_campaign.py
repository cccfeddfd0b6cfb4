"""A campaign goes on where it was interrupted, and counts what struck."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil

import simulation.campaign
from simulation.campaign import KINDS, RARE, campaign, mixed, read, summary
from simulation.world import STRANGERS
from tests.datasetserver.hosting import until


def line(seed, breach="", **struck):
    return {"seed": seed, "rounds": 10, "virtual_seconds": 360.0, "faults": {"kill": 60}, "failpoints": struck, "breach": breach}


def test_a_seeds_scenario_is_its_own_and_all_kinds_are_drawn():
    scenarios = [mixed(seed) for seed in range(1000)]
    assert scenarios == [mixed(seed) for seed in range(1000)]
    assert {s.peers for s in scenarios} == set(range(1, 9)) and {name for s in scenarios for name in s.faults} == {*KINDS, *RARE, "extend"}
    assert {name for s in scenarios for name in s.strangers} == set(STRANGERS) and {s.min_peers for s in scenarios} == {1, 2}
    assert all((s.total_samples > 0) == ("extend" in s.faults) and s.min_peers <= s.peers for s in scenarios)
    assert {s.sync for s in scenarios} == {"parameters", "diloco", "gradients"} and {s.wire for s in scenarios} == {"fp32", "fp16", "int8", "int4"}
    assert {s.overlap for s in scenarios} == {True, False} and not any(s.overlap and s.sync == "gradients" for s in scenarios)


def test_in_one_world_of_ten_two_or_three_assist_few_who_train():
    several = [world for world in map(mixed, range(2000)) if world.assistants > 1]
    assert 100 < len(several) < 250 and {world.assistants for world in several} == {2, 3}
    assert all(world.peers <= 2 and world.trusted <= world.peers for world in several if not world.strangers)
    assert any("partition" in world.faults and world.peers == 1 for world in several) and any(world.members for world in several)


def test_a_beset_campaign_plays_only_worlds_in_which_somebody_means_harm(tmp_path, monkeypatch):
    monkeypatch.setattr(simulation.campaign, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    monkeypatch.setattr(simulation.campaign, "played", lambda seed: line(seed) | {"rounds": 1})
    seeds = [each["seed"] for each in campaign(tmp_path / "beset.jsonl", 1, seeds=20, rounds=0, processes=1, beset=True)]
    worlds = [mixed(seed) for seed in range(1, max(seeds) + 1)]
    harmful = [s.seed for s in worlds if s.strangers or s.liars or s.two_faced or s.wrong_mean]
    assert sorted(seeds) == harmful and len(harmful) < len(worlds) / 2


def test_a_campaign_goes_on_where_it_was_interrupted_and_when_it_is_killed_leaves_no_process(tmp_path):
    path = tmp_path / "campaign.jsonl"
    path.write_text(f'{{"commit":"x"}}\n{json.dumps(line(7))}\n{{"seed": 8, "rou\n')
    command = [sys.executable, "-m", "simulation", "--campaign", str(path), "--seed", "7", "--seeds", "9", "--processes", "1"]
    program = psutil.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    until(lambda: len(read(path)) > 1 or program.poll() is not None, 300)
    children = program.children()
    playing = [word for child in children for word in child.cmdline()]
    program.kill()
    _, alive = psutil.wait_procs([program, *children], timeout=60)
    assert any("spawn_main" in word for word in playing) and not alive
    first, second, *others = read(path)
    assert (first["seed"], second["seed"]) == (7, 8) and second["rounds"] > 0
    assert not list(campaign(path, 7, seeds=2 + len(others), rounds=0, processes=1))


def test_a_summary_counts_what_struck_and_names_what_did_so_seldom():
    total = summary([line(1, saved=100), line(2, "3.2 abcdef: the bytes of contribution 4 changed", saved=1)])
    assert (total["rounds"], total["breaches"], total["broken_seeds"]) == (20, 1, [2])
    assert total["faults"]["kill"] == 120 and "kill" not in total["seldom"] and "saved" not in total["seldom"] and "joined" in total["seldom"]
