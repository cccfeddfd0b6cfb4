"""A run keeps its id: whatever becomes of the program's options and defaults, in whichever version it is read."""

import dataclasses
import json
import random
import re
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from swarm import choices, run_defaults
from swarm.digest import digest_json
from swarm.errors import ExitCode, UserError
from swarm.options import option
from swarm.run_config import RunConfig
from swarm.version import VERSION, is_version, order

CONFIGURATIONS = {
    "nothing said": {},
    "a model at two places": {
        "model": "/models/sd15",
        "model_config": "owner/configs",
        "model_digest": "ab" * 32,
        "family": "stable_diffusion",
    },
    "full, cosine, buckets": {
        "method": "full",
        "family": "sdxl",
        "total_samples": 2**40,
        "lr_scheduler": "cosine",
        "lr_warmup_samples": 4096,
        "num_buckets": 16,
        "train_text_encoder": True,
        "center_crop": True,
    },
    "diloco, odd floats": {
        "sync": "diloco",
        "outer_learning_rate": 1 / 3,
        "outer_momentum": 0.1 + 0.2,
        "adam_epsilon": 5e-324,
        "learning_rate": 1.7976931e-30,
    },
    "gradients, whole floats": {
        "sync": "gradients",
        "wire": "fp32",
        "max_grad_norm": 2.0,
        "snr_gamma": 5.0,
        "lr_power": 1e16,
        "logit_mean": -3.0,
    },
    "alone": {"sync": "none", "optimizer": "adafactor", "seed": 0, "target_batch_size": 1},
    "lora": {
        "method": "lora",
        "rank": 64,
        "lora_alpha": 32.0,
        "lora_init": "uniform",
        "lora_targets": "",
        "wire": "int4",
        "family": "flux",
        "guidance_scale": 1.0,
        "weighting_scheme": "cosmap",
    },
    "a word": {
        "placeholder_token": "<süß>",
        "initializer_token": "toy",
        "learnable_property": "style",
        "num_vectors": 8,
        "run_name": 'Ж "quoted" \\ 猫',
    },
    "left to the model": {"prediction_type": "v_prediction", "rescale_betas_zero_snr": False, "clip_skip": 1},
    "said as the default": {"resolution": 512, "ucg": 0.1, "rescale_betas_zero_snr": None, "learning_rate": 5e-6, "logit_mean": -0.0},
}
CONFIGURATIONS = {name: {"clip_members": 0.0, **values} for name, values in CONFIGURATIONS.items()}  # as before there was a limit
DIGESTS = {  # by rule 1, as the programs before rule 2 computed them, and by rule 2
    "nothing said": (
        "782cd3be5209ec20597a66de967fbb532c1cb40c503efc735be8112b2c8776f1",
        "e37d143c1edaea07ae44f5971be2d1acc4468d8e56610270c26dc88ed539db1c",
    ),
    "a model at two places": (
        "0767e15cdb56f28aef49e72d2455995867bfd5b2f7a4115bce5167c1326897da",
        "49a6d3de1ebbcd1f91cc1e3069ca91a044d6ebcd760d3324929f18186636c176",
    ),
    "full, cosine, buckets": (
        "31d63419fc27e74f7cfb496006566e598b8da896d787519e03086cf8a266ed1c",
        "40ef7828b9b6c3a95ab32b41f8fd57e62924230ba67ed0fad9582991001e2af0",
    ),
    "diloco, odd floats": (
        "69f9a1cc675eea9b1f2102359036f37078bb6baceb7ea2b1cc4d1fa4b62e9f4e",
        "2ffbedaa47442ab46b66ad148c23fd810506f8a4915d3bd548a7522d75e2d106",
    ),
    "gradients, whole floats": (
        "6df1343e2bb74b76d45c889c737514019e7e0c42b7dc81e4001d9c10a84f0993",
        "268e9ffa5b883dd5de0020b51032ee51f2ba9c62e03b4c32c57140bf0ad4227a",
    ),
    "alone": (
        "d18f4247456fdeea84bb724d7c30fc203e3cd5e1423711e9aa5bea70f6210ee5",
        "4c3e530bd49b4450ff734df8156eae69c85dd3b2b696268cd991d136d168cdda",
    ),
    "lora": (
        "e68b7b745f01df9c857778ddd775a09f5cdbef4721d81ecf8ab5ee199550a8d4",
        "16836af7588ab04ac9a95505aedc366e4f49de7d8cfdb2b3389c18bb18808d49",
    ),
    "a word": (
        "8e1198e907b668b4ee40e1ca623ac641bd747f8e1e7b3275b902dcd596d31e19",
        "89a74947603854a210cdefe5a36af0ae5228a94c791fb0cf20180580f3c798df",
    ),
    "left to the model": (
        "1e3305dd77b555e268022d059df89eb38a80b2c8d7d10d54dac523800519e7ff",
        "fd98f3edd7305122185efac7d1272f0dbea5eb298e54af3de5553b58f8bb4e8b",
    ),
    "said as the default": (
        "0fb79aaae07681fb9f1aad88ec8842e9ed9623d8acf0844abbb1bef21c742ce1",
        "e37d143c1edaea07ae44f5971be2d1acc4468d8e56610270c26dc88ed539db1c",
    ),
}


