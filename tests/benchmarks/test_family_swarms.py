"""What the benchmark of every family's swarm says of a LoRA, and of a family that there is not."""

import pytest
import torch

from benchmarks import family_swarms
from peer.launch.starting_model import load_model
from peer.rooms import load_part
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests import tiny


@pytest.mark.parametrize("family", ["sd", "z_image"])
def test_a_lora_draws_only_once_it_has_learned(tiny_family, tmp_path, family):
    run = RunConfig(model=str(tiny_family(family)), method="lora", rank=2)
    model, method = load_model(run, {}, torch.device("cpu")), load_part("methods", "lora").build(run)
    params = method.attach(model)
    method.export(model, params, tmp_path / "new")
    assert family_swarms.draws(family, tiny_family(family), tmp_path / "new") is False
    for parameter in params.values():
        parameter.data.fill_(0.3)
    method.export(model, params, tmp_path / "learned")
    assert family_swarms.draws(family, tiny_family(family), tmp_path / "learned") is True


def test_one_of_no_family_is_named():
    assert family_swarms.chosen("sd,flux") == ["sd", "flux"] and family_swarms.chosen("") == tiny.ONE_OF_EACH
    with pytest.raises(UserError, match="'sdxxl'") as raised:
        family_swarms.chosen("sd,sdxxl")
    assert "z_image" in raised.value.fix
