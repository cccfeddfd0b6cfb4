"""Which layers a LoRA takes (`--lora_targets`), and what its matrices do not see in a step (`--lora_dropout`)."""

import importlib
import sys
import threading

import pytest
import torch
from torch import nn

from peer.methods.shared.adapters import without_bitsandbytes
from swarm.errors import UserError
from swarm.founding import check_family
from swarm.run.adapters import CHOICES
from swarm.run.family import families
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.methods.test_methods import attached, losses, run_of


def in_blocks(part, kind):
    """The layers of a class in a part's blocks: in its lists of modules, and in the middle of a UNet."""
    blocks = [name for name, child in part.named_children() if isinstance(child, nn.ModuleList) or name == "mid_block"]
    return {name for name, module in part.named_modules() if isinstance(module, kind) and name.split(".")[0] in blocks}


def ending(names, ends):
    return {name for name in names if name.endswith(tuple(f".{end}" for end in ends))}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_familys_layers_are_all_that_its_blocks_have_and_nothing_else(family):
    facts, pipeline = families()[tiny.FAMILIES[family]], tiny.build(family)
    denoiser = getattr(pipeline, facts.denoiser)
    every = {name for name, module in denoiser.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    assert ending(every, facts.layers.all) == in_blocks(denoiser, nn.Linear | nn.Conv2d)
    linear = ending(every, CHOICES["all-linear"](facts.layers))
    assert {name for name in linear if not name.endswith(("proj_in", "proj_out"))} == {
        name for name in in_blocks(denoiser, nn.Linear) if not name.endswith(("proj_in", "proj_out"))
    }
    for name, encoder in facts.text_encoders.items():
        if encoder.layers:
            part = getattr(pipeline, name)
            found = {key for key, module in part.named_modules() if isinstance(module, nn.Linear) and ".layers." in f".{key}"}
            assert ending(found, encoder.layers.all) == found
    ends = [*facts.layers.all]
    assert len(ends) == len({*ends}) and {*facts.lora} <= {*ends}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_is_kept_as_names_with_which_the_same_layers_are_trained_later(tiny_model, choice):
    run = run_of("lora with text encoder", tiny_model, lora_targets=choice, family="stable_diffusion")
    model, _, params = attached(run)
    layers = families()["stable_diffusion"].trained(True)
    chosen = {
        f"{part}.{name}"
        for part, of_part in layers.items()
        for name in ending(
            [key for key, module in model.parts[part].named_modules() if hasattr(module, "lora_A")], CHOICES[choice](of_part)
        )
    }
    assert {key.split(".lora_")[0] for key in params} == {name.replace(".text_model.", ".") for name in chosen} != set()
    again = RunConfig.from_mapping(run.to_mapping(), where="there")
    assert again.lora_targets == run.lora_targets and "attention" not in run.lora_targets and again.digest == run.digest
    losses(model).mean().backward()
    assert all(p.grad.abs().sum() > 0 for key, p in params.items() if "lora_A" not in key)


def test_a_run_that_began_before_the_choice_trains_what_it_trained(tiny_model):
    (_, _, began), (_, _, usual) = (attached(run_of("lora with text encoder", tiny_model, lora_targets=said)) for said in ("", "auto"))
    assert [*began] == [*usual] and {key.split(".")[-4] for key in began if key.startswith("unet")} == {"to_q", "to_k", "to_v", "0"}


def test_layers_may_be_named_and_a_name_that_none_has_is_refused(tiny_model):
    _, _, params = attached(run_of("lora", tiny_model, lora_targets="to_q,ff.net.2"))
    assert {key.split(".lora_")[0].rsplit(".", 1)[1] for key in params} == {"to_q", "2"}
    wrong = {
        (
            "stable_diffusion",
            "to_kk",
        ): r"^lora_targets names 'to_kk', but no trained layer of stable_diffusion ends with that\. Did you mean 'to_k'\?",
        ("stable_diffusion", "to_q fc1"): r"^lora_targets names 'fc1'",
        ("flux", "all-linear+conv"): r"^lora_targets is all-linear\+conv, but flux has no convolutions\. Use all-linear",
    }
    for (family, chosen), message in wrong.items():
        with pytest.raises(UserError, match=message):
            check_family(family, RunConfig(method="lora", family=family, lora_targets=chosen))
    with pytest.raises(UserError, match=r"^lora_targets names no layer of the text_encoder, which this run trains"):
        check_family("flux", RunConfig(method="lora", family="flux", lora_targets="attn.to_q", train_text_encoder=True))


def test_dropout_is_drawn_anew_in_each_step_and_repeats_with_its_seed(tiny_model):
    model, _, params = attached(run_of("lora", tiny_model, lora_dropout=0.5))
    with torch.no_grad():
        for key, parameter in params.items():
            parameter.fill_(1.0 if "lora_B" in key else 0.1)

    def seen(seed):
        torch.manual_seed(seed)  # as the loop does before each micro-batch, from the peer's key and the step
        return losses(model).mean().item()

    assert seen(1) == seen(1) != seen(2)
    model.parts["unet"].eval()
    assert seen(1) == seen(2)


def test_convolutions_begin_as_wide_as_their_inputs_are_many(tiny_model):
    _, _, params = attached(run_of("lora", tiny_model, lora_targets="conv1", lora_init="uniform"))
    for key, parameter in params.items():
        bound = parameter[0].numel() ** -0.5
        assert "lora_B" in key or (parameter.shape[2:] == (3, 3) and 0.9 * bound < parameter.abs().max() <= bound)


def test_peft_does_not_load_bitsandbytes_layers_of_which_a_model_has_none(tiny_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft.tuners.lora.bnb", None)  # to import it is an error
    _, _, params = attached(run_of("lora", tiny_model))
    lora = importlib.import_module("peft.tuners.lora.model")
    assert params and lora.is_bnb_available is importlib.import_module("peft.import_utils").is_bnb_available


def test_two_threads_that_add_adapters_at_once_leave_peft_as_it_was():
    lora = importlib.import_module("peft.tuners.lora.model")
    before, entered, left = lora.is_bnb_available, threading.Event(), threading.Event()

    def second():
        with without_bitsandbytes():
            entered.set()
            left.wait(30)

    thread = threading.Thread(target=second)
    with without_bitsandbytes():
        thread.start()
        entered.wait(0.2)  # it would take what is there now for peft's own
    left.set()
    thread.join()
    assert entered.is_set() and lora.is_bnb_available is before
