"""rounds.jsonl: a run of years does not fill the disk with it."""

import json
from types import SimpleNamespace

from peer.sync.engine.round import rounds_file
from peer.sync.engine.round.rounds_file import EARLIER, write_round


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
