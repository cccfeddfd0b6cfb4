"""Every local optimizer of the table: it learns, goes on from its checkpoint, is as large as said, and means the same in a swarm."""

import dataclasses
import importlib.metadata
from configparser import ConfigParser
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from peer.loop import optim
from peer.loop.optim import build_optimizer, check_here, told
from peer.loop.rounding import RoundingOptimizer, keep_in_bf16
from peer.loop.train import load_moments
from peer.results.checkpoint import Checkpoints
from peer.rooms import load_part
from swarm.errors import UserError
from swarm.run.optimizer import OPTIMIZERS, default_rate
from swarm.run_config import RunConfig
from tests.conftest import ROOT
from tests.peer.loop.test_optim import assert_same, tensors
from tests.peer.sync.test_strategies import Replica, commit

CPU = torch.device("cpu")
INPUTS = torch.randn(256, 48, generator=torch.Generator().manual_seed(3))
TRUTH = torch.randn(48, 96, generator=torch.Generator().manual_seed(4)) / 7


def net():
    """Matrices of more than 4,096 numbers, which bitsandbytes keeps in 8 bits, and a vector; the second is a text encoder's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = nn.Linear(48, 96), nn.Linear(96, 96, bias=False)
    params = {"unet.weight": first.weight, "unet.bias": first.bias, "text_encoder.weight": second.weight}
    return params, lambda: (second(first(INPUTS)) - INPUTS @ TRUTH).square().mean()


def run_with(name, **options):
    rate = default_rate(name, 3e-3)
    return RunConfig(optimizer=name, learning_rate=rate, adam_weight_decay=0.0, **options)


def learn(optimizer, loss, steps):
    losses = []
    for _ in range(steps):
        with getattr(optimizer, "gradient_point", nullcontext)():
            value = loss()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(value.detach()))
    return losses


def test_every_optimizer_of_the_table_can_be_built():
    assert optim._BUILDERS.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_learns_at_its_usual_rate_and_not_without_its_step(name):
    params, loss = net()
    optimizer = build_optimizer(run_with(name), params, CPU)
    learn(optimizer, loss, 100)
    with torch.no_grad():
        learned = loss()
    (params, loss), begun = net(), 1.0872
    optimizer = build_optimizer(run_with(name), params, CPU)
    optimizer.step = lambda: None
    assert learn(optimizer, loss, 3) == [pytest.approx(begun, abs=1e-4)] * 3
    assert learned < 0.5 * begun


@pytest.mark.parametrize(("kind", "shape"), [(0, (256, 256)), (1, (96, 96, 3, 3))])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_its_state_takes_the_memory_that_the_table_says(name, kind, shape):
    params = {"unet.weight": nn.Parameter(torch.ones(shape))}
    optimizer = build_optimizer(run_with(name), params, CPU)
    params["unet.weight"].grad = torch.full(shape, 0.1)
    with getattr(optimizer, "gradient_point", nullcontext)():
        optimizer.step()
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors(optimizer.state_dict()))
    assert held / params["unet.weight"].numel() == pytest.approx(OPTIMIZERS[name].state_bytes[kind], abs=0.15)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_goes_on_from_its_checkpoint_to_the_bit(name, tmp_path):
    run = run_with(name, **({} if OPTIMIZERS[name].finds_rate else {"train_text_encoder": True, "text_encoder_lr": 1e-3}))
    (params, loss), (others, other_loss) = net(), net()
    optimizer, other = (build_optimizer(run, each, CPU) for each in (params, others))
    learn(optimizer, loss, 3)
    Checkpoints(tmp_path, keep=1).save({"optimizer": optimizer.state_dict()}, {})
    other.load_state_dict(Checkpoints(tmp_path, keep=1).load("latest")[1]["optimizer"])
    with torch.no_grad():
        for parameter, its in zip(params.values(), others.values(), strict=True):
            its.copy_(parameter)
    assert told(other) == told(optimizer)
    assert learn(optimizer, loss, 3) == learn(other, other_loss, 3)
    assert_same(other.state_dict(), optimizer.state_dict())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(params.values(), others.values(), strict=True))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_that_changed_since_its_checkpoint_count_and_what_it_found_stays(name, bf16):
    if bf16 and not OPTIMIZERS[name].by_tensor:
        return
    changed = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6} if OPTIMIZERS[name].reads else {}
    (params, loss), (others, _) = net(), net()
    optimizer, new = build_optimizer(run_with(name), params, CPU), dataclasses.replace(run_with(name), adam_weight_decay=0.05, **changed)
    other, fresh = build_optimizer(new, others, CPU), build_optimizer(new, net()[0], CPU)
    learn(optimizer, loss, 3)
    if bf16:
        optimizer, other = RoundingOptimizer(optimizer, "seed"), RoundingOptimizer(other, "seed")
        keep_in_bf16(others)
    load_moments(other, optimizer.state_dict())
    for before, now, asked in zip(optimizer.param_groups, other.param_groups, fresh.param_groups, strict=True):
        for option in ("weight_decay", "betas", "eps"):
            assert now.get(option) == asked.get(option)
        counted = before.keys() - {"params", "weight_decay", "betas", "eps"}
        assert {key: now[key] for key in counted} == {key: before[key] for key in counted}


@pytest.mark.parametrize("name", [name for name, facts in OPTIMIZERS.items() if facts.by_tensor])
def test_with_bf16_weights_it_steps_every_group_of_parameters_in_the_mean_as_far(name, monkeypatch):
    monkeypatch.setattr("peer.loop.rounding._AT_ONCE", 5000)  # a chunk for each tensor
    run = run_with(name, train_text_encoder=True, text_encoder_lr=1e-3)

    def moved(in_bf16):
        params, _ = net()
        before = {key: parameter.detach().clone() for key, parameter in params.items()}
        if in_bf16:
            keep_in_bf16(params)
            before = {key: parameter.detach().float() for key, parameter in params.items()}
        optimizer = build_optimizer(run, params, CPU)
        optimizer = RoundingOptimizer(optimizer, "seed") if in_bf16 else optimizer
        rng = torch.Generator().manual_seed(1)
        for _ in range(5):
            for parameter in params.values():
                parameter.grad = torch.randn(parameter.shape, generator=rng).to(parameter.dtype)
            optimizer.step()
        assert all(parameter.dtype == (torch.bfloat16 if in_bf16 else torch.float32) for parameter in params.values())
        return {key: parameter.detach().float() - before[key] for key, parameter in params.items()}

    full, rounded = moved(False), moved(True)
    for key in full:
        assert torch.nn.functional.cosine_similarity(full[key].flatten(), rounded[key].flatten(), dim=0) > 0.9, key
        assert float(rounded[key].norm()) == pytest.approx(float(full[key].norm()), rel=0.1)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", [name for name, facts in OPTIMIZERS.items() if facts.by_tensor])
def test_the_state_of_bf16_weights_is_loaded_in_float32_and_none_of_the_weights_with_it(name, fails, monkeypatch):
    (params, _), (others, _) = net(), net()
    keep_in_bf16(params)
    keep_in_bf16(others)
    optimizer, other = (RoundingOptimizer(build_optimizer(run_with(name), some, CPU), "seed") for some in (params, others))
    for parameter in params.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before, load, seen = {key: (p.data_ptr(), p.detach().clone()) for key, p in others.items()}, other._inner.load_state_dict, []

    def loading(state):
        seen.extend((parameter.dtype, parameter.numel()) for parameter in others.values())
        load(state)
        if fails:
            raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(other._inner, "load_state_dict", loading)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        load_moments(other, optimizer.state_dict())
    assert set(seen) == {(torch.float32, 0)}
    assert {key: p.data_ptr() for key, p in others.items()} == {key: place for key, (place, _) in before.items()}
    assert all(torch.equal(p, before[key][1]) and p.dtype is torch.bfloat16 for key, p in others.items())
    assert_same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("name", [name for name, facts in OPTIMIZERS.items() if not facts.by_tensor])
def test_one_that_steps_all_at_once_refuses_bf16_weights(name):
    with pytest.raises(UserError, match=r"--weights bf16 steps some at a time.*Remove --weights"):
        check_here(run_with(name), "bf16", CPU)
    check_here(run_with(name), "fp32", CPU)


@pytest.mark.parametrize(("has_bf16", "weights", "warned"), [(False, "bf16", True), (False, "fp32", False), (True, "bf16", False)])
def test_who_asks_for_bf16_weights_on_a_gpu_that_emulates_bf16_is_warned(monkeypatch, caplog, has_bf16, weights, warned):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or has_bf16)
    check_here(run_with("adamw"), weights, torch.device("cuda"))
    assert ("this GPU has no bf16 and emulates it" in caplog.text) == warned


@pytest.mark.parametrize("name", [name for name, facts in OPTIMIZERS.items() if facts.package])
@pytest.mark.parametrize("there", [None, "0.0.1"])
def test_a_package_that_is_missing_or_too_old_is_named_with_the_command_that_installs_it(name, there, monkeypatch):
    def version(package):
        if there is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return there

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError) as caught:
        check_here(run_with(name), "fp32", CPU)
    assert f"pip install '{OPTIMIZERS[name].package}'" in str(caught.value) and "\n" not in str(caught.value)


def test_the_packages_are_those_that_setup_asks_for():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extra = set(setup["options.extras_require"]["optimizers"].split())
    always = setup["options"]["install_requires"].split()
    needed = {facts.package for facts in OPTIMIZERS.values() if facts.package}
    assert extra == {package for package in needed if not package.startswith("bitsandbytes")}
    assert min(package for package in needed if package.startswith("bitsandbytes")) in always


def test_the_page_says_of_each_what_the_table_does():
    page = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    for name, facts in OPTIMIZERS.items():
        state = ", ".join(f"{count:g}" for count in facts.state_bytes)
        rate = "1" if facts.finds_rate else "M" if facts.of_method == 1 else f"M / {1 / facts.of_method:g}"
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` | {facts.title} | {state} | {rate} | ")]
        assert f"`{facts.package}`" in row or not facts.package


def test_an_old_torch_is_told_where_muon_is_not_there(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UserError, match=r"Muon needs torch 2\.9 or later, and this is .*pip install --upgrade torch"):
        check_here(run_with("muon"), "fp32", CPU)


def test_muon_steps_matrices_and_adamw_convolutions_vectors_and_embeddings():
    matrices = {"a.weight": (8, 4), "a.lora_A.default.weight": (2, 8), "time_embedding.linear_1.weight": (4, 4)}
    rest = {"a.bias": (8,), "conv.weight": (8, 4, 3, 3), "text_encoder.token_embedding.weight": (9, 4), "context_embedder.weight": (4, 4)}
    params = {name: nn.Parameter(torch.ones(shape)) for name, shape in {**matrices, **rest}.items()}
    names = {id(parameter): name for name, parameter in params.items()}
    muon, adamw = build_optimizer(run_with("muon"), params, CPU)._parts
    for part, kind, theirs in ((muon, torch.optim.Muon, matrices), (adamw, torch.optim.AdamW, rest)):
        assert type(part) is kind and {names[id(p)] for group in part.param_groups for p in group["params"]} == set(theirs)
    for alone in ("a.bias", "a.weight"):
        assert len(build_optimizer(run_with("muon"), {alone: params[alone]}, CPU).param_groups) == 1


def test_text_encoders_have_a_rate_of_their_own():
    params, loss = net()
    before = {name: parameter.detach().clone() for name, parameter in params.items()}
    optimizer = build_optimizer(run_with("adamw", train_text_encoder=True, text_encoder_lr=3e-4), params, CPU)
    for group in optimizer.param_groups:
        group["lr"] = 3e-3 * group.get("share", 1.0)
    learn(optimizer, loss, 1)  # AdamW's first step is as long as its rate
    moved = {name: float((parameter.detach() - before[name]).abs().max()) for name, parameter in params.items()}
    assert moved == {
        "unet.weight": pytest.approx(3e-3, rel=1e-2),
        "unet.bias": pytest.approx(3e-3, rel=1e-2),
        "text_encoder.weight": pytest.approx(3e-4, rel=1e-2),
    }
    assert told(optimizer) == "AdamW 0.1" and told(build_optimizer(run_with("adamw"), params, CPU)) == "AdamW"


# -- in a swarm: strategies move the parameters, and some optimizers keep where these were


class Peer(Replica):
    """One peer of a swarm that steps with its own optimizer; target: what it learns from 6 inputs."""

    def __init__(self, name):
        super().__init__(load_part("sync", "parameters").strategy(RunConfig()))
        run = RunConfig(optimizer=name, learning_rate=default_rate(name, 1e-2), adam_weight_decay=0.0)
        self.optimizer = build_optimizer(run, self.params, CPU)

    def loss(self, data):
        return (self.model(data) - data[:, :3].sin()).square().mean()

    def ahead(self):
        """From the average to where gradients are taken."""
        with self.optimizer.gradient_point():
            y = self.position()
        return y - self.position()

    def learn(self, data):
        learn(self.optimizer, lambda: self.loss(data), 1)
        self.work.open_samples += len(data)


def data_of(peer, step):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * peer + step))


def round_of(peers, number, *data):
    """Each peer trains on its `data`, two steps; all that it brought is averaged, and each stands on the new state."""
    for peer, its in zip(peers, data, strict=True):
        for step in range(2):
            peer.learn(data_of(its, 2 * number + step))
        peer.work.freeze(number)
    state = commit(peers, number)
    for peer in peers:
        assert peer.rebase(state, number) == []
    return state


def test_schedule_free_peers_with_the_same_data_are_one_machine_of_the_librarys_own():
    from schedulefree import AdamWScheduleFree

    peers, alone = [Peer("adamw_schedulefree"), Peer("adamw_schedulefree")], Peer("adamw")
    library = AdamWScheduleFree(alone.params.values(), lr=1e-2, weight_decay=0.0)
    library.train()
    for number in range(1, 21):
        state = round_of(peers, number, 0, 0)
        for step in range(2):
            alone.loss(data_of(0, 2 * number + step)).backward()
            library.step()
            library.zero_grad()
    y = alone.position()
    library.eval()
    torch.testing.assert_close(state.vectors(y.numel())[0], alone.position(), rtol=1e-4, atol=1e-5)
    assert float((y - alone.position()).abs().max()) > 1e-3  # what the library trains at is no result


def test_schedule_free_peers_agree_on_the_mean_of_their_averages_and_where_gradients_are_taken_moves_with_it():
    peers = [Peer("adamw_schedulefree"), Peer("adamw_schedulefree")]
    test = data_of(9, 0)
    begun = float(peers[0].loss(test).detach())
    for number in range(1, 41):
        for its, peer in enumerate(peers):
            for step in range(2):
                peer.learn(data_of(its, 2 * number + step))
            peer.work.freeze(number)
        positions, before = [peer.position() for peer in peers], [peer.ahead() for peer in peers]
        state = commit(peers, number)
        for peer, ahead in zip(peers, before, strict=True):
            peer.rebase(state, number)
            torch.testing.assert_close(peer.position(), sum(positions) / 2, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(peer.ahead(), ahead, rtol=1e-3, atol=1e-6)
    assert float((positions[0] - positions[1]).abs().max()) > 1e-3 and all(float(ahead.abs().max()) > 1e-3 for ahead in before)
    assert float(peers[0].loss(test).detach()) < 0.3 * begun


def test_parameters_are_the_average_whatever_becomes_of_a_step():
    peer = Peer("adamw_schedulefree")
    for step in range(3):
        peer.learn(data_of(0, step))
    x = peer.position()
    with peer.optimizer.gradient_point():
        y = peer.position()
    with pytest.raises(RuntimeError), peer.optimizer.gradient_point():
        raise RuntimeError
    torch.testing.assert_close(peer.position(), x, rtol=1e-5, atol=1e-7)
    assert float((y - x).abs().max()) > 1e-4


def test_prodigys_estimate_is_each_peers_own_and_bounded_by_its_own_way_whoever_moves_the_parameters():
    """Sum of |w|, from 1: the way is 1 in each number. The second peer comes after 60 steps, and each round's mean moves both."""
    peers = [nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))]
    optimizers = [build_optimizer(RunConfig(optimizer="prodigy", adam_weight_decay=0.0), {"w": w}, CPU) for w in peers]
    estimates = []
    for step in range(200):
        present = 1 if step < 60 else 2
        for w, optimizer in [*zip(peers, optimizers, strict=True)][:present]:
            w.abs().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            mean = sum(peers[:present]) / present
            for w in peers:
                w.copy_(mean)
        estimates.append([optimizer.param_groups[0]["d"] for optimizer in optimizers])
    begun = 1e-6
    assert estimates[0] == [begun, begun] and estimates[59][1] == begun
    assert estimates[9][0] < 2 * begun and estimates[69][1] > 1000 * begun  # the way that others move it teaches a newcomer its rate
    assert all(1e-2 < estimate < 1 for estimate in estimates[-1]) and estimates[-1][0] != estimates[-1][1]
    assert float(peers[0].detach().abs().max()) < 0.2
