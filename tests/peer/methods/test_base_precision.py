"""--base_precision: what is not trained is held in fewer bits, by this machine alone, and every method trains beside it."""

import dataclasses
import functools
import os
import re

import pytest
import torch
from torch import nn

from peer.config import PeerConfig
from peer.contracts import LatentBatch
from peer.launch.starting_model import load_model
from peer.learner import check_base
from peer.machine.first_gradient import FirstGradient
from peer.models.diffusion.packed import PRECISIONS, PackedLinear
from peer.rooms import load_part
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.conftest import ROOT
from tests.forking import Forked
from tests.peer.machine.shallow import shallow_family, tiny_model  # noqa: F401
from tests.peer.models.reading import folders_are_read_once  # noqa: F401
from tests.peer.test_alone import CPU, RUN, flat, start  # noqa: F401

METHODS = {
    "lora": {"method": "lora", "rank": 2},
    "lora with text encoder": {"method": "lora", "rank": 2, "train_text_encoder": True},
    "dora": {"method": "lora", "rank": 2, "use_dora": True},
    "loha": {"method": "loha", "rank": 2},
    "lokr": {"method": "lokr", "rank": 2},
    "textual_inversion": {"placeholder_token": "<dicoo>", "initializer_token": "toy"},
}
OFF = {"bf16": 0.02, "fp8": 0.1, "int8": 0.03, "nf4": 0.4}
"""How far a gradient may be from that beside the model's own weights, as a share of its length."""


def placed(folder, precision, dtype=None, **options):
    """A model as a peer has it, with what its method trains."""
    run = RunConfig(model=str(folder), **options)
    method, model = load_part("methods", run.method).build(run), load_model(run, {}, None)
    method.begin(model)
    if precision != "auto":
        model.pack(precision, CPU)
    model.place(CPU, dtype, method.whole(model))
    return model, method.attach(model)


def gradients(model, params, dtype=None):
    """After one step of the first matrices, which is where the others' gradients begin."""
    torch.manual_seed(0)
    for parameter in params.values():
        parameter.data += 0.02 * torch.randn(parameter.shape)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
        latents, text = model.encode_pixels(pixels).chunk(2, dim=1)[0], model.encode_text(["a cat", "<dicoo>"])
        loss = model.loss(LatentBatch(latents, text), torch.Generator().manual_seed(2))
    loss.sum().backward()
    return flat({name: parameter.grad for name, parameter in params.items() if parameter.grad is not None})


@pytest.fixture(scope="module")
def exact(shallow_family):  # noqa: F811
    """`exact("sd", "lora")`: what is trained at first beside the model's own weights, and its gradient."""

    def computed(family, method, dtype=None):
        model, params = placed(shallow_family(family), "auto", dtype, **METHODS[method])
        return flat(params).clone(), gradients(model, params, dtype)

    return functools.cache(computed)


@pytest.mark.parametrize(("family", "method"), [*(("sd", method) for method in METHODS), ("flux", "lora"), ("z_image", "lora")])
def test_every_method_begins_with_the_same_bits_and_has_nearly_the_same_gradient(family, method, shallow_family, exact):  # noqa: F811
    first, gradient = exact(family, method)
    for precision in PRECISIONS:
        model, params = placed(shallow_family(family), precision, **METHODS[method])
        assert torch.equal(flat(params), first)
        off = (gradients(model, params) - gradient).norm() / gradient.norm()
        assert 0 < off < OFF[precision], (precision, off)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_under_autocast_is_as_near(precision, shallow_family, exact):  # noqa: F811
    _, gradient = exact("sd", "lora", torch.bfloat16)
    model, params = placed(shallow_family("sd"), precision, torch.bfloat16, **METHODS["lora"])
    assert {module.scales.dtype for module in model.denoiser.modules() if isinstance(module, PackedLinear)} == {torch.float32}
    off = (gradients(model, params, torch.bfloat16) - gradient).norm() / gradient.norm()
    assert off < OFF[precision] + 0.04  # bf16 rounds what is unpacked
    assert (off == 0) == (precision == "bf16"), "nothing is rounded twice"


