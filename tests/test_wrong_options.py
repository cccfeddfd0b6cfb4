"""Every option of a run with a wrong value: refused with one line that names it, where a host founds the run and where a peer does."""

import dataclasses
import json
from functools import partial

import pytest

from datasetserver.founding import run_to_serve
from peer.config import PeerConfig
from peer.launch.joining import join
from peer.launch.resolving import resolve_run
from peer.launch.starting_model import complete
from swarm.arguments import ArgumentParser
from swarm.errors import UserError
from swarm.founding import resolution_multiple, with_defaults
from swarm.options import parse_flags
from swarm.run.family import families
from swarm.run_config import RunConfig
from tests import tiny

LORA, WORD = {"method": "lora"}, {"placeholder_token": "<dicoo>", "initializer_token": "toy"}
TEXTS = {"train_text_encoder": True}
WRONG = {
    "run_name": [("",), ("a\nb",), ("a" * 201,)],
    "model": [("",), ("/nowhere/at/all",), ("some/file.safetensors",)],
    "model_digest": [("0" * 64,), ("beef",)],
    "family": [("sdxl",), ("sd",)],
    "method": [("dreambooth",)],
    "sync": [("average",)],
    "wire": [("fp8",)],
    "outer_learning_rate": [("-1",), ("nan",), ("0", {"sync": "diloco"})],
    "outer_momentum": [("1",), ("inf",)],
    "dataset_digest": [("beef",)],
    "averaging": [("median",)],
    "clip_members": [("-1",), ("0.5",), ("nan",), ("inf",)],
    "members_of": [("beef",), ("0" * 64,)],
    "total_samples": [("-1",), (str(10**30),), ("many",)],
    "target_batch_size": [("0",), (str(10**30),)],
    "optimizer": [("lion",), ("adafactor", {"sync": "gradients"}), ("adamw_schedulefree", {"sync": "diloco"}), ("muon", WORD), ("prodigy",)],
    "learning_rate": [("10",), ("-1",), ("1e-4", {"optimizer": "prodigy"})],
    "lr_scheduler": [("cosine",), ("step",), ("cosine", {"optimizer": "adamw_schedulefree", "total_samples": 9})],
    "lr_min_ratio": [("1", {"lr_scheduler": "cosine", "total_samples": 9}), ("0.1",), ("0.1", {"lr_scheduler": "constant_with_warmup"})],
    "lr_warmup_samples": [("-1",)],
    "lr_num_cycles": [("0",)],
    "lr_power": [("-1",)],
    "adam_beta1": [("1",), ("0", {"optimizer": "adamw_schedulefree"}), ("0.8", {"optimizer": "came"})],
    "adam_beta2": [("1.5",), ("0.99", {"optimizer": "lion8bit"})],
    "adam_weight_decay": [("-0.1",)],
    "adam_epsilon": [("0",), ("inf",), ("1e-6", {"optimizer": "adafactor"})],
    "max_grad_norm": [("-1",), ("0.5", {"clip_grad": "none"})],
    "clip_grad": [("value",), ("tensor", {"sync": "gradients"}), ("tensor", {"max_grad_norm": 0})],
    "resolution": [("4",), ("510",), ("524288",)],
    "center_crop": [("middle",)],
    "random_flip": [("left",)],
    "ucg": [("1.1",)],
    "seed": [(str(2**64),), ("x",)],
    "shuffle_tags": [("yes please",)],
    "keep_tokens": [("-1",), ("1",), ("1", {"shuffle_tags": False})],
    "caption_tag_dropout_rate": [("1.1",), ("-0.1",), ("0.1", WORD)],
    "caption_prefix": [("a\nb",), ("a\u2028b",), ("a\x00b",), ("a\udcffb",)],
    "caption_suffix": [("a\tb",)],
    "enable_wildcard": [("{",)],
    "num_buckets": [("-1",)],
    "bucket_side_min": [("-1",), ("640", {"num_buckets": 4})],
    "bucket_side_max": [("-1",), ("256", {"num_buckets": 4})],
    "image_interpolation_mode": [("cubic",)],
    "train_text_encoder": [("True", WORD)],
    "text_encoder_lr": [
        ("10", TEXTS), ("-1", TEXTS), ("1e-5",), ("1e-5", WORD), ("1e-5", {**TEXTS, "sync": "gradients"}),
        ("1e-5", {**TEXTS, "optimizer": "prodigy"}),
    ],
    "rank": [("0", LORA), ("8",)],
    "lora_alpha": [("-1", LORA), ("8",)],
    "lora_init": [("zero", LORA), ("gaussian",)],
    "lora_targets": [("to_kk", LORA), ("fc1", LORA), ("to_q", LORA | {"train_text_encoder": True}), ("attention",)],
    "use_dora": [("perhaps", LORA), ("True",)],
    "lora_weights": [("/nowhere", LORA), ("file.safetensors",)],
    "lora_weights_digest": [("0" * 64, LORA), ("0" * 64,)],
    "lora_dropout": [("1", LORA), ("-0.1", LORA), ("0.1",)],
    "placeholder_token": [("two words",), ("", {"method": "textual_inversion"}), ("<a,b>", {**WORD, "shuffle_tags": True})],
    "initializer_token": [("two words", WORD), ("toy",)],
    "learnable_property": [("colour", WORD), ("style",)],
    "num_vectors": [("0", WORD), ("76", WORD), ("2",)],
    "clip_skip": [("-1",), ("2",)],
    "max_token_chunks": [("0",)],
    "max_sequence_length": [("0",), ("256",)],
    "loss_type": [("l1",)],
    "huber_c": [("0", {"loss_type": "huber"}), ("nan", {"loss_type": "huber"}), ("0.2",)],
    "huber_schedule": [("linear", {"loss_type": "smooth_l1"}), ("constant",)],
    "masked_loss": [("perhaps",)],
    "validation_split": [("1",), ("-0.1",)],
    "prediction_type": [("flow",)],
    "rescale_betas_zero_snr": [("True",), ("maybe",)],
    "snr_gamma": [("-1",)],
    "noise_offset": [("nan",)],
    "multires_noise_iterations": [("-1",), ("1000",)],
    "multires_noise_discount": [("1.5", {"multires_noise_iterations": 6}), ("0.5",)],
    "input_perturbation": [("-0.1",)],
    "weighting_scheme": [("cosmap",), ("sigma",)],
    "logit_mean": [("inf",)],
    "logit_std": [("-1",)],
    "mode_scale": [("2",)],
    "timestep_shift": [("3",), ("-1",), ("nan",)],
    "guidance_scale": [("7",)],
    "timestep_bias_strategy": [("middle",)],
    "timestep_bias_multiplier": [("0", {"timestep_bias_strategy": "later"}), ("-1",), ("2",)],
    "timestep_bias_begin": [("1000",), ("10",), ("10", {"timestep_bias_strategy": "later"})],
    "timestep_bias_end": [("0",), ("500",), ("500", {"timestep_bias_strategy": "earlier"})],
    "timestep_bias_portion": [("1.1",), ("0.5",), ("0.5", {"timestep_bias_strategy": "range"})],
    "model_config": [("configs",)],
    **{name: wrong for model in tiny.MODELS.values() for name, wrong in model.wrong.items()},
}
CASES = [(name, value, *(others or ({},))) for name, wrongs in WRONG.items() for value, *others in wrongs]


