"""Flat vectors, and how they travel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from peer.sync.engine.codec import CODECS
from peer.sync.engine.vectors import Schema, SharedBuffer, flatten, shared_copy, unflatten

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def make_params() -> dict[str, nn.Parameter]:
    return {"b": nn.Parameter(torch.arange(6.0).view(2, 3)), "a": nn.Parameter(torch.tensor(7.0)), "c": nn.Parameter(torch.empty(0))}


def test_parameters_come_back_from_the_flat_vector_as_they_were():
    params, others = make_params(), make_params()
    vector = flatten(params, torch.empty(Schema.of(params).size))
    assert vector.tolist() == [7, 0, 1, 2, 3, 4, 5]
    for parameter in others.values():
        parameter.data.zero_()
    unflatten(vector, others)
    assert all(torch.equal(params[name], others[name]) for name in params)


def test_a_schema_tells_names_shapes_and_dtypes_apart_but_not_the_order():
    base = Schema.of(make_params())
    assert Schema.of(dict(reversed(make_params().items()))).digest == base.digest
    for other in (
        {**make_params(), "b": nn.Parameter(torch.zeros(3, 2))},
        {**make_params(), "b": nn.Parameter(torch.zeros(2, 3, dtype=torch.float16))},
        {"x" + name: parameter for name, parameter in make_params().items()},
    ):
        assert Schema.of(other).digest != base.digest


def test_a_shared_buffer_is_one_memory_for_all_who_map_it():
    import os

    first = shared_copy(torch.arange(4.0))
    second = SharedBuffer(fd=os.dup(first.fd))
    second.floats()[2] = 9
    view = first.floats()
    del first
    assert view.tolist() == [0, 1, 9, 3]


@given(st.lists(FLOATS, min_size=1, max_size=64))
def test_fp32_travels_bit_for_bit(values):
    vector, codec = torch.tensor(values, dtype=torch.float32), CODECS["fp32"]
    encoded = codec.encode(vector)
    assert encoded.dtype == torch.uint8 and encoded.numel() == 4 * len(values)
    assert torch.equal(codec.decode(encoded).view(torch.int32), vector.view(torch.int32))


@given(st.lists(FLOATS, min_size=1, max_size=64))
def test_fp16_loses_no_more_than_half_a_unit_in_the_last_place_and_clamps_what_it_cannot_hold(values):
    vector, codec = torch.tensor(values, dtype=torch.float32), CODECS["fp16"]
    decoded = codec.decode(codec.encode(vector))
    inside = vector.clamp(-65504, 65504)
    assert bool(((decoded - inside).abs() <= inside.abs() * 2**-11 + 2**-25).all())


@given(st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=64))
def test_what_fp16_lost_is_exactly_the_residual(values):
    vector, codec = torch.tensor(values, dtype=torch.float32), CODECS["fp16"]
    decoded = codec.decode(codec.encode(vector))
    assert torch.equal((vector - decoded) + decoded, vector)


@pytest.mark.parametrize("wire", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_refused(wire, value):
    codec = CODECS[wire]
    dtype = torch.float32 if wire == "fp32" else torch.float16
    with pytest.raises(ValueError, match="non-finite"):
        codec.decode(torch.tensor([1.0, value], dtype=dtype).view(torch.uint8))
