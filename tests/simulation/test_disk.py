"""The simulated disk does what real ones do at their worst, and no worse."""

import random

import pytest

from simulation.disk import Disk
from swarm import files


def written(disk, name, data, *, synced=True, renamed_durably=True):
    path = disk.root() / name
    with path.with_suffix(".tmp").open("wb") as file:
        file.write(data)
        if synced:
            files.sync(file)
    path.with_suffix(".tmp").replace(path)
    if renamed_durably:
        files.flush(disk.root())
    return path


@pytest.mark.parametrize("seed", range(20))
def test_what_was_flushed_survives_a_power_cut(seed):
    disk = Disk(random.Random(seed))
    path = written(disk, "a.state", b"all of it")
    disk.crash(power=True)
    assert path.read_bytes() == b"all of it"


def test_what_was_not_flushed_is_lost_torn_or_there():
    found = set()
    for seed in range(200):
        disk = Disk(random.Random(seed))
        written(disk, "a.state", b"old")
        path = written(disk, "a.state", b"newer", synced=False, renamed_durably=False)
        disk.crash(power=True)
        found.add(path.read_bytes())
    assert b"old" in found and b"newer" in found
    assert any(b"newer".startswith(data) and data not in (b"", b"newer") for data in found), "torn"


def test_a_killed_process_loses_nothing_that_it_had_written():
    disk = Disk(random.Random(1))
    path = written(disk, "a.state", b"old", synced=False, renamed_durably=False)
    disk.crash(power=False)
    assert path.read_bytes() == b"old"


def test_a_job_that_is_killed_got_to_some_point_of_what_it_wrote():
    found = set()
    for seed in range(100):
        disk = Disk(random.Random(seed))
        written(disk, "a.state", b"old")
        with disk.job() as job:
            path = written(disk, "a.state", b"new")
        disk.crash([job], power=False)
        found.add((path.read_bytes(), (disk.root() / "a.tmp").exists()))
    assert found >= {(b"old", False), (b"old", True), (b"new", False)}


def test_a_file_may_rot_until_nothing_is_left_of_it():
    for seed in range(20):
        disk, rng = Disk(random.Random(seed)), random.Random(seed)
        path = written(disk, "a.state", b"header\nvalues")
        for _ in range(20):
            before, how = path.read_bytes(), rng.choice(["line", "values", "end"])
            disk.rot(str(path), how)
            after = path.read_bytes()
            assert (before.startswith(after) and len(after) < len(before) if how == "end" else len(after) == len(before)) or not before
            assert before != after or not before


def test_a_full_disk_takes_nothing_and_keeps_what_it_has():
    disk = Disk(random.Random(1))
    path = written(disk, "a.state", b"old")
    disk.full = True
    with pytest.raises(OSError, match="No space"):
        written(disk, "a.state", b"new")
    assert path.read_bytes() == b"old" and files.free_bytes(disk.root()) == 0


def test_an_open_file_is_readable_after_it_was_deleted():
    disk = Disk(random.Random(1))
    path = written(disk, "a.state", b"line\nrest")
    file = path.open("rb")
    path.unlink()
    assert file.readline() == b"line\n" and files.left(file) == 4 and files.read_at(file, 2, 5) == b"re"
    assert not path.exists()


def test_a_file_is_replaced_whole_or_not_at_all():
    for seed in range(50):
        disk = Disk(random.Random(seed))
        path = disk.root() / "number"
        files.replace(path, b"1")
        with disk.job() as job:
            files.replace(path, b"2")
        disk.crash([job], power=True)
        assert path.read_bytes() in (b"1", b"2")


def test_what_another_process_wrote_beside_a_job_stays_when_that_is_killed():
    for seed in range(50):
        disk = Disk(random.Random(seed))
        with disk.job() as job:
            files.replace(disk.root() / "a.state", b"new")
        files.replace(disk.root() / "number", b"3")
        disk.crash([job], power=True)
        assert (disk.root() / "number").read_bytes() == b"3"


def test_what_is_added_to_a_file_is_told_also_where_there_is_no_room_for_it():
    disk, told = Disk(random.Random(1)), []
    disk.appended = lambda path, data: told.append((path, data))
    disk.full = True
    with pytest.raises(OSError, match="No space"), (disk.root() / "rounds.jsonl").open("a") as file:
        file.write("line\n")
    assert told == [("/rounds.jsonl", b"line\n")]


def test_of_lines_added_to_a_file_a_power_cut_takes_none_that_was_flushed():
    found = set()
    for seed in range(100):
        disk = Disk(random.Random(seed))
        path = disk.root() / "rounds.jsonl"
        for line in ("one\n", "two\n"):
            with path.open("a") as file:
                file.write(line)
            if line == "one\n":
                files.flush(path)
                files.flush(path.parent)
        disk.crash(power=True)
        found.add(path.read_bytes())
    assert found == {b"one\n" + b"two\n"[:kept] for kept in range(5)}
