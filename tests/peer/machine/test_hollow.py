"""Tensors without numbers compute as real ones do, as far as shapes, formats and memory go."""

import gc
import weakref

import pytest
import torch
from torch import nn

from peer.machine.hollow import Hollow, hollow, storage_of

CPU = torch.device("cpu")


def test_they_say_what_real_ones_say_under_autocast_too():
    real = nn.Parameter(torch.randn(4, 3))
    for dtype in (None, torch.bfloat16):
        told = []
        for weight in (real, hollow(real)):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                answer = torch.ones(2, 3) @ weight.t()
            (gradient,) = torch.autograd.grad(answer.sum(), weight)
            told.append([(each.shape, each.stride(), each.dtype, each.device) for each in (answer, gradient)])
        assert told[0] == told[1] and isinstance(gradient, Hollow) and isinstance(hollow(real), nn.Parameter)


def test_views_have_the_memory_of_what_they_are_of_and_what_is_changed_in_place_stays_the_same_tensor():
    one = hollow(torch.zeros(4, 6))
    assert storage_of(one.t()[1:]) is storage_of(one) and storage_of(one.clone()) is not storage_of(one)
    view = one[:2]
    assert view.add_(1) is view and one.copy_(torch.ones(4, 6)) is one
    with pytest.raises(AssertionError, match="a hollow tensor keeps its shape"):
        one.t_()


def test_where_one_is_made_where_another_says_it_has_no_numbers_either():
    one = hollow(torch.zeros(2, 3))
    made = (
        torch.zeros_like(one), one.new_empty(5), one.to(CPU, torch.float16), one.to(torch.float16), torch.randn_like(one),
        one.uniform_(generator=torch.Generator()),
    )  # fmt: skip
    assert all(isinstance(each, Hollow) and each.device == CPU for each in made)
    assert [each.dtype for each in made[2:4]] == [torch.float16] * 2


def test_a_mask_hides_nothing_and_another_number_is_not_there():
    one = hollow(torch.zeros(2, 3))
    assert bool((one > 0).all()) and one[one > 0].shape == one[torch.tensor([True, False])].reshape(-1).shape == (6,)
    with pytest.raises(TypeError, match=r"a number of Hollow\(shape=\(\), dtype=torch.float32\) is asked for"):
        one.sum().item()


def test_what_an_operation_was_given_is_let_go_at_once():
    """Else all that flows through a model would be counted as if it were kept."""
    gc.collect()
    gc.disable()
    try:
        one = hollow(torch.zeros(2, 3))
        given = weakref.ref(storage_of(one))
        torch.cat([one, torch.ones(1, 3)])
        del one
        assert given() is None
    finally:
        gc.enable()
