"""Files that are there in whole or not at all, on disks that fail."""

import errno

import pytest

from swarm import files


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("fails", ["swarm.files.sync", "pathlib.Path.replace"])
@pytest.mark.parametrize("before", [b"old", None])
def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, fails, before):
    path = tmp_path / "state.json"
    if before:
        files.replace(path, before)
    with monkeypatch.context() as broken, pytest.raises(OSError, match="No space left"):
        broken.setattr(fails, full)
        files.replace(path, b"new")
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == ({"state.json": before} if before else {})
    files.replace(path, b"new")
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == [b"new"]
