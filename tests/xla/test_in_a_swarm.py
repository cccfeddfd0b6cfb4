"""A peer on XLA devices, and one of the usual environment on its CPU, train one model."""

import sys

import pytest

from tests import test_swarm
from tests.conftest import ROOT
from tests.test_swarm import TWO, Cold, Swarm, counted

ORDINARY = ROOT / ".venv" / "bin" / "python"


@pytest.fixture
def swarm(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(test_swarm, "WAIT_SECONDS", 1500.0)
    made = Swarm(tmp_path, tiny_model)
    yield made
    made.close()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sync", ["diloco", "gradients"])
def test_an_xla_peer_and_a_cpu_peer_hold_equal_states_after_each_round_of_both(swarm, sync, monkeypatch):
    host = swarm.host("--sync", sync)
    chips = swarm.peer("chips", "--device", "xla", "--datasetserver", host.url, *TWO, kind=Cold)
    with monkeypatch.context() as other:
        if ORDINARY.exists():  # as in life: another PyTorch
            other.setattr(sys, "executable", str(ORDINARY))
        cores = swarm.peer("cores", "--device", "cpu", "--datasetserver", host.url, *TWO, kind=Cold)
    both = lambda: sum(len(line["members"]) == 2 for line in cores.rounds())  # noqa: E731
    swarm.wait("three rounds of both", lambda: both() >= 3)
    assert "device=xla devices=4 (CPU)" in chips.text() and "device=cpu" in cores.text()
    for peer in (chips, cores):
        peer.stop()
    assert (chips.finish(), cores.finish()) == (0, 0), chips.text() + cores.text()

    swarm.check()
    here, there = ({line["round"]: line["digest"] for line in peer.rounds()} for peer in (chips, cores))
    shared = here.keys() & there.keys()
    assert len(shared) >= 3 and all(here[number] == there[number] for number in shared)
    assert "Traceback" not in chips.text() + cores.text()
    assert swarm.orphans() == []
    assert counted(host) > 0
