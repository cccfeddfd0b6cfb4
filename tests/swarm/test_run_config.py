import dataclasses

import pytest

from swarm.errors import UserError
from swarm.run.method import owners
from swarm.run_config import RunConfig
from swarm.run_identity import PLACES


def test_every_field_but_the_models_place_changes_the_digest():
    runs = {method: RunConfig(model="a", method=method) for method in ("full", "loha", "lora")}
    runs["textual_inversion"] = RunConfig(model="a", placeholder_token="<cat>", initializer_token="cat")
    owner = {name: names[0] for name, names in owners().items()}
    others = {
        int: lambda v: v + 1,
        float: lambda v: v / 2 + 0.01,
        bool: lambda v: not v,
        str: lambda v: v + "x",
        type(None): lambda v: True,
    }

    for field in dataclasses.fields(RunConfig):
        run = runs[owner.get(field.name, "full")]
        value = getattr(run, field.name)
        choices = [choice for choice in field.metadata["choices"] or () if choice not in (value, "auto")]
        changed = dataclasses.replace(run, **{field.name: choices[0] if choices else others[type(value)](value)})
        assert (changed.digest != run.digest) == (field.name not in PLACES), field.name


def test_a_word_that_stands_for_what_the_run_keeps_is_no_difference():
    run = RunConfig(family="flux", method="lora", lora_targets="attention", train_text_encoder=True)
    assert "to_k" in run.lora_targets and not run.differing({"lora_targets": "attention"})
    assert run.differing({"lora_targets": "attention+ff"}) == run.differing({"lora_targets": "all-linear+conv"}) == ["lora_targets"]


def test_it_survives_the_way_over_a_network():
    run = RunConfig(model="a", learning_rate=1e-3, random_flip=True)

    assert RunConfig.from_mapping(run.to_mapping(), where="here") == run


def test_an_unknown_key_is_refused():
    with pytest.raises(UserError, match=r"there: there is no option 'learning_rat'.*learning_rate"):
        RunConfig.from_mapping({"learning_rat": 1.0}, where="there")


@pytest.mark.parametrize(
    "values",
    [
        {"target_batch_size": 0},
        {"total_samples": -1},
        {"resolution": 0},
        {"learning_rate": 10.0},
        {"learning_rate": float("nan")},
        {"ucg": 2.0},
        {"adam_epsilon": float("inf")},
        {"adam_beta2": 1.0},
    ],
)
def test_values_out_of_bounds_are_refused(values):
    with pytest.raises(UserError, match=next(iter(values))):
        RunConfig.from_mapping(values, where="there")


def test_a_joiner_with_another_value_hears_which_one():
    run = RunConfig(resolution=512)

    run.refuse_differences({"resolution": 512})
    with pytest.raises(UserError, match="resolution = 512, but this peer was started with 640"):
        run.refuse_differences({"resolution": 640})


def test_a_joiner_may_hold_the_model_elsewhere():
    RunConfig(model="owner/name").refuse_differences({"model": "/somewhere/else"})


def test_a_run_that_knows_its_digest_is_written_down_as_one_that_does_not():
    run = RunConfig(model="m")
    before = run.to_mapping()
    assert run.digest == RunConfig.from_mapping(before, where="here").digest
    assert run.to_mapping() == before


@pytest.mark.parametrize(
    ("values", "method", "rate"),
    [
        ({}, "full", 5e-6),
        ({"method": "lora"}, "lora", 1e-4),
        ({"placeholder_token": "<cat>", "initializer_token": "cat"}, "textual_inversion", 5e-4),
        ({"method": "lora", "learning_rate": 3e-3}, "lora", 3e-3),
    ],
)
def test_what_is_left_open_is_decided_when_the_run_is_made(values, method, rate):
    run = RunConfig(**values)
    assert (run.method, run.learning_rate) == (method, rate)
    assert RunConfig.from_mapping(run.to_mapping(), where="here").digest == run.digest
    assert RunConfig(**values | {"method": method, "learning_rate": rate}).digest == run.digest
    run.refuse_differences({"method": "auto", "learning_rate": 0.0})
    with pytest.raises(UserError, match="method = "):
        run.refuse_differences({"method": "another"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 8}, r"rank is for --method loha or lokr or lora, but this run's method is full\. Add --method"),
        ({"method": "lora", "placeholder_token": "<cat>"}, "placeholder_token is for --method textual_inversion"),
        ({"learnable_property": "style"}, "learnable_property is for --method textual_inversion"),
        ({"method": "lora", "rank": 0}, r"rank is 0\. Use 1 or more"),
        ({"placeholder_token": "<cat>"}, r"initializer_token is '', but must be one word\. For example: --initializer_token 'toy'"),
        ({"placeholder_token": "a cat", "initializer_token": "cat"}, "placeholder_token is 'a cat', but must be one word"),
        ({"method": "textual_inversion", "initializer_token": "cat"}, "placeholder_token is ''"),
        ({"placeholder_token": "<cat>", "initializer_token": "cat", "num_vectors": 0}, "num_vectors is 0"),
        ({"placeholder_token": "<cat>", "initializer_token": "cat", "train_text_encoder": True}, "train_text_encoder is for --method full or loha or lokr or lora"),
    ],
)
def test_what_the_method_cannot_use_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        RunConfig(**values)


def test_another_total_is_refused_with_the_way_to_extend_the_run():
    run = RunConfig(run_name="digits", total_samples=1000)
    with pytest.raises(UserError, match="total_samples was 1000, now 2000") as raised:
        run.refuse_another({"total_samples": 2000})
    assert "extend --total_samples 2000" in raised.value.fix
    with pytest.raises(UserError) as raised:
        run.refuse_another({"total_samples": 2000, "run_name": "other"})
    assert "another --work_dir" in raised.value.fix
