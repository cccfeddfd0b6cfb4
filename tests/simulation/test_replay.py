"""Logs of a real run become a scenario. `recorded/` is what `./scripts/soak --kills 4 --peers 3 --seed 2 --keep` left, without server and states."""

import json
import shutil
from pathlib import Path

import pytest

from simulation.faults import written
from simulation.replay import read, scenario
from simulation.shrink import command
from simulation.world import Scenario, play
from swarm.errors import UserError

RECORDED = Path(__file__).parent / "recorded"
DEATHS = "sidecar@20/1;kill@35.9/1(seconds=28.1,back=True);sidecar@41/2"
"""A sidecar, a peer and a p2pd. The fourth, a peer that was stopped for 8 s, is in no log."""


def test_who_died_when_and_how_long_rounds_took_is_read_from_logs():
    recording = read(RECORDED)
    assert [peer.name for peer in recording.peers] == ["peer-1", "peer-2", "peer-3"] and recording.rounds == 15
    assert written(scenario(recording, Scenario(1)).strikes) == DEATHS
    assert 4 < recording.round_seconds < 6 and 90 < recording.ended - recording.began < 100


def test_steps_fill_a_round_in_the_time_that_it_took():
    recording = read(RECORDED)
    replayed = scenario(recording, Scenario(1))
    assert sum(1 / seconds for seconds in replayed.step_seconds) * recording.round_seconds == pytest.approx(4 * 3, rel=0.3)
    assert "--step_seconds 1.929+0.868+0.712" in command(replayed)


def test_a_recorded_run_is_played_with_as_many_rounds():
    outcome = play(scenario(read(RECORDED), Scenario(1)))
    assert not outcome.breach and outcome.faults == {"sidecar": 2, "kill": 1}
    assert 10 <= outcome.rounds <= 22


def test_logs_of_json_say_the_same(tmp_path):
    folder = tmp_path / "json"
    shutil.copytree(RECORDED, folder)
    for path in folder.glob("peer-*.log"):
        lines = [{"time": when, "logger": "peer", "event": event} for when, event in _text(path)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "no json\n[1]\n")
    assert written(scenario(read(folder), Scenario(1)).strikes) == DEATHS


def _text(path):
    from simulation.replay import _events

    return list(_events(path))


def test_who_comes_late_or_was_away_for_long_does_so_in_the_world(tmp_path):
    begins = "averaging sends and receives up to 1 kB each a round"
    for name, lines in {
        "ann": [(100.0, begins), (150.0, "back after 30 s"), (160.0, "x")],
        "bob": [(112.0, begins), (160.0, "x")],
        "server": [(1.0, "listening")],
    }.items():
        (tmp_path / f"{name}.log").write_text("".join(json.dumps({"time": when, "event": event}) + "\n" for when, event in lines))
    recording = read(tmp_path)
    replayed = scenario(recording, Scenario(1, sync="diloco"))
    assert written(replayed.strikes) == "kill@0/2(seconds=12,back=True);stop@20/1(what=both,seconds=30)"
    assert replayed.peers == 2 and replayed.step_seconds == () and replayed.sync == "diloco" and replayed.hours == round(60 / 3600, 4)


def test_a_folder_without_logs_is_refused(tmp_path):
    (tmp_path / "server.log").write_text("2026-11-24 22:20:25Z I server: listening\n")
    with pytest.raises(UserError, match="No log of a peer"):
        read(tmp_path)