def by_rule_1(run: RunConfig) -> RunConfig:
    """The same run, founded by a program of before rule 2: it sends all options that there were."""
    values = dataclasses.asdict(run)
    return RunConfig.from_mapping({name: values[name] for name in run_defaults.BY_VERSION["0.1.0"]}, where="here")


@dataclass(frozen=True, kw_only=True)
class Newer(RunConfig):
    """The run (as a program has it that is newer than this one: with an option more, and with another default)."""

    sparkle: float = option(0.5, "An option of the future.")
    rank: int = option(8, "A default that has changed.")


NEWER_VERSION = f"{order(VERSION)[0] + 1}.2"


@contextmanager
def newer_program():
    """Within it, the tables are those of the program that has `Newer`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(run_defaults.DEFAULTS, "sparkle", 0.5)
        patch.setitem(run_defaults.SINCE, "sparkle", NEWER_VERSION)
        patch.setitem(choices.METHODS, "dora", NEWER_VERSION)
        yield


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_ten_configurations_have_the_digests_that_they_always_had(name):
    run = RunConfig(**CONFIGURATIONS[name])
    assert (by_rule_1(run).digest, run.digest) == DIGESTS[name]


def test_the_frozen_defaults_are_frozen():
    assert digest_json(run_defaults.BY_VERSION["0.1.0"]) == "2f4aae704214ffbf556f44ea3662961bb26d68a121bdde1d2f1ad0be67b31a3b"
    assert len(run_defaults.BY_VERSION["0.1.0"]) == 60
    assert run_defaults.DEFAULTS["lora_init"] == "uniform" and run_defaults.SINCE["lora_init"] == "0.1.1"


def test_every_option_is_frozen_once_below_a_version_that_is_out():
    names = [name for options in run_defaults.BY_VERSION.values() for name in options]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(RunConfig))
    for version in [*run_defaults.BY_VERSION, *(since for table in choices.SINCE.values() for since in table.values())]:
        assert is_version(version) and order(version) <= order(VERSION), "raise the version in setup.cfg"


VALUES = {
    "averaging": "mean centered",
    "clip_grad": "global tensor none",
    "huber_schedule": "constant exponential snr",
    "image_interpolation_mode": "nearest bilinear bicubic lanczos box hamming",
    "learnable_property": "object style",
    "lora_init": "auto gaussian uniform",
    "loss_type": "l2 huber smooth_l1",
    "prediction_type": "auto epsilon v_prediction sample",
    "timestep_bias_strategy": "none earlier later range",
    "weighting_scheme": "none logit_normal mode sigma_sqrt cosmap",
    "wire": "fp32 fp16 int8 int4",
}
"""What 0.1.1 knows, of options whose values have no version of their own."""


def test_a_value_that_older_programs_do_not_know_has_its_version():
    named = {field.name: field.metadata["choices"] for field in dataclasses.fields(RunConfig) if field.metadata["choices"]}
    new = {name: set(values) - set(VALUES[name].split()) for name, values in named.items() if name not in choices.SINCE}
    assert not any(new.values()), f"{new}: give these options a table in SINCE of swarm/choices.py, so that a run asks for the right version"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_run_survives_any_number_of_ways_over_a_network(name):
    for run in (RunConfig(**CONFIGURATIONS[name]), by_rule_1(RunConfig(**CONFIGURATIONS[name]))):
        sent = json.dumps(run.to_mapping())
        read = RunConfig.from_mapping(json.loads(sent), where="there")
        assert read == run and read.digest == run.digest and json.dumps(read.to_mapping()) == sent
        moved = dataclasses.replace(read, model="elsewhere")
        assert moved.digest == run.digest and moved.sent == run.sent


def test_a_run_sends_only_what_differs():
    begun = RunConfig(clip_members=0.0)
    assert begun.to_mapping() == {"schema": 2, "needs_version": "0.1.0", "values": {"method": "full", "learning_rate": 5e-6}}
    assert RunConfig().to_mapping()["needs_version"] == "0.1.1" and RunConfig.from_mapping(begun.to_mapping(), where="there") == begun
    assert RunConfig(model="m", snr_gamma=5.0, sync="diloco").to_mapping()["values"] == {
        "model": "m", "clip_members": 20, "method": "full", "sync": "diloco", "learning_rate": 5e-6, "snr_gamma": 5,
    }  # fmt: skip


def test_a_lora_that_begins_now_begins_otherwise_than_those_of_version_0_1_0_and_says_so():
    begun = RunConfig.from_mapping({"schema": 2, "needs_version": "0.1.0", "values": {"method": "lora", "learning_rate": 1e-4}}, where="there")
    assert begun.lora_init == "uniform" and "lora_init" not in begun.to_mapping()["values"]
    sent = RunConfig(method="lora").to_mapping()
    assert sent["needs_version"] == "0.1.1" and sent["values"]["lora_init"] == "gaussian"
    assert not begun.differing({"lora_init": "auto"}) and begun.differing({"lora_init": "gaussian"})


def test_an_optimizer_that_is_new_and_a_rate_of_a_part_need_the_version_that_has_them():
    for options in ({"optimizer": "prodigy"}, {"train_text_encoder": True, "text_encoder_lr": 1e-6}, {"lr_scheduler": "cosine", "lr_min_ratio": 0.1}):
        assert RunConfig(clip_members=0.0, **options).to_mapping()["needs_version"] == "0.1.1"
    assert RunConfig(clip_members=0.0, optimizer="adafactor").to_mapping()["needs_version"] == "0.1.0"
    assert RunConfig(optimizer="prodigy").learning_rate == 1 and RunConfig(optimizer="lion8bit", method="lora").learning_rate == pytest.approx(2e-5)


def test_one_and_one_point_zero_are_the_same():
    assert RunConfig(lr_power=2).digest == RunConfig(lr_power=2.0).digest != RunConfig(lr_power=2.5).digest
    assert RunConfig(noise_offset=-0.0).digest == RunConfig().digest
    assert RunConfig(center_crop=True).digest != RunConfig(seed=1).digest


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_an_option_that_is_new_and_a_default_that_has_changed_change_no_run(name):
    for run in (RunConfig(**CONFIGURATIONS[name]), by_rule_1(RunConfig(**CONFIGURATIONS[name]))):
        sent = json.dumps(run.to_mapping())
        with newer_program():
            newer = Newer.from_mapping(json.loads(sent), where="there")
            assert newer.digest == run.digest and json.dumps(newer.to_mapping()) == sent
            assert (newer.rank, newer.sparkle) == (run.rank, 0.5)


def test_a_run_of_a_newer_program_that_uses_nothing_new_is_everybodys():
    with newer_program():
        newer = Newer(method="lora", lora_init="uniform", lora_targets="", clip_members=0.0)
        sent, digest = newer.to_mapping(), newer.digest
    assert sent["needs_version"] == "0.1.0" and sent["values"]["rank"] == 8
    run = RunConfig.from_mapping(sent, where="there")
    assert run.digest == digest and run.rank == 8


@pytest.mark.parametrize("used", [{"sparkle": 0.25}, {"method": "dora"}])
def test_a_run_that_uses_what_is_new_says_which_version_it_needs(used):
    with newer_program():
        sent = Newer(**used).to_mapping()
    with pytest.raises(UserError) as caught:
        RunConfig.from_mapping(sent, where="http://host")
    line = str(caught.value)
    assert line.startswith(f"http://host: the run needs version {NEWER_VERSION} of this program, and this is {VERSION}: ")
    assert next(iter(used.values() if "method" in used else used)) in line and "git pull" in line and "\n" not in line
    assert caught.value.code == ExitCode.CONFIG


def test_an_unknown_option_without_a_newer_version_is_a_mistake():
    for needs in (VERSION, "0.0.1", "9" * 40, "9.9\n9", 7, None, ["9.9"]):
        sent = {"schema": 2, "needs_version": needs, "values": {"learning_rat": 1.0}}
        with pytest.raises(UserError, match=r"^there: there is no option 'learning_rat'\. Did you mean 'learning_rate'"):
            RunConfig.from_mapping(sent, where="there")


def test_a_run_of_a_schema_to_come_names_its_version():
    with pytest.raises(UserError, match=re.escape(f"the run needs version {NEWER_VERSION} of this program")):
        RunConfig.from_mapping({"schema": 3, "needs_version": NEWER_VERSION, "values": {}, "more": 1}, where="there")


def test_nothing_that_a_stranger_writes_is_another_error():
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    names = ["schema", "needs_version", "values", "rank", "method", "model", "", "a b", "\x1b[2J", "x" * 100, 7, b"rank", None]
    junk = [None, True, 2, 2.0, -1, 2**70, float("nan"), "", "2", "\x1b[2J", [], {}, [1], {"rank": 1}, {7: 1}, {"values": {}}]
    for _ in range(2000):
        run = {rng.choice(names): rng.choice(junk) for _ in range(rng.randrange(5))}
        try:
            read = RunConfig.from_mapping(run, where="there")
        except UserError as error:
            assert "\x1b" not in str(error).replace(repr("\x1b[2J"), ""), f"seed {seed}: {run}"
        else:
            assert RunConfig.from_mapping(read.to_mapping(), where="there").digest == read.digest, f"seed {seed}: {run}"


def test_two_runs_never_share_a_digest():
    rng = random.Random(19)
    seen = {}
    for _ in range(500):
        values = {
            "seed": rng.randrange(4),
            "ucg": rng.choice([0.0, 0.1, 1.0]),
            "center_crop": rng.random() < 0.5,
            "run_name": rng.choice("ab"),
        }
        run = RunConfig(**values)
        for each in (run, by_rule_1(run), RunConfig.from_mapping(values, where="here")):
            assert seen.setdefault(each.digest, values) == values


def test_version_numbers_are_compared_as_numbers():
    assert order("0.10") > order("0.9.9") > order("0.9") == order("0.9.0") and order("1.0") == (1,)
    assert is_version(VERSION) and not any(map(is_version, ("", "1.", "1.x", "1.2.3.4.5", 1, None, "1\n")))
