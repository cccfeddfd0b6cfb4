"""`dd-peer`: what it does after each kind of end, what it holds to be a hang, and that nobody is left behind."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from peer.assist import assist
from peer.config import PeerConfig
from peer.launch.command_line import parse
from peer.launch.stopping import Stop
from peer.supervise import cli
from peer.watchdog.log_file import LogFile
from peer.watchdog.policy import HEALTHY_SECONDS, ROOMY_SECONDS, End, Policy, smaller
from peer.watchdog.room import as_flags, forget_room, next_way, tell_room
from peer.watchdog.saved import Saved
from peer.watchdog.vitals import LONG, OutOfMemory, Vitals, Watchdog
from swarm.cgroups import MemoryGroups
from swarm.errors import ExitCode, UserError
from swarm.life import FOLDER, TRAINING, Life, Sign, last_sign
from tests import tiny
from tests.conftest import ROOT
from tests.datasetserver.hosting import until
from tests.warm import Warm

PROGRAM = ROOT / "tests" / "peer" / "watchdog" / "supervised_program.py"
FAILED = End(1)


# ---------------------------------------------------------------- after an end


def pauses(policy, *ends):
    return [policy.after(end, can_shrink=True).pause for end in ends]


def test_pauses_double_up_to_a_minute_and_differ_between_peers():
    steady = type("Rng", (), {"uniform": lambda self, low, high: (low + high) / 2})()
    assert pauses(Policy(0, steady), *[FAILED] * 9) == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert pauses(Policy(0, random.Random(1)), FAILED) != pauses(Policy(0, random.Random(2)), FAILED)


def test_it_gives_up_after_so_many_failures_in_a_row_and_training_longer_than_any_pause_forgives_them():
    policy = Policy(3)
    assert pauses(policy, FAILED, FAILED)[-1] is not None
    assert pauses(policy, End(1, trained_seconds=HEALTHY_SECONDS), FAILED)[-1] is not None
    assert policy.after(FAILED, can_shrink=True).pause is None


@pytest.mark.parametrize("code", [ExitCode.CONFIG, ExitCode.AUTH, ExitCode.OVER, ExitCode.OK, 130])
def test_what_no_restart_can_mend_is_not_started_again(code):
    assert Policy(0).after(End(code), can_shrink=True).pause is None


def test_a_network_that_was_never_there_ends_it_and_one_that_was_is_waited_for():
    lost = End(ExitCode.NETWORK)
    assert pauses(Policy(3), *[lost] * 3)[-1] is None
    assert pauses(Policy(3), End(ExitCode.NETWORK, trained_seconds=1), *[lost] * 50)[-1] is not None


def test_out_of_memory_halves_the_micro_batch_once():
    policy = Policy(5)
    assert policy.after(End(-signal.SIGKILL, out_of_memory=True), can_shrink=True).smaller
    verdict = policy.after(End(ExitCode.MEMORY), can_shrink=True)
    assert verdict.pause is None and not verdict.smaller
    assert Policy(5).after(End(ExitCode.MEMORY), can_shrink=False).pause is None
    # A month later another program took the memory.
    assert policy.after(End(ExitCode.MEMORY, trained_seconds=ROOMY_SECONDS), can_shrink=True).pause is not None


def test_a_kill_is_no_want_of_memory_and_a_hang_is_a_kind_of_its_own():
    assert End(-signal.SIGKILL).kind == ExitCode.FAILED
    assert End(-signal.SIGKILL, stalled=True).kind == ExitCode.STALLED


def test_a_smaller_micro_batch_keeps_the_samples_of_a_step():
    assert [smaller(*pair) for pair in ((8, 1), (6, 2), (9, 1), (7, 3), (1, 4))] == [(4, 2), (3, 4), (3, 3), (1, 21), None]
    assert [smaller(*pair, fused=True) for pair in ((8, 1), (9, 1), (1, 1))] == [(4, 1), (3, 1), None]


# ---------------------------------------------------------------- what is a hang


def test_a_trainer_that_trains_must_show_life_and_one_that_loads_only_do_something():
    used = Vitals()
    watchdog = Watchdog(10, began=0)
    look = lambda sign, now: watchdog.look(sign, lambda: used, now)  # noqa: E731
    for now in range(0, 300, 20):  # a download: it writes
        used = Vitals(0.0, now << 20)
        assert look(None, now) == ""
    assert look(Sign(TRAINING, 300), 305) == ""
    assert look(Sign(TRAINING, 330), 339) == "" and watchdog.trained_seconds == 30
    assert "no sign of life for 11 s" in look(Sign(TRAINING, 330), 341)
    assert look(Sign("saving", 345), 345 + 10 * LONG - 1) == ""
    assert "nothing was done" in look(Sign("saving", 345), 345 + 20 * LONG)
    assert Watchdog(0, began=0).look(None, Vitals, 1e9) == ""


def test_signs_of_life_are_written_once_a_second_and_whenever_something_else_begins(tmp_path):
    now = [100.0]
    life = Life(tmp_path, clock=lambda: now[0])
    life("loading")
    life(TRAINING)
    now[0] += 0.5
    life(TRAINING)
    assert last_sign(tmp_path) == Sign(TRAINING, 100.0)
    now[0] += 0.6
    asked = life.while_asked(lambda: "answer")
    assert asked() == "answer" and last_sign(tmp_path) == Sign(TRAINING, 101.1)
    now[0] += 5
    life("")
    assert last_sign(tmp_path) == Sign(TRAINING, 106.1)
    (tmp_path / "life").write_text("[torn")
    assert last_sign(tmp_path) is None and last_sign(tmp_path / "nowhere") is None
    Life(None)("nothing is written")


def test_other_ranks_show_no_life(tmp_path):
    Life.of_process({FOLDER: str(tmp_path), "RANK": "1"})("training")
    assert last_sign(tmp_path) is None
    Life.of_process({FOLDER: str(tmp_path), "RANK": ""})("training")
    assert last_sign(tmp_path)


def test_a_kill_for_memory_is_told_by_the_kernels_counters(tmp_path):
    now, own, vmstat = [0.0], tmp_path / "own", tmp_path / "vmstat"
    own.write_text("0::/user/me\n")
    vmstat.write_text("nr_free_pages 5\noom_kill 7\n")
    memory = OutOfMemory(vmstat, MemoryGroups(tmp_path / "cgroups", own), clock=lambda: now[0])
    assert not memory.look()
    vmstat.write_text("nr_free_pages 5\noom_kill 8\n")
    now[0] += 5
    assert memory.look()
    now[0] += 60
    memory.look()
    now[0] += 60
    assert not memory.look()  # that was long ago
    group = tmp_path / "cgroups" / "user" / "me"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("oom 1\noom_kill 0\n")
    vmstat.write_text("oom_kill 99\n")  # of somebody else, in another container
    inside = OutOfMemory(vmstat, MemoryGroups(tmp_path / "cgroups", own), clock=lambda: now[0])
    vmstat.write_text("oom_kill 100\n")
    assert not inside.look()
    (group / "memory.events").write_text("oom 2\noom_kill 1\n")
    assert inside.look()


# ---------------------------------------------------------------- the log


def test_the_log_is_turned_over_between_lines_and_keeps_so_many_files(tmp_path):
    log = LogFile(tmp_path / "logs" / "peer.log", 1000, 3)
    for i in range(100):
        os.write(log.pipe, b"%03d " % i + b"x" * 60 + b"\n")
        log.pump()
    os.write(log.pipe, b"cut off")
    log.close()
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["peer.log", "peer.log.1", "peer.log.2"]
    lines = [line for name in reversed(files) for line in (tmp_path / "logs" / name).read_text().splitlines()]
    assert lines[-1] == "cut off" and all(len(line) == 64 for line in lines[:-1])
    assert [int(line[:3]) for line in lines[:-1]] == list(range(100 - len(lines) + 1, 100))


# ---------------------------------------------------------------- the program


@pytest.fixture
def supervise(tmp_path):
    """`supervise(lives, *flags)`: exit code and log of a dd-peer whose trainer's lives are those, and the flags of each life."""
    started = []

    def run(lives, *flags, wait=True, end_seconds=1.0):
        out = tmp_path / f"out{len(started)}"
        out.mkdir()
        (out / "lives.json").write_text(json.dumps(lives))
        code = "import sys; from pathlib import Path; from swarm.errors import run_program; from peer import supervise; from peer.watchdog import trainer_process\n"
        code += f"trainer_process._END_SECONDS = {end_seconds}; sys.exit(run_program(lambda: supervise.main(sys.argv[1:], Path({str(PROGRAM)!r}))))"
        process = Warm(["-c", code, "--output_dir", str(out), *map(str, flags)], ROOT, tmp_path / f"{out.name}.log", sidecars=0)
        started.append(process)
        if not wait:
            return process, out
        code = process.wait(200)
        seen = [json.loads(line) for line in (out / "seen.jsonl").read_text().splitlines()] if (out / "seen.jsonl").exists() else []
        for life in seen:
            parse(life["argv"])  # the trainer, too, must understand them
        return code, (tmp_path / f"{out.name}.log").read_text(), seen, out

    yield run
    for process in started:
        process.send_signal(signal.SIGKILL)
        process.wait(100)


