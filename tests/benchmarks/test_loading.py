"""What a model takes of a process's own memory while it is loaded: with a tiny one, and the most of a while."""

import json
import mmap
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import loading
from swarm.errors import ExitCode, UserError
from tests import warm


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """The processes of its own are forked, which have what takes 13 CPU s to import."""
    code = "import sys; from benchmarks import loading; sys.exit(loading.main())"
    forking = SimpleNamespace(run=lambda words, **_: warm.run(code, *words[2:]))
    monkeypatch.setattr(loading, "subprocess", forking)  # of that module alone: others start git


def test_each_way_to_hold_a_model_answers_for_a_process_of_its_own(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["loading", "--tiny"])
    monkeypatch.setattr(loading, "WAYS", {"bf16": "auto", "int8 on disk": "int8"})
    assert loading.main() == ExitCode.OK
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["once"] == {"bf16": True, "int8 on disk": True} and told["tiny"]
    plain, disk = told["rows"]
    assert plain["files"] > 0 and plain["made"] > 0 and disk["made"] == 0


def test_a_way_that_fails_ends_the_benchmark_with_its_reason(tmp_path):
    with pytest.raises(UserError, match="'bf16' ended with status"):
        loading.in_a_process("bf16", tmp_path / "nothing")


def test_the_most_is_what_was_there_in_between():
    with loading.Most() as most:
        begun = most.bytes
        with mmap.mmap(-1, 100 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:  # not of the heap, which keeps what is freed
            for page in range(0, len(held), mmap.PAGESIZE):
                held[page] = 1
            most.look()
    assert most.bytes >= begun + (99 << 20)


def test_tied_weights_are_written_once(tmp_path):
    with torch.device("meta"):
        part = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False))
        part[1].weight = part[0].weight
    given = loading.in_files(part, tmp_path)
    assert given[0].weight is given[1].weight and given[0].weight.dtype is torch.bfloat16 and given[0].weight.std() > 0.01
    assert not [*tmp_path.iterdir()], "its files have no names"
