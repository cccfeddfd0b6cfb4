"""rounds.jsonl: a run of years does not fill the disk with it."""

import json
import random
from types import SimpleNamespace

import pytest

from peer.contracts import CommittedRound, Member
from peer.sync.engine.round import rounds_file
from peer.sync.engine.round.rounds_file import EARLIER, flush_rounds, read_rounds, write_round
from simulation.disk import Disk


@pytest.fixture(params=range(20))
def disk(request):
    return Disk(random.Random(request.param))


def state(number):
    return SimpleNamespace(header=SimpleNamespace(round=number, samples=64 * number, parents=(), members=()), digest="ab" * 32)


def rounds_in(path):
    return [json.loads(line)["round"] for line in path.read_text().splitlines()]


def test_a_long_file_is_set_aside_once_and_a_new_one_begun(tmp_path, monkeypatch):
    path = tmp_path / "rounds.jsonl"
    write_round(path, state(0), "averaged", 2, "one", 1.7e9)
    monkeypatch.setattr(rounds_file, "_MOST_BYTES", 5 * path.stat().st_size // 2)  # a line is sometimes a digit longer
    for number in range(1, 8):
        write_round(path, state(number), "averaged", 2, "one", 1.7e9)
    assert rounds_in(tmp_path / EARLIER) == [3, 4, 5] and rounds_in(path) == [6, 7], "the newest are there without a gap"
    assert {each.name for each in tmp_path.iterdir()} == {path.name, EARLIER}


def test_of_the_rounds_before_a_saved_state_a_power_cut_takes_none(disk):
    path = disk.root() / "rounds.jsonl"
    for number in (1, 2):
        write_round(path, state(number), "solo", 1, "one", 1.7e9)
    flush_rounds(path)
    write_round(path, state(3), "solo", 1, "one", 1.7e9)
    disk.crash(power=True)
    assert [json.loads(line)["round"] for line in path.read_bytes().splitlines()[:2]] == [1, 2]
    flush_rounds(disk.root() / "nothing.jsonl")


def test_after_a_line_that_a_power_cut_tore_the_next_one_is_read(disk):
    path = disk.root() / "rounds.jsonl"
    write_round(path, state(1), "solo", 1, "one", 1.7e9)
    flush_rounds(path)
    write_round(path, state(2), "solo", 1, "one", 1.7e9)
    disk.crash(power=True)
    for number in (3, 4):
        write_round(path, state(number), "solo", 1, "one", 1.7e9)
    found = [each.round for each in read_rounds(path)]
    assert found in ([1, 3, 4], [1, 2, 3, 4]) and b"\n\n" not in path.read_bytes()


def test_a_line_is_never_glued_to_one_that_a_full_disk_tore(tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b'{"round": 1, "samp')
    write_round(path, state(2), "solo", 1, "one", 1.7e9)
    assert [each.round for each in read_rounds(path)] == [2]


def test_of_a_file_that_is_set_aside_a_power_cut_takes_nothing(disk, monkeypatch):
    path = disk.root() / "rounds.jsonl"
    for number in (1, 2, 3):
        monkeypatch.setattr(rounds_file, "_MOST_BYTES", 100 if number == 3 else 1 << 20)
        write_round(path, state(number), "solo", 1, "one", 1.7e9)
    flush_rounds(path)
    disk.crash(power=True)
    assert rounds_in(disk.root() / EARLIER) == [1, 2] and [each.round for each in read_rounds(path)] == [1, 2, 3]


def test_the_last_rounds_are_read_across_the_border_of_the_file_that_was_set_aside(tmp_path, monkeypatch):
    path, other = tmp_path / "rounds.jsonl", tmp_path / "other.jsonl"
    write_round(other, state(19), "solo", 1, "one", 1.7e9)
    size = other.stat().st_size  # of the longest line
    monkeypatch.setattr(rounds_file, "_MOST_BYTES", 5 * size)
    monkeypatch.setattr(rounds_file, "_READ_BYTES", 4 * size)
    for number in range(1, 20):
        write_round(path, state(number), "solo", 1, "one", 1.7e9)
        found = [each.round for each in read_rounds(path)]
        assert found == [*range(number - len(found) + 1, number + 1)] and len(found) >= min(number, 3)


def test_a_peer_that_comes_back_reads_the_last_rounds_that_it_wrote_whole(tmp_path, monkeypatch):
    path, members = tmp_path / "rounds.jsonl", (Member("one", 1, 8), Member("two", 3, 4))
    monkeypatch.setattr(rounds_file, "_READ_BYTES", 1000)  # four of the lines, and the end of a fifth
    for number in range(10):
        header = SimpleNamespace(round=number, samples=12 * number, parents=(f"{number - 1:064x}",), members=members)
        write_round(path, SimpleNamespace(header=header, digest=f"{number:064x}"), "averaged", 2, "one", 1.7e9)
    with path.open("a") as file:
        file.write('{"round": 10, "samples')
    rounds = read_rounds(path)
    assert rounds[-1] == CommittedRound(f"{9:064x}", f"{8:064x}", 9, 108, members)
    assert [each.round for each in rounds] == list(range(10 - len(rounds), 10)) and 2 <= len(rounds) <= 4
    assert read_rounds(tmp_path / "nothing.jsonl") == []