def short_of_memory(batch, *ways):
    """A life that ends as torch's end without memory: it tells its micro-batch, and what would make room on a GPU."""
    return {"device": "cuda", "ways": ways, "batch": batch}


def test_a_trainer_that_fails_is_started_again_from_its_latest_checkpoint(supervise):
    code, err, seen, _ = supervise(["saved", "done"], "--train_batch_size", 4)
    assert code == 0 and "the trainer ended: exit status 1. Starting it again in" in err and "; Ctrl-C ends it)\n" in err
    assert "--resume_from_checkpoint" not in seen[0]["argv"]
    assert seen[1]["argv"] == [*seen[0]["argv"], "--resume_from_checkpoint", "latest"]


@pytest.mark.parametrize("flags", [("--found",), ("--found", "--resume", "none")])
def test_in_a_swarm_the_trainer_finds_its_own_checkpoint_or_begins_with_new_moments_as_asked(supervise, flags):
    _, _, seen, _ = supervise(["saved", "done"], *flags)
    assert seen[1]["argv"] == seen[0]["argv"]


@pytest.mark.parametrize("flags", [("--resume", "none"), ("--resume", "mine"), ("--found", "--resume", "mine")])
def test_what_was_saved_since_is_newer_than_what_the_owner_asked_to_begin_with(supervise, flags):
    _, _, seen, _ = supervise([1, "saved", "done"], *flags)
    assert seen[1]["argv"] == seen[0]["argv"]
    assert seen[2]["argv"] == [*seen[0]["argv"], "--resume_from_checkpoint", "latest"]