def test_every_option_of_a_run_is_tried():
    assert set(WRONG) == {field.name for field in dataclasses.fields(RunConfig)}


@pytest.fixture
def given(tiny_family):
    """`given(name, value, others)`: what the command line says of the run, as programs read it."""

    def read(name, value, others):
        said = {"model": tiny_family("sd"), "resolution": 512, **others, name: value}
        (run,) = parse_flags(ArgumentParser("x"), [word for flag, text in said.items() for word in (f"--{flag}", str(text))], RunConfig)[:1]
        return run

    return read


def as_host(run):
    return run_to_serve(run, None)


def as_peer(run, folder):
    peer = PeerConfig(found=True, train_data_dir="pictures", output_dir=str(folder))
    return join(peer, run, lambda *_, **__: None, lambda *_: None, partial(complete, given=run, digest=True)).run


@pytest.mark.parametrize(("name", "value", "others"), CASES)
@pytest.mark.parametrize("founder", ["host", "peer"])
def test_a_wrong_value_is_one_line_where_the_run_is_founded(given, tmp_path, name, value, others, founder):
    with pytest.raises(UserError) as caught:
        run = given(name, value, others)
        as_host(run) if founder == "host" else as_peer(run, tmp_path)
    line = str(caught.value)
    assert "\n" not in line and (name in line or "learning rate" in line) and caught.value.fix, line


def test_an_option_that_says_nothing_is_refused_alone_too_unless_a_run_goes_on_with_it(given, tmp_path):
    run = given("keep_tokens", "1", {})
    alone = PeerConfig(train_data_dir="pictures", output_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"^keep_tokens is 1, but has no effect without --shuffle_tags or --caption_tag_dropout_rate\."):
        resolve_run(alone, run)
    assert resolve_run(dataclasses.replace(alone, resume_from_checkpoint="latest"), run).run.keep_tokens == 1
    assert resolve_run(alone, run | {"shuffle_tags": True}).run.keep_tokens == 1


def test_a_run_that_began_with_an_option_that_says_nothing_goes_on(given, tmp_path, monkeypatch):
    run = given("keep_tokens", "1", {})
    with monkeypatch.context() as before:
        before.setattr("swarm.founding.check_idle", lambda run: None)
        began, hosted = as_peer(run, tmp_path), as_host(run)
    (tmp_path / "run.json").write_text(json.dumps({"run": began.to_mapping()}))
    assert as_peer(run, tmp_path) == began and run_to_serve(run, hosted) == hosted


def test_with_right_values_both_found_the_same_run(given, tmp_path):
    for others in ({}, LORA | {"rank": 8}, WORD | {"num_vectors": 75}, {"family": "stable_diffusion", "clip_skip": 1}):
        run = given("resolution", 64, others)
        assert as_host(run) == as_peer(run, tmp_path)


def test_a_familys_own_default_is_taken_where_nobody_gave_the_option_by_both_founders(given, tmp_path, monkeypatch):
    facts = families()["stable_diffusion"]
    monkeypatch.setitem(families(), "stable_diffusion", dataclasses.replace(facts, defaults={"ucg": 0.5, "seed": 7}))
    for others, ucg in (({}, 0.5), ({"ucg": 0.1}, 0.1), ({"ucg": 0.2}, 0.2)):
        run = given("resolution", 64, others)
        assert as_host(run) == as_peer(run, tmp_path) and (as_host(run).ucg, as_host(run).seed) == (ucg, 7)
    begun = as_host(given("resolution", 64, {"ucg": 0.1}))
    assert run_to_serve(given("resolution", 64, {}), begun) == begun and with_defaults(begun, ["ucg"]) == begun


@pytest.mark.parametrize("family", tiny.MODELS)
def test_what_resolutions_must_be_multiples_of_is_read_from_the_configs_as_the_model_says_it(tiny_family, family):
    from peer.launch.starting_model import load_model

    run = complete(RunConfig(model=str(tiny_family(family)), resolution=16))
    assert resolution_multiple(run.family, tiny_family(family)) == load_model(run, {}, None).resolution_multiple
