"""`--train_batch_size auto`: measured by a process of its own, remembered, and then fixed."""

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from peer.config import PeerConfig
from peer.finetune import main
from peer.launch import measured_batch
from peer.launch.command_line import parse
from peer.launch.joining import Joined
from peer.launch.launcher import Rank
from peer.launch.stopping import Stop
from peer.machine import largest_batch
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.launch.measuring import killed_at_four, nothing_fits, refused, waits
from tests.warm import _context

CPU, ALONE = torch.device("cpu"), Rank()


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """`ask(work, ...)`: what becomes of --train_batch_size auto where the process does `work`; None: it must not be asked."""
    measure = measured_batch._measure

    def asked(work, stopping=lambda: False, rank=ALONE, device=CPU, run=None, **options):
        monkeypatch.setattr(measured_batch, "_measure", lambda *args: measure(*args, work) if work else pytest.fail("measured again"))
        peer = PeerConfig(train_batch_size=None, output_dir=str(tmp_path), **options)
        return measured_batch.with_largest(peer, Joined(run or RunConfig(sync="none")), {}, device, rank, stopping).train_batch_size

    return asked


def test_what_was_told_before_the_kernel_killed_it_counts_and_is_remembered_for_the_same_options(ask, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert ask(killed_at_four) == 2 and "train_batch_size=2 is the largest that fits" in caplog.text
    assert ask(None) == 2 and "train_batch_size=2, as measured before" in caplog.text
    (tmp_path / "cache" / "train_batch_size.json").write_text("{")
    with pytest.raises(UserError, match="A step of 1 picture does not fit into the memory") as short:
        ask(nothing_fits)
    assert short.value.code == ExitCode.MEMORY and "--gradient_checkpointing" in short.value.fix
    assert ask(killed_at_four, gradient_checkpointing=True) == 2
    assert ask(killed_at_four, use_ema=True) == 2
    assert len(json.loads((tmp_path / "cache" / "train_batch_size.json").read_text())) == 2


def test_what_it_answers_by_is_this_peers_answer_and_a_stop_ends_it(ask, tmp_path):
    with pytest.raises(UserError, match=r"The model is not there\. Fetch it\."):
        ask(refused)
    assert ask(waits, stopping=lambda: True) == 1 and not (tmp_path / "cache").exists()


def test_what_measures_ends_with_a_trainer_that_is_killed(monkeypatch):
    told, tell = multiprocessing.Pipe(duplex=False)

    def measures(*_):
        tell.send(os.getpid())
        time.sleep(1000)

    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(measured_batch, "multiprocessing", SimpleNamespace(get_context=lambda kind: fork))
    monkeypatch.setattr(measured_batch, "choose_device", measures)
    trainer = fork.Process(target=measured_batch._measure, args=(PeerConfig(), Joined(RunConfig(sync="none")), {}, 1, lambda: False))
    trainer.start()
    tell.close()
    pid = told.recv()
    trainer.kill()
    trainer.join()
    try:
        assert told.poll(60), "it lives, and keeps its end of the pipe"
        with pytest.raises(EOFError):
            told.recv()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_what_was_told_before_ctrl_c_ended_it_is_no_measurement(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(measured_batch, "_LOOK_SECONDS", 60.0)
    heard = iter([False])
    assert ask(nothing_fits, stopping=lambda: next(heard, True)) == 1 and not (tmp_path / "cache").exists()


def test_what_cannot_be_remembered_is_used_with_a_warning(ask, tmp_path, caplog):
    (tmp_path / "cache").touch()
    assert ask(killed_at_four) == 2
    assert "train_batch_size=2 is the largest that fits, and is measured again at each start" in caplog.text and "File exists" in caplog.text


def test_several_ranks_and_xla_want_a_number(ask):
    for where in ({"rank": Rank(0, 2)}, {"device": torch.device("xla")}):
        with pytest.raises(UserError, match=r"--train_batch_size auto measures one GPU or CPU.*Give a number"):
            ask(None, **where)


def test_a_micro_batch_is_no_larger_than_a_round(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(measured_batch, "_measure", lambda peer, joined, given, most, stopping: asked.append(most) or most)
    for target, accumulation in ((1024, 1), (24, 4), (2, 4)):
        peer = PeerConfig(train_batch_size=None, output_dir=str(tmp_path), found=True, gradient_accumulation_steps=accumulation)
        measured_batch.with_largest(peer, Joined(RunConfig(target_batch_size=target)), {}, CPU, Rank(), lambda: False)
    assert asked == [64, 6, 1]


def test_what_averaging_takes_of_the_host_is_not_free(monkeypatch):
    monkeypatch.setattr("peer.sync.engine.memory.available_bytes", lambda: 2e9)
    params, peer = {"weight": torch.zeros(1_000_000)}, PeerConfig()
    assert measured_batch.free_bytes(peer, RunConfig(sync="none"), params) == 2e9
    left = measured_batch.free_bytes(peer, RunConfig(sync="parameters", wire="fp32"), params)
    assert 2e9 - 0.4e9 - 100e6 < left < 2e9 - 0.4e9 - 12e6  # the state twice, its mean, and parts of the others


def test_a_run_alone_is_as_long_as_the_measured_steps(tiny_model, tmp_path, monkeypatch, capsys):
    """Measured by real steps of a real process, which is forked: that it can be spawned is shown above."""
    monkeypatch.setattr(measured_batch, "multiprocessing", SimpleNamespace(get_context=lambda kind: _context()))
    monkeypatch.setattr(Stop, "listen", lambda self: self)  # the signals are pytest's
    monkeypatch.setattr(largest_batch, "MOST", 2)
    tiny.write_pictures(tmp_path / "pictures")
    flags = ["--model", tiny_model, "--train_data_dir", tmp_path / "pictures", "--output_dir", tmp_path / "out", "--resolution", 16]
    flags += ["--train_batch_size", "auto", "--max_train_steps", 3, "--device", "cpu", "--method", "lora"]
    assert main([*map(str, flags)]) == ExitCode.OK
    said = capsys.readouterr().err
    assert "train_batch_size=2 is the largest that fits" in said and "finished samples=6" in said


def test_auto_is_a_word_of_flags_and_files_and_1_until_it_is_measured(tmp_path, tiny_model, capsys):
    file = tmp_path / "run.toml"
    file.write_text('train_batch_size = "auto"\n')
    for argv in (["--train_batch_size", "auto"], ["--config", str(file)], ["--batch_size=AUTO"]):
        peer, _ = parse(["--model", str(tiny_model), "--train_data_dir", "y", *argv])
        assert peer.train_batch_size is None and peer.unmeasured.train_batch_size == 1
    assert PeerConfig(train_batch_size=3).unmeasured.train_batch_size == 3
    with pytest.raises(UserError, match="'many' is neither a whole number nor auto"):
        parse(["--train_batch_size", "many"])
    with pytest.raises(UserError, match="train_batch_size is 0"):
        PeerConfig(train_batch_size=0)
    assert main(["--model", str(tiny_model), "--train_data_dir", "y", "--train_batch_size", "auto", "--max_train_steps", "5", "--dry_run"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["peer"]["train_batch_size"] is None and printed["run"]["total_samples"] == 5
