"""Unlike machines in one run: each computes and keeps its weights in its own precision, some a hundred times as fast as others.

Real trainers in this process, each with its own sidecar and p2pd, averaging on loopback.
"""

import re
import time
from contextlib import ExitStack

import pytest
import torch

from peer.config import PeerConfig
from peer.launch.joining import Joined
from peer.launch.launch import Launch
from peer.machine.device import Rank, RankGroup
from peer.sync.engine.trainer import sidecar_process, swarm_sync
from peer.sync.engine.vectors import flatten
from peer.wiring import assemble
from swarm.run_config import RunConfig
from tests.peer.sync.swarm_tools import WAIT_SECONDS
from tests.warm import spawn_sidecar

ROUNDS = 2
SAMPLES = {"fp32": 1, "autocast": 100, "kept": 20, "cuda": 50}
"""Of each peer in a round, all of them in one local step."""
OPTIONS = {"fp32": {"mixed_precision": "no"}, "autocast": {"mixed_precision": "bf16"}, "kept": {"weights": "bf16"}, "cuda": {}}


class Machine:
    """One peer: the program's own trainer, one step of which the test takes at a time, and what it contributed to each round."""

    def __init__(self, kind, run, folder, pictures, address, company, closing):
        self.kind = kind
        device = torch.device("cuda" if kind == "cuda" else "cpu")
        peer = PeerConfig(
            train_data_dir=str(pictures), output_dir=str(folder / kind), train_batch_size=SAMPLES[kind], min_peers=company, found=not address,
            peers=(address,) if address else (), host_maddrs=("/ip4/127.0.0.1/tcp/0",), num_threads=1, **OPTIONS[kind],
        )  # fmt: skip
        joined = Joined(run, initial_peers=peer.peers)
        self.trainer, _ = assemble(
            Launch(joined=joined, peer=peer, group=RankGroup(Rank(), device), device=device, stopping=lambda: False, closing=closing)
        )
        self.sync, self.steps = self.trainer.sync._inner, iter(self.trainer.feed)
        self.work = self.sync._work
        self.contributions: list[tuple[int, torch.Tensor]] = []
        self.anchors = [self.anchor()]
        self.intended = torch.zeros(())
        """What the optimizer meant to change in its last step, before the weights were rounded to what they are kept in."""
        freeze, inner = self.work.freeze, getattr(self.trainer.optimizer, "_inner", self.trainer.optimizer)
        step = inner.step

        def frozen(number):
            made = freeze(number)
            self.contributions.append((made.samples, self.work._wire.decode(made.encoded.bytes()).double()))
            return made

        def stepped():
            before = self.position()
            step()
            self.intended = self.position() - before

        self.work.freeze, inner.step = frozen, stepped

    def anchor(self):
        buffer = self.work.state.vector(self.work._wire.size)
        assert buffer.dtype is torch.float32
        return buffer.clone()

    def position(self):
        return flatten(self.trainer.params, torch.empty(self.work._wire.size))

    def learn(self):
        work = next(self.steps)
        assert len(work.keys) == SAMPLES[self.kind]
        self.trainer._take(self.sync.step(len(work.keys), self.trainer._train(work)))

    def follow(self):
        return self.trainer._take(self.sync.step(0))


def together(machines, condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not all(condition(machine) for machine in machines):
        assert time.monotonic() < deadline, [(machine.kind, machine.sync.round) for machine in machines]
        for machine in machines:
            machine.follow()


@pytest.mark.swarm
@pytest.mark.parametrize(
    "kinds",
    [("fp32", "autocast", "kept"), pytest.param(("fp32", "cuda", "kept"), marks=pytest.mark.gpu)],
    ids=lambda kinds: "-".join(kinds),
)
def test_peers_of_unlike_precision_and_speed_end_each_round_with_one_float32_state(
    kinds, tiny_model, pictures, tmp_path, caplog, monkeypatch
):
    """The state is the mean of what they learned, weighted by samples: worked out again here, in float64."""
    monkeypatch.setattr(sidecar_process, "_spawn", spawn_sidecar)
    # They share one thread: with half a second for each look, the last one's offer may come later than a leader waits.
    monkeypatch.setattr(swarm_sync, "POLL_SECONDS", 0.02)
    total = sum(SAMPLES[kind] for kind in kinds)
    run = RunConfig(
        model=str(tiny_model), run_name="unlike", sync="parameters", wire="fp32", resolution=16, target_batch_size=total, learning_rate=1e-5,
        optimizer="adamw", lr_scheduler="constant", seed=7,
    )  # fmt: skip
    caplog.set_level("INFO")
    address = ""
    with ExitStack() as closing:
        machines = []
        for kind in kinds:
            machines.append(Machine(kind, run, tmp_path, pictures, address, len(kinds), closing))
            while not address:
                machines[0].sync.catch_up()
                address = next(iter(re.findall(r"--peers (/ip4/\S+)", caplog.text)), "")
        assert len({machine.work.state.digest for machine in machines}) == 1, "all begin with the base model, whatever they keep it in"
        together(machines, lambda machine: not machine.sync._must_wait())
        for number in range(1, ROUNDS + 1):
            for machine in machines:
                machine.learn()
            together(machines, lambda machine, number=number: machine.sync.round == number)
            for machine in machines:
                machine.anchors.append(machine.anchor())
            assert len({machine.work.state.digest for machine in machines}) == 1

            expected = sum(samples * learned for samples, learned in (machine.contributions[-1] for machine in machines)) / total
            header = machines[0].work.state.header
            assert sorted(member.samples for member in header.members) == sorted(SAMPLES[kind] for kind in kinds)
            before, after = (anchor.double() for anchor in machines[0].anchors[-2:])
            # One rounding of a weight to float32, and of its share in the mean.
            torch.testing.assert_close(after - before, expected, rtol=1e-5, atol=2e-7)
            assert expected.abs().max() > 1e-6, "nothing was learned"
            for machine in machines:
                learned = machine.contributions[-1][1]
                share = torch.dot(learned, machine.intended.double()) / machine.intended.double().square().sum()
                assert share == pytest.approx(1, abs=0.3), f"of what {machine.kind} meant to change, {share:.0%} came into the mean"
                # What is kept in bf16 lies within its last bit of the state, everything else on it. Where a step of 1e-5 leads to almost zero,
                # that bit is less than what float32 rounds off a number of a step's size: half an ulp is 2**-41, and several add up.
                exact = {"rtol": 2**-7, "atol": 4 * 2**-41} if machine.kind == "kept" else {"rtol": 1e-6, "atol": 1e-7}
                torch.testing.assert_close(machine.position(), machine.anchors[-1], **exact)
    for machine in machines:
        dtype = torch.bfloat16 if machine.kind == "kept" else torch.float32
        assert {parameter.dtype for parameter in machine.trainer.params.values()} == {dtype}
        assert machine.trainer.precision.dtype == (None if machine.kind == "fp32" else torch.bfloat16)
