import json
from pathlib import Path

import pytest
import torch

from peer.results.checkpoint import Checkpoints, about, of, read
from swarm.errors import UserError
from tests.warm import Warm

ROOT = Path(__file__).resolve().parents[3]


def state(value=1.0):
    shared = torch.arange(6.0)
    return {
        "weights": {"a.b": torch.full((2, 3), value), "bytes": torch.arange(5, dtype=torch.uint8), "view": shared[1:3], "whole": shared},
        "step": 7,
        3: [None, True, 1.5, "text", b"\x00\xff", (1, (2,))],
        "empty": {},
    }


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def test_a_state_comes_back_as_it_was(tmp_path):
    path = Checkpoints(tmp_path, keep=2).save(state(), {"round": 3})
    found, loaded = Checkpoints(tmp_path, keep=2).load("latest")
    assert found == path and equal(loaded, state()) and about(path) == {"round": 3}
    assert equal(Checkpoints(tmp_path, keep=2).load(str(path))[1], state())


def test_the_last_ones_are_kept_and_nothing_else_is_left(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for i in range(5):
        checkpoints.save(state(i), {"i": i})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["checkpoint-000004", "checkpoint-000005"]
    assert equal(checkpoints.load("latest")[1], state(4))


@pytest.mark.parametrize("keep", [1, 3, 4, 5, 10])
def test_as_many_are_kept_as_were_asked_for(tmp_path, keep):
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for i in range(12):
        checkpoints.save({"i": i}, {})
        assert len(checkpoints.paths()) == min(i + 1, keep)


def test_there_may_be_none_yet_but_one_that_is_named_must_be_there(tmp_path):
    assert Checkpoints(tmp_path, keep=2).load("latest") is None
    with pytest.raises(UserError, match="There is no checkpoint"):
        Checkpoints(tmp_path, keep=2).load(str(tmp_path / "checkpoint-000009"))


def test_a_name_alone_is_one_of_the_output_folder(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "out", keep=2)
    saved = checkpoints.save(state(3), {})
    assert checkpoints.load(saved.name)[0] == saved
    monkeypatch.chdir(tmp_path / "out")
    assert checkpoints.load(saved.name)[0] == saved


def test_ones_own_are_the_newest_whole_ones_of_the_same(tmp_path, caplog):
    ours, theirs = {"run": "a", "weights": "fp32"}, {"run": "b", "weights": "fp32"}
    mine = Checkpoints(tmp_path, 9, ours)
    assert mine.load_own() is None
    first, second = mine.save(state(1), {}), mine.save(state(2), {})
    other, bare = Checkpoints(tmp_path, 9, theirs).save(state(3), {}), Checkpoints(tmp_path, 9).save(state(4), {})
    found, loaded = mine.load_own()
    assert found == second and equal(loaded, state(2)) and of(second) == ours and of(bare) == {}
    assert f"ignored {other}: its run is b, not a" in caplog.messages
    assert f"ignored {bare}: its run is not said, not a, its weights is not said, not fp32" in caplog.messages
    flip(second / "tensors.safetensors", -1)
    assert mine.load_own()[0] == first and f"ignored {second}: damaged, tensors.safetensors is not what was written" in caplog.messages
    (first / "manifest.json").write_text("{")
    assert mine.load_own() is None


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped first", "flipped last", "torn", "missing"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(tmp_path, name, damage, caplog):
    checkpoints = Checkpoints(tmp_path, keep=2)
    good, bad = checkpoints.save(state(1), {}), checkpoints.save(state(2), {})
    file = bad / name
    if damage == "torn":
        file.write_bytes(file.read_bytes()[:-5])
    elif damage == "missing":
        file.unlink()
    else:
        flip(file, 0 if damage == "flipped first" else -1)
    assert checkpoints.load("latest")[0] == checkpoints.load(str(bad))[0] == good
    assert "damaged" in caplog.text and str(bad) in caplog.text
    flip(good / name, 0)
    with pytest.raises(UserError, match=r"No checkpoint in .* is whole"):
        checkpoints.load("latest")


def test_of_a_damaged_checkpoint_elsewhere_the_one_before_it_there_is_used(tmp_path, monkeypatch):
    ours, other = Checkpoints(tmp_path / "ours", keep=2), Checkpoints(tmp_path / "other", keep=3)
    ours.save(state(1), {})
    good, bad, _ = (other.save(state(number), {}) for number in (2, 3, 4))
    flip(bad / "state.json", 0)
    assert ours.load(str(bad))[0] == good
    monkeypatch.chdir(bad)
    assert ours.load(".")[0] == good
    flip(good / "state.json", 0)
    with pytest.raises(UserError, match=f"No checkpoint in {tmp_path / 'other'} is whole"):
        ours.load(str(bad))


def test_every_flipped_bit_of_the_manifest_is_noticed(tmp_path):
    path = Checkpoints(tmp_path, keep=2).save(state(), {"round": 1})
    whole = (path / "manifest.json").read_bytes()
    for position in range(len(whole)):
        flip(path / "manifest.json", position)
        try:
            assert equal(read(path), state()) and about(path) == {"round": 1}, position
        except Exception as error:
            assert type(error).__name__ == "Damaged", (position, error)
        (path / "manifest.json").write_bytes(whole)


def test_what_a_killed_process_left_half_written_is_ignored_and_cleared(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    (tmp_path / ".checkpoint-000001.writing").mkdir()
    (tmp_path / ".checkpoint-000001.writing" / "tensors.safetensors").write_bytes(b"half")
    assert checkpoints.load("latest") is None
    checkpoints.save(state(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from peer.results.checkpoint import Checkpoints
from swarm.errors import run_program
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # the system refuses to write more, as on a full disk
state = {"tensor": torch.zeros(100_000)} if sys.argv[2] == "tensors" else {"text": "x" * 200_000}
sys.exit(run_program(lambda: Checkpoints(Path(sys.argv[1]), keep=2).save(state, {}) and 0))
"""


@pytest.mark.parametrize("what", ["tensors", "text"])
def test_a_full_disk_is_a_one_line_error_that_leaves_the_checkpoint_before_intact(tmp_path, what):
    folder, log = tmp_path / "out", tmp_path / "log"
    Checkpoints(folder, keep=2).save(state(), {})
    assert Warm(["-c", FULL_DISK, str(folder), what], ROOT, log).wait(120) == 4, log.read_text()
    (line,) = log.read_text().splitlines()
    assert line.startswith("error:") and "could not be written" in line and "Free space" in line
    assert [path.name for path in folder.iterdir()] == ["checkpoint-000001"]
    assert equal(Checkpoints(folder, keep=2).load("latest")[1], state())


def test_checkpoints_hold_no_pickle(tmp_path):
    path = Checkpoints(tmp_path, keep=1).save(state(), {})
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "state.json", "tensors.safetensors"]
    json.loads((path / "state.json").read_text())