def write_checkpoint(folder):
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    return folder


def test_checkpoints_that_were_there_before_are_not_gone_on_from_wherever_they_move(tmp_path):
    old, aside = write_checkpoint(tmp_path / "checkpoint-000007"), write_checkpoint(tmp_path / "earlier" / "ab" / "checkpoint-000003")
    saved = Saved(tmp_path)
    old.rename(tmp_path / "earlier" / "checkpoint-000007")
    aside.rename(tmp_path / "checkpoint-000003")
    assert not saved
    write_checkpoint(tmp_path / "checkpoint-000001")  # a new run counts from 1
    assert saved


def test_a_mistake_is_answered_once_in_one_line(supervise):
    code, err, seen, _ = supervise([2, "done"])
    assert code == 2 and len(seen) == 1 and err.count("error:") == 1 and "only you can mend that" in err
    code, err, seen, _ = supervise([3, "done"])
    assert code == 3 and len(seen) == 1 and err.strip().endswith("exit status 3, and the error above says what to do")
    code, err, seen, _ = supervise(["done"], "--train_batch_siz", 4)
    assert code == 2 and not seen and err.startswith("error: Unknown flag --train_batch_siz. Did you mean")


def test_who_gives_nothing_is_told_what_to_give_and_no_folder_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli([]) == ExitCode.CONFIG and not list(tmp_path.iterdir())
    said = capsys.readouterr().err
    assert "--datasetserver URL" in said and "--model" in said


