"""LoHa and LoKr: the same first bits at every peer, also where layers are of odd shapes, and nothing changed yet."""

import pytest
import torch

from peer.launch.starting_model import load_model
from peer.rooms import load_part
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.methods.test_methods import CPU, losses


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """24 is factored into 4 and 6, 40 into 5 and 8, 56 into 7 and 8."""
    return tiny.write_model(tmp_path_factory.mktemp("odd"), channels=(24, 40))


@pytest.mark.parametrize(("method", "rank"), [("loha", 3), ("lokr", 3), ("lokr", 50)])
def test_layers_of_odd_shapes_begin_with_the_same_bits_at_peers_of_other_precisions(odd, method, rank):
    run = RunConfig(model=str(odd), method=method, rank=rank, resolution=16, lora_targets="all-linear+conv", train_text_encoder=True)
    found = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(len(found))
        model, part = load_model(run, {}, None), load_part("methods", method).build(run)
        part.begin(model)
        model.place(CPU, dtype)
        found.append((model, part.attach(model)))
    (model, one), (_, two) = found
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert {parameter.dtype for parameter in two.values()} == {torch.float32} and any(parameter.any() for parameter in one.values())
    if method == "lokr":
        (factor,) = [p for key, p in one.items() if key == "unet.down_blocks.1.resnets.0.conv1.lokr_w1.default"]
        assert factor.shape == (5, 4) and any("lokr_w2_a" in key for key in one) == (rank == 3)
    with torch.no_grad():
        torch.testing.assert_close(losses(model), losses(load_model(RunConfig(model=str(odd), resolution=16), {}, CPU)))
