"""What is cast is as the original was when its mould was made, and its own."""

import torch
from torch import nn

from tests import tiny
from tests.tiny.moulds import Mould


def test_casts_are_the_original_as_it_was_and_own_their_tensors():
    original = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
    original[1].weight.requires_grad_(True)
    mould, before = Mould(original), [tensor.clone() for tensor in original.state_dict().values()]
    with torch.no_grad():
        original[0].weight.add_(1)
        mould.cast()[0].weight.add_(2)
    cast = mould.cast()
    assert all(map(torch.equal, before, cast.state_dict().values())) and len(before) == len(cast.state_dict()) == 7
    assert [parameter.requires_grad for parameter in cast.parameters()] == [False, False, True, False]
    assert [type(parameter) for parameter in cast.parameters()] == [nn.Parameter] * 4


def test_a_tensor_in_two_places_stays_one_and_functions_are_themselves():
    words = nn.Embedding(4, 2)
    kept = Mould({"words": words, "answers": nn.ParameterList([words.weight]), "call": lambda: "called"}).cast()
    assert kept["words"].weight is kept["answers"][0] is not words.weight and kept["call"]() == "called"


def test_tensors_that_share_memory_share_it_in_a_cast_too():
    whole = torch.arange(4.0)
    kept, last = Mould([whole, whole[2:]]).cast()
    kept.mul_(2)
    assert last.tolist() == [4.0, 6.0] and whole.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_pipelines_cast_learns_words_that_the_next_one_does_not_know():
    first, second = tiny.build("sd"), tiny.build("sd")
    first.tokenizer.add_tokens(["<dicoo>"])
    first.scheduler.register_to_config(prediction_type="sample")
    assert "<dicoo>" in first.tokenizer.get_vocab() and "<dicoo>" not in second.tokenizer.get_vocab()
    assert (first.scheduler.config.prediction_type, second.scheduler.config.prediction_type) == ("sample", "epsilon")
    assert first.components["unet"] is first.unet is not second.unet
