"""What a run takes of a device is counted on its own model, whatever its family and method."""

import copy

import pytest
import torch

from benchmarks.device_memory import count
from peer.config import PeerConfig
from peer.contracts import LatentBatch, parts_of
from peer.machine.counting import flow_through
from peer.machine.needs import CAPTION, Needs, Turns, without_weights
from peer.rooms import load_part
from swarm.errors import UserError
from swarm.run.optimizer import OPTIMIZERS
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.machine import shallow

CPU = torch.device("cpu")


def run_of(family, method="lora", **options):
    return RunConfig(resolution=16, family=tiny.FAMILIES[family], method=method, **tiny.MODELS[family].run, **options)


def model_of(family, run):
    return tiny.kind(family)(shallow.pipeline() if family == "sd" else tiny.build(family), None, run)


def needs_of(family, method="lora", **options):
    run = run_of(family, method, **options)
    return Needs(run, lambda: model_of(family, run), CPU)


@pytest.mark.parametrize("family", tiny.ONE_OF_EACH)
def test_a_familys_own_code_says_how_large_its_texts_are(family):
    run = run_of(family)
    real = {name: states.shape for name, states in model_of(family, run).encode_text([CAPTION] * 2).items()}
    bare = without_weights(model_of(family, run))
    most, told = flow_through(bare, lambda shape: bare.encode_text([CAPTION] * 2))
    assert {name: states.shape for name, states in told.items()} == real and most > 0


def test_what_is_counted_is_what_lies_there_and_flows():
    run, peer = run_of("z_image"), PeerConfig(train_batch_size=2, with_prior_preservation=False)
    turns = Needs(run, lambda: model_of("z_image", run), CPU).turns(peer)
    model, method = model_of("z_image", run), load_part("methods", "lora").build(run)
    model.place(CPU, None, ())
    params = method.attach(model)
    latents = model.encode_pixels(torch.zeros(2, 3, 16, 16)).chunk(2, dim=1)[0].contiguous()
    batch = LatentBatch(latents, model.encode_text([CAPTION] * 2), torch.zeros(2, 6, dtype=torch.int64))
    real = count(model, params, batch, OPTIMIZERS["adamw"], on_gpu=False)
    assert (turns.denoiser, turns.texts, turns.vae) == tuple(real.parts[name] for name in ("transformer", "text_encoder", "vae"))
    assert turns.trained == real.trained + real.optimizer and turns.step == pytest.approx(real.step, rel=0.01)


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_the_average_of_the_weights_is_counted_in_float32(weights):
    needs = needs_of("sd", "full")
    plain, averaging = PeerConfig(weights=weights), PeerConfig(weights=weights, use_ema=True)
    trained = sum(parameter.numel() for parameter in needs.params(plain).values())
    assert needs.lying(averaging) - needs.lying(plain) == needs.of(averaging) - needs.of(plain) == 4 * trained


def test_options_take_less_and_what_lies_there_is_less_than_what_is_needed(monkeypatch):
    monkeypatch.setattr("peer.machine.turns._OWN_MEMORY", ("cpu",))
    needs = needs_of("flux")
    plain = needs.of(PeerConfig())
    assert needs.lying(PeerConfig()) < plain
    for option in ({"gradient_checkpointing": True}, {"base_precision": "nf4"}, {"base_precision": "int8"}, {"offload": True}):
        assert needs.of(PeerConfig(**option)) < plain
    assert needs.of(PeerConfig(cache_latents=True, cache_text=True)) == needs.of(PeerConfig(offload=True))
    assert needs.of(PeerConfig(train_batch_size=2)) > plain
    prior = PeerConfig(with_prior_preservation=True, train_data_dir="x", class_data_dir="y", class_prompt="a dog")
    assert needs.of(prior) == needs.of(PeerConfig(train_batch_size=2))


@pytest.mark.parametrize(("method", "options"), [("lora", {"use_dora": True}), ("loha", {}), ("lokr", {}), ("full", {"train_text_encoder": True})])
def test_every_method_whose_tensors_lie_in_the_model_is_counted(method, options):
    needs = needs_of("sd", method, **options)
    texts = "text_encoder" in parts_of(needs.params(PeerConfig()))
    turns = needs.turns(PeerConfig(gradient_checkpointing=True))
    assert texts == turns.texts_stay == bool(options.get("train_text_encoder")) and turns.step > 0


def test_what_lies_outside_of_the_model_is_refused():
    with pytest.raises(UserError, match="--method textual_inversion trains is in none of the model's parts"):
        needs_of("sd", "textual_inversion", placeholder_token="<thing>", initializer_token="a").of(PeerConfig())


def test_tied_weights_stay_tied_and_copies_do_not_share():
    model = model_of("flux", run_of("flux"))
    encoder = model.parts["text_encoder_2"]
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight  # T5's words have two names
    bare = copy.deepcopy(without_weights(model))
    encoder = bare.parts["text_encoder_2"]
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight and encoder.shared.weight.is_meta


def test_the_worst_moment_is_the_largest_turn_and_without_turns_all_at_once():
    turns = Turns(trained=1, denoiser=100, texts=40, vae=10, step=20, reading=5, encoding=30)
    assert turns.worst(turned=False) == 1 + 150 + 30 and turns.worst(turned=True) == 1 + 120
    assert Turns(1, 20, 40, 10, step=5, reading=5, encoding=30).worst(turned=True) == 1 + 45
    assert Turns(1, 20, 40, 10, step=5, reading=5, encoding=30, texts_stay=True).worst(turned=True) == 1 + 40 + 40


def test_bf16_weights_need_their_float32_at_the_start_and_nothing_that_flows_with_it():
    turns = Turns(trained=60, denoiser=0, texts=40, vae=10, step=5, reading=5, encoding=30, beginning=100)
    assert turns.worst(turned=False) == 50 + 100 and turns.worst(turned=True) == 60 + 40 + 5
    assert Turns(60, 0, 40, 10, step=5, beginning=110).worst(turned=True) == 110
    assert Turns(60, 0, 40, 10, step=5, texts_stay=True, beginning=110).worst(turned=True) == 40 + 110


def test_a_whole_denoiser_in_bf16_is_counted_with_what_its_start_takes():
    needs = needs_of("sd", "full", optimizer="adafactor", clip_grad="tensor")
    peer = PeerConfig(weights="bf16", fused_step=True, gradient_checkpointing=True)
    turns, trained = needs.turns(peer), sum(parameter.numel() for parameter in needs.params(peer).values())
    assert turns.beginning == 4 * trained > turns.trained
    assert needs.lying(peer) == 4 * trained + turns.denoiser + turns.texts + turns.vae <= needs.of(peer)
    assert needs.turns(PeerConfig(mixed_precision="bf16")).beginning == 0
