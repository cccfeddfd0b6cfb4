"""Another way to compute is kept only if its gradients of the first batch are right, and its trial leaves no trace."""

import dataclasses
import logging
import threading
from contextlib import ExitStack

import pytest
import torch

from peer.config import PeerConfig
from peer.launch.joining import Joined
from peer.launch.launch import Launch
from peer.machine import compiling, ipex
from peer.machine.compiling import Compiled
from peer.machine.device import Rank, RankGroup, choose_precision
from peer.machine.trial_of_speed import Trial, relative_difference
from peer.wiring import assemble
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.flat import flat
from tests.peer.machine.shallow import with_one_level

CPU = torch.device("cpu")
FLOAT32 = choose_precision("no", CPU, 0)
RUN = RunConfig(sync="none", resolution=16, total_samples=12, learning_rate=1e-3, seed=7)


def perturbing(graph, inputs):
    """A backend whose results are a little wrong, forwards too little to be seen in a loss."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    wrong = lambda graph, inputs: make_boxed_func(lambda *args: [  # noqa: E731
        out * 1.2 if isinstance(out, torch.Tensor) and out.is_floating_point() else out for out in graph(*args)
    ])  # fmt: skip
    return aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=wrong)(graph, inputs)


def failing(graph, inputs):
    raise RuntimeError("no C++ compiler\nand much more")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """Of whose UNet resnets are all: a compiler takes half a second for each block that reads captions."""
    folder = tmp_path_factory.mktemp("resnets") / "model"
    with_one_level(tiny.build_pipeline(), down_block_types=("DownBlock2D",)).save_pretrained(folder)
    return folder


@pytest.fixture
def start(tiny_model, pictures, tmp_path):
    with ExitStack() as closing:

        def build(name="out", **peer):
            options = {"train_data_dir": str(pictures), "output_dir": str(tmp_path / name), "train_batch_size": 4, "mixed_precision": "no"}
            run = dataclasses.replace(RUN, model=str(tiny_model))
            group = RankGroup(Rank(), CPU)
            launch = Launch(
                joined=Joined(run), peer=PeerConfig(**options | peer), group=group, device=CPU, stopping=lambda: False, closing=closing
            )
            trainer, _ = assemble(launch)
            losses, told = [], trainer.progress.stepped
            trainer.progress.stepped = lambda **values: (losses.append(values["loss"]), told(**values))
            return trainer, losses

        yield build
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (perturbing, "torch.compile is not used: its gradients of the first batch are wrong (relative difference 0.2, at most 0.001 is allowed)"),
        (failing, "torch.compile is not used: it fails (BackendCompilerFailed: backend='failing' raised:)"),
    ],
)  # fmt: skip
def test_a_compiler_that_is_wrong_or_fails_is_noticed_and_the_run_goes_on_to_the_same_bits(start, monkeypatch, caplog, backend, said):
    monkeypatch.setattr(compiling, "BACKEND", backend)
    plain, losses = start("plain")
    plain.run()
    tried, losses_tried = start("tried", compile=True)
    tried.run()
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [said]
    assert losses == losses_tried and torch.equal(flat(plain.params), flat(tried.params))
    assert "forward" not in vars(tried.model.parts["unet"])


def test_a_compiler_that_is_right_is_used_for_training_in_the_shape_that_was_tried_alone(start, monkeypatch, caplog):
    caplog.set_level("INFO", "peer.machine.trial_of_speed")
    ran = []

    def counting(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        compiled = aot_eager(graph, inputs)
        return lambda *args: (ran.append(None), compiled(*args))[1]

    monkeypatch.setattr(compiling, "BACKEND", counting)
    plain, losses = start("plain")
    plain.run()
    names = list(plain.model.parts["unet"].state_dict())
    tried, losses_tried = start("tried", compile=True)
    unet, before = tried.model.parts["unet"], dict(tried.params)
    tried.run()
    assert "torch.compile is used: its gradients of the first batch are right" in caplog.text
    assert losses_tried == pytest.approx(losses, rel=1e-5)
    assert list(unet.state_dict()) == names and all(tried.params[name] is parameter for name, parameter in before.items())
    assert len(ran) >= 4, "the trial's backward and three steps"
    ran.clear()
    one = lambda count: (torch.randn(count, 4, 8, 8), torch.ones(count), torch.randn(count, 77, 16))  # noqa: E731
    unet(*one(3))
    with torch.no_grad():
        unet(*one(4))
    unet.eval()(*one(4))
    assert not ran


class Other:
    """A way that computes the same, times `factor`."""

    name = "the other way"

    def __init__(self, factor):
        self.factor, self.is_on = factor, False

    def on(self):
        self.is_on = True

    def off(self):
        self.is_on = False

    def backward(self, parameter, value=1.0):
        assert torch.rand(()) is not None
        (parameter * value * (self.factor if self.is_on else 1)).sum().backward()


def test_the_trial_leaves_gradients_random_numbers_and_parameters_as_they_were():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 5.0)
    way, state = Other(1.0), torch.get_rng_state()
    assert Trial(way, {"p": parameter}, FLOAT32, RankGroup(Rank(), CPU))(lambda: way.backward(parameter))
    assert way.is_on and torch.equal(torch.get_rng_state(), state)
    assert parameter.tolist() == [1, 1, 1] and parameter.grad.tolist() == [5, 5, 5]


def test_a_first_batch_whose_gradients_are_not_finite_decides_nothing():
    parameter = torch.nn.Parameter(torch.ones(3))
    way = Other(1.0)
    trial = Trial(way, {"p": parameter}, FLOAT32, RankGroup(Rank(), CPU))
    assert not trial(lambda: way.backward(parameter, float("inf"))) and not way.is_on
    assert not trial(None) and not way.is_on
    assert trial(lambda: way.backward(parameter)) and way.is_on


@pytest.mark.parametrize(("factors", "used"), [((1.0, 1.0), True), ((1.0, 1.5), False), ((1.0, None), True), ((None, 1.5), False)])
def test_all_ranks_decide_alike(factors, used):
    """Factor None: a rank without a batch in this step."""
    meeting, said = threading.Barrier(2), {}

    class Group:
        def __init__(self, index):
            self.index = index

        def gather(self, value):
            said[self.index] = value
            meeting.wait(60)
            return [said[0], said[1]]

    ways, done = [Other(factor) for factor in factors], [None, None]

    def rank(index):
        parameter = torch.nn.Parameter(torch.ones(3))
        backward = (lambda: ways[index].backward(parameter)) if factors[index] else None
        done[index] = Trial(ways[index], {"p": parameter}, FLOAT32, Group(index))(backward)

    other = threading.Thread(target=rank, args=(1,))
    other.start()
    rank(0)
    other.join(60)
    assert done == [True, True] and [way.is_on for way in ways] == [used, used]


def test_the_difference_is_of_all_gradients_together():
    right = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert relative_difference(right, [torch.tensor([3.0]), torch.tensor([4.5])]) == pytest.approx(0.1)
    assert relative_difference(right, [torch.tensor([3.0]), torch.tensor([float("nan")])]) == float("inf")
    assert relative_difference([torch.zeros(1)], [torch.zeros(1)]) == 0 and relative_difference([torch.zeros(1)], [torch.ones(1)]) == float(
        "inf"
    )


def test_ipex_is_refused_where_it_cannot_be_had_before_anything_is_imported(start, monkeypatch):
    with pytest.raises(UserError, match=r"--ipex is for a CPU, and this peer computes on cuda:0"):
        ipex.check_ipex(torch.device("cuda", 0))
    monkeypatch.setattr(ipex.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed.*scripts/test_ipex makes an environment"):
        start(ipex=True)
    monkeypatch.setattr(ipex.importlib.util, "find_spec", lambda name: "there")
    monkeypatch.setattr(ipex.torch, "__version__", "2.13.0+cpu")
    with pytest.raises(UserError, match=r"--ipex needs PyTorch 2\.8, and this is 2\.13\.0"):
        start(ipex=True)
    with pytest.raises(UserError, match="each replaces the code that computes"):
        PeerConfig(ipex=True, compile=True)


def test_a_broken_ipex_is_one_line_and_there_is_no_way_back_from_it(tmp_path, monkeypatch):
    (tmp_path / "intel_extension_for_pytorch.py").write_text("raise AssertionError('not the version\\nthat I want')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"cannot be imported \(not the version\)"):
        ipex.Ipex().on()
    with pytest.raises(UserError, match="Start again without --ipex"):
        ipex.Ipex().off()


def test_compiling_twice_is_compiling_once():
    module = torch.nn.Linear(2, 2)
    way = Compiled(module, backend="eager")
    way.on()
    forward = module.forward
    way.on()
    assert module.forward is forward
    way.off()
    way.off()
    assert "forward" not in vars(module)
