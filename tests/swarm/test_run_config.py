import dataclasses

import pytest

from swarm.errors import UserError
from swarm.run_config import RunConfig


def test_every_field_but_the_models_place_changes_the_digest():
    run = RunConfig(model="a")
    others = {int: lambda v: v + 1, float: lambda v: v / 2 + 0.01, bool: lambda v: not v, str: lambda v: v + "x"}

    for field in dataclasses.fields(RunConfig):
        value = getattr(run, field.name)
        changed = dataclasses.replace(run, **{field.name: others[type(value)](value)})
        assert (changed.digest != run.digest) == (field.name not in ("model", "model_config")), field.name


def test_it_survives_the_way_over_a_network():
    run = RunConfig(model="a", learning_rate=1e-3, random_flip=True)

    assert RunConfig.from_mapping(dataclasses.asdict(run), where="here") == run


def test_an_unknown_key_is_refused():
    with pytest.raises(UserError, match=r"there: there is no option 'learning_rat'.*learning_rate"):
        RunConfig.from_mapping({"learning_rat": 1.0}, where="there")


@pytest.mark.parametrize(
    "values",
    [
        {"target_batch_size": 0},
        {"total_samples": -1},
        {"resolution": 0},
        {"learning_rate": 0.0},
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
    before = dataclasses.asdict(run)
    assert run.digest == RunConfig.from_mapping(before, where="here").digest
    assert dataclasses.asdict(run) == before