def test_an_output_dir_that_cannot_be_made_is_a_matter_of_the_disk(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Stop, "listen", lambda self: self)  # the signals are pytest's
    (tmp_path / "file").touch()
    assert cli(["--output_dir", str(tmp_path / "file" / "out")]) == ExitCode.DISK
    assert "cannot be made: Not a directory. Choose another --output_dir." in capsys.readouterr().err
    with pytest.raises(UserError) as refused:
        assist(PeerConfig(output_dir=str(tmp_path / "file" / "out"), peers=("/ip4/x",), assist=True), lambda: pytest.fail("asked"))
    assert refused.value.code == ExitCode.DISK


def test_a_trainer_that_always_fails_is_given_up_with_its_own_code(supervise):
    code, err, seen, _ = supervise([4, 4, 4], "--max_restarts", 2)
    assert code == ExitCode.DISK and len(seen) == 2 and "it failed 2 times in a row" in err


def test_out_of_memory_halves_the_micro_batch_once_and_says_so(supervise):
    code, err, seen, _ = supervise(["memory", "memory"], "--batch_size", 6)
    assert code == ExitCode.MEMORY and "error: Out of memory" in err
    assert "the micro-batch is now 3 instead of 6, and gradients are accumulated over 2 instead of 1" in err
    assert seen[1]["argv"][-4:] == ["--train_batch_size", "3", "--gradient_accumulation_steps", "2"]
    assert "a smaller micro-batch did not help" in err


def test_a_fused_step_out_of_memory_takes_fewer_samples_and_accumulates_nothing(supervise):
    _, err, seen, _ = supervise(["memory", "memory"], "--batch_size", 6, "--fused_step")
    assert "a step has fewer samples, since --fused_step accumulates nothing" in err
    assert seen[1]["argv"][-4:] == ["--train_batch_size", "3", "--gradient_accumulation_steps", "1"]


def test_out_of_memory_again_takes_the_next_option_that_makes_room(supervise):
    ways = [{"gradient_checkpointing": True}, {"offload": True}]
    lives = [short_of_memory(2, *ways), short_of_memory(1, *ways), short_of_memory(1, *ways[1:]), short_of_memory(1)]
    code, err, seen, _ = supervise(lives, "--batch_size", 2)
    assert code == ExitCode.MEMORY and err.count("error: Out of memory: CUDA out of memory. Tried to allocate 2.00 GiB") == 4
    taken = [[flag for flag in ("--gradient_accumulation_steps", "--gradient_checkpointing", "--offload") if flag in life["argv"]] for life in seen]
    assert [len(flags) for flags in taken] == [0, 1, 2, 3] and taken[2][-1] == "--gradient_checkpointing"
    assert err.count("out of memory: from now on with --gradient_checkpointing, which takes less of it and more time. To keep it so, give it yourself") == 1
    assert err.count("out of memory: from now on with --offload, ") == 1 and "a smaller micro-batch did not help" in err


def test_a_measured_micro_batch_is_halved_as_one_that_was_given(supervise):
    _, err, seen, _ = supervise([short_of_memory(6), short_of_memory(3)], "--train_batch_size", "auto")
    assert "the micro-batch is now 3 instead of 6" in err
    assert seen[1]["argv"][-4:] == ["--train_batch_size", "3", "--gradient_accumulation_steps", "2"]
    _, err, seen, _ = supervise(["memory", "memory"], "--train_batch_size", "auto")  # it ends before it has measured
    assert "the micro-batch cannot be smaller" in err and len(seen) == 1


def test_what_the_trainer_before_told_of_room_is_forgotten(supervise):
    code, err, seen, _ = supervise([short_of_memory(1, {"offload": True}), "memory"])
    assert code == ExitCode.MEMORY and len(seen) == 2 and "the micro-batch cannot be smaller" in err


