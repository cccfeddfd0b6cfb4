"""IPEX 2.8 under PyTorch 2.8: it trains as PyTorch does, and the tensors that the swarm, checkpoints and the optimizer hold stay what they are."""

import json
import re
from contextlib import ExitStack

import pytest
import torch

from peer.config import PeerConfig
from peer.launch.joining import Joined
from peer.launch.launch import Launch
from peer.machine.device import Rank, RankGroup
from peer.results.checkpoint import Checkpoints
from peer.wiring import assemble
from swarm.run_config import RunConfig
from tests.peer.test_finetune import finish, start

CPU = torch.device("cpu")


@pytest.fixture
def flags(tiny_model, pictures):
    return [
        "--train_data_dir",
        pictures,
        "--model",
        tiny_model,
        "--resolution",
        16,
        "--num_threads",
        1,
        "--train_batch_size",
        4,
        "--lr",
        1e-3,
    ]


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-3), ("bf16", 0.03)])
def test_it_trains_as_pytorch_does(flags, tmp_path, precision, tolerance):
    losses = {}
    for name, more in (("native", ()), ("ipex", ("--ipex",))):
        out = tmp_path / name
        code, _, err = finish(start(*flags, "--output_dir", out, "--mixed_precision", precision, "--total_samples", 80, *more), seconds=400)
        assert code == 0, err
        assert ("IPEX is used: its gradients of the first batch are right" in err) == (name == "ipex")
        losses[name] = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        _, state = Checkpoints(out, keep=2).load("latest")
        assert {tensor.dtype for tensor in state["params"].values()} == {torch.float32}
    assert losses["ipex"] == pytest.approx(losses["native"], rel=tolerance) and len(losses["ipex"]) == 2


def test_a_swarms_state_is_made_of_what_it_trained(flags, tmp_path):
    out = tmp_path / "out"
    swarm = ["--found", "--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--total_samples", 32, "--target_batch_size", 16]
    code, _, err = finish(start(*flags, *swarm, "--output_dir", out, "--mixed_precision", "bf16", "--ipex"), seconds=400)
    assert code == 0, err
    assert "IPEX is used" in err and re.search(r"finished samples=\d+ round=2 ", err), err
    _, state = Checkpoints(out, keep=2).load("latest")
    assert {tensor.dtype for tensor in state["params"].values()} == {torch.float32}


def test_parameters_stay_the_same_float32_tensors(tiny_model, pictures, tmp_path):
    run = RunConfig(sync="none", resolution=16, total_samples=12, learning_rate=1e-3, model=str(tiny_model))
    peer = PeerConfig(train_data_dir=str(pictures), output_dir=str(tmp_path / "out"), train_batch_size=4, mixed_precision="bf16", ipex=True)
    with ExitStack() as closing:
        launch = Launch(joined=Joined(run), peer=peer, group=RankGroup(Rank(), CPU), device=CPU, stopping=lambda: False, closing=closing)
        trainer, _ = assemble(launch)
        before = {name: (parameter, parameter.data_ptr()) for name, parameter in trainer.params.items()}
        values = {name: parameter.detach().clone() for name, parameter in trainer.params.items()}
        trainer.run()
    for name, parameter in trainer.params.items():
        assert (parameter, parameter.data_ptr()) == before[name] and parameter.dtype == torch.float32 and parameter.is_contiguous()
    assert any(not torch.equal(parameter, values[name]) for name, parameter in trainer.params.items())
