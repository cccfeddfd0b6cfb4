"""What becomes of the samples that a trainer took, at its ranks; and of an average that a checkpoint keeps."""

import pytest
import torch

from peer.loop.accounts import Accounts
from peer.loop.train import load_result
from swarm.errors import UserError


def test_ranks_without_a_source_keep_no_keys():
    """Some 100 bytes of each sample stayed, at each rank but the first: 1 GB of ten million."""
    accounts = Accounts(None)
    accounts.trained(["0:0:0"])
    accounts.set_aside(["0:0:1"])
    assert accounts.register(1) == "" and not accounts._open and not accounts._aside


def test_an_average_of_another_model_is_refused_and_of_the_same_goes_by_name():
    average = {"optimization_step": 3, "shadow_params": [torch.full((2,), 1.0), torch.full((2,), 2.0)]}
    loaded = {"params": {"a": torch.zeros(2), "b": torch.zeros(2)}, "average": {"average": average}}
    params = {"b": torch.zeros(2), "a": torch.zeros(2)}  # in another order, as another release may have them
    load_result(params, loaded)
    assert params["a"].tolist() == [1.0, 1.0] and params["b"].tolist() == [2.0, 2.0]
    with pytest.raises(UserError, match=r"not of this model: tensor b differs\. Give the base model it was made with as --model\.$"):
        load_result({"a": torch.zeros(2)}, loaded)