def test_an_option_that_makes_room_on_a_gpu_is_no_answer_to_a_host_without_memory(tmp_path):
    told = lambda device: tell_room(device, [{"base_precision": "int8"}], 4, {FOLDER: str(tmp_path)})  # noqa: E731
    assert next_way(tmp_path, killed=False) == {}
    told("cuda")
    assert next_way(tmp_path, killed=True) == {} and next_way(tmp_path, killed=False) == {"base_precision": "int8"}
    told("cpu")
    assert as_flags(next_way(tmp_path, killed=True)) == ["--base_precision", "int8"]
    (tmp_path / "room").write_text('{"device": "cp')
    assert next_way(tmp_path, killed=False) == {}
    forget_room(tmp_path)
    tell_room("cpu", [], 4, {})  # nobody supervises
    assert not list(tmp_path.iterdir())


def test_an_option_is_taken_only_where_one_is_left_and_the_trainer_did_not_fit_for_long():
    policy, end = Policy(5), End(ExitCode.MEMORY)
    assert policy.after(end, can_shrink=False, can_make_room=True).roomier
    assert policy.after(end, can_shrink=False).pause is None
    trained = policy.after(End(ExitCode.MEMORY, trained_seconds=ROOMY_SECONDS), can_shrink=False, can_make_room=True)
    assert trained.pause is not None and not trained.roomier  # something else took the memory


@pytest.mark.swarm
def test_a_real_trainer_that_runs_out_of_memory_in_the_middle_goes_on_with_less(tiny_model, tmp_path):
    """The second step of a model without gradient checkpointing raises what torch raises."""
    tiny.write_pictures(tmp_path / "pictures")
    flags = ["--model", tiny_model, "--train_data_dir", tmp_path / "pictures", "--output_dir", tmp_path / "out", "--resolution", 16]
    flags += ["--max_train_steps", 4, "--checkpointing_steps", 1, "--device", "cpu"]
    process = Warm(["-m", "tests.peer.watchdog.short_of_memory", *flags], ROOT, tmp_path / "log", forks=True)
    code, said = process.wait(300), (tmp_path / "log").read_text()
    assert code == 0, said
    assert said.count("error: Out of memory: CUDA out of memory") == 1
    assert "from now on with --gradient_checkpointing" in said and "resumed checkpoint=" in said
    assert (tmp_path / "out" / "model").is_dir()


def test_a_trainer_that_hangs_says_where_and_is_started_again(supervise):
    code, err, seen, _ = supervise(["hang", "done"], "--stall_seconds", 5)
    assert code == 0 and len(seen) == 2
    assert "the trainer stands still: no sign of life for" in err
    assert [line for line in err.splitlines() if line.endswith("in hang_here")] and "\\n" not in err
    assert "the trainer ended: it stood still" in err


def test_what_a_trainer_left_behind_is_ended_before_the_next_one_starts(supervise):
    code, _, seen, out = supervise(["orphan", "done"])
    assert code == 0 and len(seen) == 2
    assert not psutil.pid_exists(int((out / "orphan").read_text()))


def test_lines_of_all_processes_come_whole_into_one_log(supervise, tmp_path):
    code, err, _, _ = supervise(["talk"], "--log_file", tmp_path / "peer.log", "--log_file_mib", 0.01, "--log_files", 20)
    assert code == 0 and "the log goes to" in err and "aaa" not in err
    lines = [line for path in tmp_path.glob("peer.log*") for line in path.read_text().splitlines()]
    assert len(lines) == 900 and {line for line in lines} == {letter * 70 for letter in "abc"}


def test_where_the_log_is_a_file_the_terminal_still_says_how_it_ended(supervise, tmp_path):
    code, err, _, _ = supervise([2], "--log_file", tmp_path / "peer.log")
    _, last = err.splitlines()  # the first one says where the log goes
    assert code == 2 and last.endswith(f"ended with code 2: the last lines of {tmp_path / 'peer.log'} say why")
    assert "not starting the trainer again: exit status 2" in (tmp_path / "peer.log").read_text().splitlines()[-1]