@pytest.mark.parametrize(("precision", "bits"), [("bf16", 16), ("fp8", 8), ("int8", 8), ("nf4", 4)])
def test_the_linear_layers_of_the_blocks_are_packed_and_nothing_else(precision, bits, shallow_family):  # noqa: F811
    plain, _ = placed(shallow_family("flux"), "auto", **METHODS["lora"])
    packed, _ = placed(shallow_family("flux"), precision, **METHODS["lora"])
    layers = {name: module for name, module in packed.denoiser.named_modules() if isinstance(module, PackedLinear)}
    assert all("blocks." in name for name in layers) and isinstance(packed.denoiser.x_embedder, nn.Linear) and "x_embedder" not in layers
    linear = {
        name
        for name, module in plain.denoiser.named_modules()
        if isinstance(module, nn.Linear) and "blocks." in name and "lora" not in name
    }
    assert {*layers} == linear
    assert all(module.bits.nbytes * 8 == bits * module.in_features * module.out_features for module in layers.values())
    assert not any(
        isinstance(module, PackedLinear) for name, part in packed.parts.items() if part is not packed.denoiser for module in part.modules()
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_packed_layer_keeps_nothing_for_the_way_back(precision):
    layer = PackedLinear(nn.Linear(64, 32), precision, CPU)
    x, saved = torch.randn(3, 64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda kept: kept):
        answer = layer(x)
    assert not saved
    (gradient,) = torch.autograd.grad(answer.sum(), x)
    assert torch.allclose(gradient, layer.weight.sum(dim=0).expand(3, 64), atol=1e-5)
    assert torch.allclose(answer, nn.functional.linear(x, layer.weight, layer.bias), atol=1e-5)


@pytest.mark.parametrize(("family", "method"), [*(("sd", method) for method in METHODS), ("z_image", "lora")])
def test_beside_the_models_own_weights_a_gradient_has_the_bits_of_a_model_that_was_not_packed(family, method, shallow_family, exact):  # noqa: F811
    _, gradient = exact(family, method)
    model, params = placed(shallow_family(family), "nf4", **METHODS[method])
    with model.unpacked():
        assert torch.equal(gradients(model, params), gradient)
    assert not any(module.own is not None for module in model.denoiser.modules() if isinstance(module, PackedLinear))


@pytest.mark.parametrize("fused", [False, True])
def test_the_first_batchs_gradient_is_compared_and_changes_nothing(start, caplog, fused):  # noqa: F811
    run = dataclasses.replace(RUN, method="lora", rank=2, clip_grad="tensor", total_samples=12)
    options = {"run": run, "base_precision": "nf4", "fused_step": fused}
    with caplog.at_level("INFO", "peer.machine.first_gradient"):
        told = start("told", **options).run().losses
    (line,) = [record.message for record in caplog.records if record.name == "peer.machine.first_gradient"]
    assert 0.01 < float(re.search(r"differs by (\S+) of its length", line)[1]) < OFF["nf4"]
    untold = start("untold", **options)
    untold.compare = None
    assert untold.run().losses == told


def test_a_gradient_that_is_not_finite_does_not_read_the_model_anew(shallow_family, monkeypatch):  # noqa: F811
    model, params = placed(shallow_family("sd"), "int8", **METHODS["lora"])
    compare, read, reads = FirstGradient(model, params, "int8"), model.read, []
    monkeypatch.setattr(model, "read", lambda **how: reads.append(how) or read(**how))
    for factor, answer, times in ((float("inf"), False, 0), (float("nan"), False, 0), (1.0, True, 1)):
        assert compare(lambda factor=factor: factor * sum(one.sum() for one in params.values())) is answer and len(reads) == times


def test_files_that_have_gone_and_gradients_that_are_not_finite_stop_nobody(shallow_family, caplog):  # noqa: F811
    model, params = placed(shallow_family("sd"), "int8", **METHODS["lora"])
    compare, total = FirstGradient(model, params, "int8"), lambda factor: lambda: factor * sum(one.sum() for one in params.values())
    assert not compare(total(float("nan"))) and not compare(total(float("inf"))) and not caplog.records

    def gone(**_):
        raise UserError("There is no model.", fix="")

    model.read = gone
    assert compare(total(1.0)) and "cannot compare the first batch's gradient: There is no model." in caplog.text


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_row_of_zeros_stays_one(precision):
    layer = nn.Linear(8, 2, bias=False)
    layer.weight.data[0] = 0
    packed = PackedLinear(layer, precision, CPU).weight
    assert not packed[0].any() and packed[1].isfinite().all() and packed[1].any()


def test_a_run_goes_on_with_weights_in_other_bits(start):  # noqa: F811
    options = {"run": dataclasses.replace(RUN, method="lora", rank=2, total_samples=20)}
    whole = start("whole", **options).run()
    first = start("parts", stop_after=2, base_precision="nf4", **options).run()
    second = start("parts", base_precision="int8", resume_from_checkpoint="latest", **options).run()
    losses = first.losses + second.losses
    assert len(losses) == len(whole.losses) and losses != whole.losses
    assert losses == pytest.approx(whole.losses, rel=0.05)


@pytest.mark.parametrize(
    ("run", "device", "said"),
    [
        ({"method": "full"}, "cpu", "is for weights that nobody trains, and --method full trains all"),
        ({"method": "lora"}, "xla", "was not tried on XLA's devices"),
    ],
)
def test_where_it_has_no_use_one_line_says_so(run, device, said):
    with pytest.raises(UserError, match=said):
        check_base(PeerConfig(base_precision="nf4"), RunConfig(**run), torch.device(device))
    check_base(PeerConfig(), RunConfig(**run), torch.device(device))


@pytest.mark.parametrize("other", ["compile", "ipex", "save_as_full_pipeline"])
def test_options_that_do_not_go_with_it_are_refused(other):
    with pytest.raises(UserError, match=f"base_precision.*{other}|{other}.*base_precision"):
        PeerConfig(base_precision="int8", **{other: True})


def test_a_program_that_has_asked_for_nothing_else_of_bitsandbytes_packs_in_nf4(tmp_path):
    """It is loaded only once something of it is wanted, and its operators are there only then."""
    with open(tmp_path / "said", "wb") as said, open(os.devnull) as nothing:
        files = nothing.fileno(), said.fileno(), said.fileno()
        done = Forked(f"{__name__}:_packs_in_nf4", {}, files, cwd=ROOT, environ={**os.environ}).wait(600)
    assert done == 0, (tmp_path / "said").read_text()


def _packs_in_nf4() -> int:
    assert not hasattr(torch.ops.bitsandbytes, "quantize_4bit"), "it is loaded already"
    assert PackedLinear(nn.Linear(64, 64), "nf4", CPU).bits.numel() == 2048
    return 0
