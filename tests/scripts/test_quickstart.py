"""The quickstart's command line, its folder, and its hold on the programs that it starts."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from datasetserver import __main__ as dd_datasetserver
from peer.loop.schedule import build_schedule
from scripts.demo import quickstart, swarm_run
from scripts.demo.processes import Program
from swarm.errors import UserError
from swarm.options import build, read_toml
from swarm.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
# A program with a child that outlives it: what p2pd would do.
FAMILY = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']); print('up', flush=True); time.sleep(300)"
ALONE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from scripts.demo import processes
from scripts.demo.processes import Program
from swarm.lifeline import adopt_orphans
adopt_orphans()
"""


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_explains_without_any_set_up(flag, tmp_path):
    done = subprocess.run(
        [str(ROOT / "scripts" / "quickstart"), "--churn", flag],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
        timeout=120,
    )
    assert done.returncode == 0 and done.stderr == ""
    for word in ("--churn", "--strangers", "--total_samples", "--keep", "samples.png", "result.json", "status 0 only if"):
        assert word in done.stdout


@pytest.mark.parametrize("argv", [["--peers", "1"], ["--churn", "--peers", "0"], ["--target_batch_size", "32"], ["--total_samples", "100"]])
def test_a_swarm_that_cannot_work_is_refused_before_it_starts(argv):
    with pytest.raises(UserError):
        quickstart.parse(argv)


def test_what_takes_long_says_how_far_it_is():
    said = []
    tell = quickstart.every(50, said.append)
    for step in range(1, 121):
        tell(step, 120)
    assert [line.strip() for line in said] == [f"teaching its VAE: {step} of 120 steps" for step in (50, 100, 120)]


def test_the_quickstarts_model_and_pictures_are_hosted_by_the_line_that_it_ends_with(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(quickstart, "ROOT", tmp_path)
    result = {"digit_accuracy": 1, "pictures": 1, "judge_accuracy": 1, "rounds": 1, "samples": 1, "seconds_training": 1}
    display = SimpleNamespace(say=said.append)
    quickstart.conclude(display, tmp_path, result | {"peak_memory_gib": 1, "failures": [], "churn": True}, tmp_path / "peer-1" / "model")
    (line,) = [line.split() for line in said if "dd-datasetserver" in line]
    server, run = dd_datasetserver._read(line[1:])
    assert server.dataset == str(tmp_path / "dataset") and run["model"] == str(tmp_path / "base")
    (tmp_path / "run.toml").write_text(swarm_run.run_settings(swarm_run.Plan(tmp_path)), encoding="utf-8")
    theirs = read_toml(tmp_path / "run.toml", RunConfig)
    assert {name: run[name] for name in ("resolution", "learning_rate")} == {name: theirs[name] for name in ("resolution", "learning_rate")}


def test_a_folder_of_the_users_own_is_never_emptied(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not a quickstart's"):
        quickstart.clean(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_a_quickstarts_folder_is_emptied(tmp_path):
    folder = quickstart.clean(tmp_path / "new")
    (folder / "result.json").write_text("{}")
    assert [path.name for path in quickstart.clean(folder).iterdir()] == [quickstart.MARK]


def test_the_runs_file_is_a_configuration_that_peers_accept(tmp_path):
    plan = swarm_run.Plan(tmp_path / 'a "folder"', total_samples=4096, settings=quickstart.recipe(4096))
    (tmp_path / "run.toml").write_text(swarm_run.run_settings(plan), encoding="utf-8")
    run = build(RunConfig, read_toml(tmp_path / "run.toml", RunConfig))
    assert build_schedule(run)(2048) > build_schedule(run)(4000) > 0 and run.lr_warmup_samples == 512
    assert run.total_samples == 4096 and run.resolution == 16 and run.model == str(tmp_path / 'a "folder"' / "base")


def family_of(program: Program) -> list[psutil.Process]:
    deadline = time.monotonic() + 120
    while "up" not in program.last_words() and time.monotonic() < deadline:
        time.sleep(0.05)
    return [psutil.Process(program.pid), *psutil.Process(program.pid).children(recursive=True)]


def gone(process: psutil.Process) -> bool:
    try:
        process.wait(60)
    except psutil.TimeoutExpired:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def test_a_killed_program_takes_its_children_along(tmp_path):
    program = Program("family", [sys.executable, "-c", FAMILY], tmp_path / "log", {}, tmp_path)
    family = family_of(program)
    program.kill_tree()
    assert len(family) == 2 and all(map(gone, family))
    assert program.ended() == -9


def run_alone(code: str) -> subprocess.CompletedProcess:
    """`code` in a process of its own: adopting orphans would change the one that runs the tests."""
    return subprocess.run([sys.executable, "-c", ALONE + code], capture_output=True, text=True, timeout=240)


def test_an_orphan_is_found_named_and_ended(tmp_path):
    log = str(tmp_path / "log")
    done = run_alone(
        f"""
import time
program = Program("family", [sys.executable, "-c", {FAMILY!r}], Path({log!r}), {{}}, Path("/"))
while "up" not in program.last_words():
    time.sleep(0.05)
stubborn = processes.end_all([program], seconds=5)  # SIGTERM ends the parent; its child never hears of it
print(len(stubborn), len(processes.descendants()))
"""
    )
    assert done.stdout.split() == ["1", "0"], done.stderr


def test_memory_counts_the_whole_family(tmp_path):
    done = run_alone(
        f"""
import time
program = Program("big", [sys.executable, "-c", "b = bytearray(300 << 20); print('up', flush=True); import time; time.sleep(300)"],
                  Path({str(tmp_path / "log")!r}), {{}}, Path("/"))
while "up" not in program.last_words():
    time.sleep(0.05)
print(processes.memory_gib())
processes.end_all([program])
"""
    )
    assert 0.29 < float(done.stdout) < 0.6, done.stderr


def test_a_program_that_ends_too_early_is_answered_with_its_own_error(tmp_path):
    words = "print('error: The disk is full. Free some space.'); print('some traceback')"
    program = Program("peer-1", [sys.executable, "-c", words + "; raise SystemExit(4)"], tmp_path / "log", {}, tmp_path)
    assert program.wait(120) == 4
    error = swarm_run._failed(program)
    assert "peer-1 ended with status 4: The disk is full." in str(error) and str(tmp_path / "log") in str(error)


def test_paths_are_shown_as_one_would_type_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert quickstart.shown(tmp_path / "quickstart" / "samples.png") == "quickstart/samples.png"
    assert quickstart.shown(Path("/elsewhere/x")) == "/elsewhere/x"
