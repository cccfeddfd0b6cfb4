"""What the benchmark of full-size models reads off a swarm: its steps' times, its memory, whether two results are one, and its last line."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import full_size
from benchmarks.figures import CLAIMS
from swarm.errors import ExitCode, UserError
from tests.conftest import ROOT
from tests.warm import Warm

LOG = """\
2026-11-26 22:07:01Z I peer.figures.metrics: step=1 samples=1 loss=1.079000
2026-11-26 22:07:04Z I peer.figures.metrics: step=2 samples=1 loss=1.080000
2026-11-26 22:07:05Z I peer.sync.engine.round.rounds: averaged round=1 peers=2
2026-11-26 22:07:14Z I peer.figures.metrics: step=3 samples=0 loss=-
2026-11-26 22:07:16Z I peer.figures.metrics: step=4 samples=1 loss=1.080000
"""


def test_the_time_of_a_step_is_that_between_two_lines_of_steps_with_no_round_between():
    assert full_size._between_steps(LOG) == [3.0, 2.0]
    assert full_size._between_steps("nothing was trained") == []


def test_two_results_are_equal_only_to_the_bit(tmp_path):
    weight = torch.tensor([1.0, 2.0])
    models = [tmp_path / name for name in ("one", "two", "three", "four")]
    others = (weight, weight.clone(), torch.nextafter(weight, weight + 1), weight)
    for number, (model, tensor) in enumerate(zip(models, others, strict=True)):
        model.mkdir()
        save_file({"other" if number == 3 else "layer": tensor}, model / "pytorch_lora_weights.safetensors")
    assert full_size.same_loras(models[:2]) is True
    assert full_size.same_loras([models[0], models[2]]) is False
    assert full_size.same_loras([models[0], models[3]]) is False


def test_all_pages_are_looked_at_only_when_the_kernel_counts_more_than_ever(monkeypatch):
    """A look at all pages of a whole UNet's peers twice a second took half a core from what it measured."""
    counted, looked = {1: 0, 2: 0}, []
    monkeypatch.setattr(full_size, "counted", counted.__getitem__)
    monkeypatch.setattr(full_size, "held", lambda pid: (looked.append(pid), (counted[pid] // 2, 8 << 30))[1])
    watch = full_size.Watch(SimpleNamespace(peers={"one": SimpleNamespace(pid=1), "two": SimpleNamespace(pid=2)}), 1.0)
    for one, two, looks in ((2.0, 1.0, 1), (2.1, 1.0, 1), (1.0, 2.0, 2), (1.9, 1.9, 3), (0.5, 0.5, 3)):
        counted[1], counted[2] = int(one * 2**30), int(two * 2**30)
        watch.look()
        assert len(looked) == 2 * looks
    assert watch.peak == pytest.approx(1.9) and watch.of == pytest.approx({"one": 1.0, "two": 1.0}) and watch.with_files == 16.0


def test_the_kernels_counters_are_at_least_what_is_held():
    code = "import sys; held = b'x' * (64 << 20); print(len(held), flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        counted = full_size.counted(process.pid)
        process.stdin.close()
    assert 64 << 20 < counted < 256 << 20 and full_size.counted(process.pid) == 0


def test_a_row_that_has_no_room_is_refused_before_it_begins(tmp_path, monkeypatch):
    rows = [*full_size.ROWS.values()]
    most = max(row.gib for row in rows)
    monkeypatch.setattr(full_size, "available_bytes", lambda: most * 2**30)
    monkeypatch.setattr(full_size.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1e12))
    full_size.check_room(rows, tmp_path)
    monkeypatch.setattr(full_size.shutil, "disk_usage", lambda folder: SimpleNamespace(free=20e9))
    full_size.check_room([full_size.ROWS["lora"]], tmp_path)
    with pytest.raises(UserError, match=f"assists: {tmp_path} has 20 GB free, and 60 are needed") as raised:
        full_size.check_room(rows, tmp_path)
    assert raised.value.code == ExitCode.DISK and "TMPDIR" in raised.value.fix
    monkeypatch.setattr(full_size, "available_bytes", lambda: (most - 1) * 2**30)
    with pytest.raises(UserError, match=r"assists: 12\.0 GiB of memory are free, and 13 are needed") as raised:
        full_size.check_room(rows, tmp_path)
    assert raised.value.code == ExitCode.MEMORY


@pytest.mark.parametrize("killed", [True, False])
def test_an_error_says_whether_the_kernel_killed_a_program_for_memory(killed):
    with pytest.raises(UserError, match="peer-2 ended with status 1") as raised, full_size._told_of_the_kernel(SimpleNamespace(look=lambda: killed)):
        raise UserError("peer-2 ended with status 1: its last words", fix="See its log.")
    assert ("for want of memory" in raised.value.message) == killed and (raised.value.code == ExitCode.MEMORY) == killed


def one(**said):
    return {"digests_equal": True, "loads": True, "seconds_per_step": 4.0, "peak_gib": 6.0, **said}


def test_the_last_line_has_the_worst_of_all_rows_and_the_page_of_figures_reads_it():
    told = full_size.of_all({"lora": one(seconds_per_step=9.0), "full": one(peak_gib=14.25)})
    assert told["digests_equal"] and told["loads"] and (told["seconds_per_step"], told["peak_gib"]) == (9.0, 14.25)
    claim = CLAIMS["full_size"]
    assert claim.met(told) and claim.figure(told) == "14.2 GiB for all peers of a swarm, 9 s a step"
    for broken in ({"digests_equal": False}, {"loads": False}, {"peak_gib": 20.5}):
        assert not claim.met(full_size.of_all({"lora": one(), "full": one(**broken)}))


@pytest.mark.swarm
@pytest.mark.timeout(900)
def test_a_peer_and_one_that_assists_train_a_whole_tiny_model_by_the_programs_own_commands(tmp_path):
    log = tmp_path / "log"
    words = ["benchmarks/full_size.py", "--tiny", "--rows", "full"]
    assert Warm(words, ROOT, log, forks=True).wait(840) == ExitCode.OK, log.read_text()
    told = json.loads(log.read_text().splitlines()[-1])
    assert told["tiny"] and told["digests_equal"] and told["loads"] and told["rows"]["full"]["rounds_shared"] > 0
    assert 0 < told["peak_gib"] <= told["rows"]["full"]["with_files_gib"] and len(told["rows"]["full"]["gib_of"]) == 2
