"""The ranks of one launch are one peer: real processes, a real process group."""

import json
from pathlib import Path

import torch

from peer.contracts import SyncReport
from peer.loop.all_ranks import RankedSync
from peer.watchdog.trainer_process import _places
from tests.conftest import ROOT
from tests.warm import Warm

RANKS = 3


def test_every_rank_ends_every_round_with_equal_bits(tmp_path):
    program, logs = str(Path(__file__).with_name("ranked_program.py")), [tmp_path / f"{rank}.log" for rank in range(RANKS)]
    ranks = [Warm([program], ROOT, log, env=place) for log, place in zip(logs, _places(RANKS), strict=True)]
    assert [rank.wait(240) for rank in ranks] == [0] * RANKS, "".join(log.read_text() for log in logs)[-3000:]
    lines = [json.loads(line) for line in logs[0].read_text().splitlines() if line.startswith("{")]
    assert [line["call"] for line in lines] == ["catch_up", *["step"] * 10, "withdraw", "load_state_dict", "leave"]
    assert [line["round"] for line in lines] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 6]
    for line in lines:
        assert len(line["digests"]) == RANKS and len(set(line["digests"])) == 1, line
    assert len({line["digests"][0] for line in lines}) == len(lines), "every call changed something"


class Counting:
    """Rank 0's view of a group: how often it sent the parameters."""

    is_main = True
    sent = 0

    def broadcast_object(self, value):
        return value

    def broadcast_(self, tensors):
        self.sent += 1


class Waiting:
    """A strategy that has nothing to do but to wait."""

    round = samples = 0
    peers, digest = 1, "ours"

    def step(self, samples, loss=None):
        return SyncReport(wait=True)

    def state_dict(self):
        return {"digest": self.digest}


def test_the_parameters_are_sent_when_they_changed_and_not_at_each_question_of_a_peer_that_waits():
    group, swarm = Counting(), Waiting()
    sync = RankedSync(swarm, group, {"w": torch.nn.Parameter(torch.zeros(1))})
    assert all(sync.step(0).wait for _ in range(5)) and group.sent == 0
    ask = swarm.step

    def adopt(samples, loss=None):
        swarm.digest = "another branch's, of the same round and as many samples"
        return ask(samples)

    swarm.step = adopt
    assert [sync.step(0), sync.step(0)] == [SyncReport(wait=True)] * 2 and group.sent == 1


def test_rank_0_is_waited_for_at_the_start_and_while_it_writes_and_else_as_long_as_the_timeout(tmp_path):
    program, logs = str(Path(__file__).with_name("patient_program.py")), [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = [Warm([program], ROOT, log, env=place) for log, place in zip(logs, _places(2), strict=True)]
    assert [rank.wait(120) for rank in ranks] == [0, 0], "".join(log.read_text() for log in logs)[-3000:]
    started, written, lost = logs[1].read_text().splitlines()[-3:]
    assert (started, written) == ("started", "written") and lost.startswith("Another rank of this launch ended or hangs")
