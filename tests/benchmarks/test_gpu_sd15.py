"""The GPU's benchmark where there is no GPU: its model's sizes, its rows with tiny weights, and rows that fail."""

import json
import multiprocessing
import operator
import sys

import pytest
import torch

from benchmarks import gpu_sd15, on_gpu
from benchmarks.gpu_sd15 import FULL, TINY, Row, Setup
from benchmarks.on_gpu import Way
from peer.launch.command_line import parse
from swarm.errors import ExitCode, UserError


def test_at_full_size_the_model_is_as_large_as_stable_diffusion_1_5():
    with torch.device("meta"):
        pipeline = gpu_sd15.build(FULL)
    sizes = {name: sum(p.numel() for p in getattr(pipeline, name).parameters()) for name in ("unet", "vae", "text_encoder")}
    assert sizes == {"unet": 859_520_964, "vae": 83_653_863, "text_encoder": 123_060_480}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_in_one_line_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_sd15.py"])
    assert gpu_sd15.main() == ExitCode.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: There is no GPU") and "--tiny --device cpu" in line
    with pytest.raises(UserError, match="not about"):
        gpu_sd15.check("cpu", FULL)


@pytest.mark.slow
def test_every_way_is_trained_by_the_program_with_tiny_weights(capsys, monkeypatch):
    """Once each. Compiling for a CPU takes four minutes: that way's flags are parsed, and `--compile` is test_trial_of_speed's matter."""
    ways = [row for row in gpu_sd15.rows() if row.batch == 1 and "--compile" not in row.flags]
    (compiled,) = [row for row in gpu_sd15.rows() if row.batch == 1 and "--compile" in row.flags]
    assert parse([*compiled.flags, "--model", "x", "--train_data_dir", "y"])[0].compile
    assert {row.name for row in ways} | {compiled.name} == {row.name for row in gpu_sd15.rows()}
    monkeypatch.setattr(gpu_sd15, "rows", lambda: ways)
    assert gpu_sd15.measure_all("cpu", TINY) == ExitCode.OK
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(one["row"], one["batch"]) for one in result["rows"]] == [(row.name, row.batch) for row in ways]
    assert all(one["images_per_second"] > 0 and one["loss"] < 10 and "note" not in one for one in result["rows"])
    assert result["fits"] == {"full on 12 GB": True, "LoRA on 8 GB": True} and result["tiny"]


def test_a_row_that_fails_says_why_and_the_next_goes_on(tmp_path, monkeypatch):
    setup = Setup(tmp_path, TINY, "cpu")
    gpu_sd15.prepare(setup)

    def answer(name, *flags, batch=1, card_gb=0, seconds=300):
        return on_gpu.in_a_process(gpu_sd15.way(Row(name, batch, flags, card_gb), setup), seconds)

    wrong = answer("wrong", "--optimizer", "none")
    assert wrong["failed"] and "optimizer" in wrong["note"]
    right = answer("right", *gpu_sd15.CACHES, batch=2, card_gb=12)
    assert right["images_per_second"] > 0 and right["cap_gib"] == 11 and "failed" not in right
    with monkeypatch.context() as patched:
        patched.setattr(on_gpu, "_answer", operator.truediv)
        died = answer("dies")
    assert died == {"note": "ended with exit status 1", "failed": True}
    slow = answer("slow", seconds=0)
    assert slow == {"note": "did not end within 0 s", "failed": True}


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")], ids=["torch", "cuda"]
)
def test_a_row_without_enough_memory_is_no_failure(monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(on_gpu, "measure", full)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        on_gpu._answer(theirs, Way("full on 12 GB", (), "cpu", cap_gib=11))
        assert ours.recv() == {"cap_gib": 11, "note": "out of memory"}


def test_the_verdict_compares_with_the_figures_of_others_and_says_what_fits():
    found = [
        {"row": "full on 12 GB", "batch": 1, "images_per_second": 2.0, "cap_gib": 11.0},
        {"row": "LoRA on 8 GB", "batch": 1, "note": "out of memory", "cap_gib": 7.0},
        {"row": "8-bit", "batch": 4, "images_per_second": 9.2},
        {"row": "8-bit, caches", "batch": 16, "images_per_second": 18.0},
    ]
    verdict = gpu_sd15.verdict(found)
    assert verdict == {
        "ratio_to_the_original": {"4": 2.0},
        "best_ratio_to_mosaic": 0.5,
        "fits": {"full on 12 GB": True, "LoRA on 8 GB": False},
    }
    assert gpu_sd15.in_table(found[2])["A100 then"] == 4.6 and gpu_sd15.in_table(found[3])["A100 then"] == ""