def test_a_stop_while_it_waits_to_start_again_is_obeyed_at_once(supervise, tmp_path):
    process, out = supervise([6] * 50, "--max_restarts", 0, "--log_file", tmp_path / "peer.log", wait=False)
    until(lambda: (out / "seen.jsonl").exists() and len((out / "seen.jsonl").read_text().splitlines()) >= 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 0
    assert (tmp_path / f"{out.name}.log").read_text().splitlines()[1:] == ["stopping; once more to stop at once."]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_while_a_trainer_that_has_not_begun_finds_no_server_does_not_fail(supervise, number):
    """Of each the trainer hears SIGTERM, which ends it without a traceback while it still imports."""
    process, out = supervise(["away"], wait=False)
    until(lambda: (out / "listening").exists())
    process.send_signal(number)
    assert process.wait(100) == 0


@pytest.mark.parametrize("flags", [(), ("--assist",)])
def test_one_wish_ends_a_peer_that_asks_its_server_in_vain(tmp_path, flags):
    with socket.create_server(("127.0.0.1", 0)) as server:  # that takes the question, and does not answer
        server.settimeout(200)
        url, log = f"http://127.0.0.1:{server.getsockname()[1]}", tmp_path / "log"
        process = Warm(["-m", "peer.supervise", *flags, "--output_dir", tmp_path / "out", "--datasetserver", url], ROOT, log, forks=True)
        try:
            question, _ = server.accept()
            process.send_signal(signal.SIGINT)
            assert process.wait(200) == 0
            said = log.read_text()
            assert said.endswith("stopped before it began.\n") and "error" not in said
            question.close()
        finally:
            process.kill()


def test_a_stop_while_the_rest_of_a_failed_trainer_is_ended_does_not_fail(supervise):
    process, out = supervise(["orphan"], wait=False, end_seconds=100.0)
    until(lambda: (out / "orphan").exists() and not psutil.pid_exists(json.loads((out / "seen.jsonl").read_text())["pid"]))
    process.send_signal(signal.SIGTERM)
    os.kill(int((out / "orphan").read_text()), signal.SIGKILL)
    assert process.wait(100) == 0


def test_a_trainer_that_hangs_and_hears_nothing_is_killed_at_the_second_wish(supervise):
    process, out = supervise(["hang"], wait=False)
    until(lambda: last_sign(out / "supervised"))
    pid = json.loads((out / "seen.jsonl").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 100
    while psutil.pid_exists(pid):  # no longer: on its own way out it does not listen any more, and would die of one wish too many
        assert time.monotonic() < deadline
        time.sleep(1.5)  # two wishes, not one heard twice
        process.send_signal(signal.SIGTERM)
    assert process.wait(100) in (0, 130, 137)


def test_two_of_one_folder_are_refused(supervise, tmp_path):
    _, out = supervise(["hang"], wait=False)
    until(lambda: last_sign(out / "supervised"))
    done = subprocess.run(
        [sys.executable, "-m", "peer.supervise", "--output_dir", out], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2 and "Another dd-peer is using" in done.stderr


@pytest.mark.swarm
def test_several_ranks_are_one_peer_and_are_started_again_together(tiny_model, pictures, tmp_path):
    out = tmp_path / "out"
    flags = ["--train_data_dir", pictures, "--model", tiny_model, "--output_dir", out, "--resolution", 16, "--num_threads", 1]
    flags += ["--nproc_per_node", 2, "--total_samples", 10**9, "--checkpointing_steps", 10]
    process = Warm(["-m", "peer.supervise", *flags], ROOT, tmp_path / "log", forks=True)
    try:
        said = lambda: (tmp_path / "log").read_text()  # noqa: E731
        until(lambda: "saved" in said(), 300)
        ranks = [child for child in psutil.Process(process.pid).children() if "finetune.py" in " ".join(child.cmdline())]
        assert len(ranks) == 2 and "ranks=2" in said()
        max(ranks, key=lambda rank: rank.pid).kill()  # the second, which says nothing itself
        until(lambda: "resumed checkpoint=" in said() and said().count("training distributed-diffusion") == 2, 300)
        assert "the trainer ended: it was ended by SIGKILL" in said() and not any(rank.is_running() for rank in ranks)
        # Both decide together where they stop, so both must hear of it.
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0 and "stopped before the end" in said()
    finally:
        process.kill()
        process.wait(300)
