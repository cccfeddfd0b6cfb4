"""Flat vectors, and how they travel."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from peer.sync.engine.codec import LEAST_ELEMENTS, PART_ELEMENTS, WIRES, Wire, add_up, square_norm
from peer.sync.engine.vectors import BIG_ELEMENTS, Flat, Reused, Schema, SharedBuffer, flatten
from swarm.run_config import RunConfig
from tests.peer.sync.swarm_tools import shared_copy

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def make_params() -> dict[str, nn.Parameter]:
    return {"b": nn.Parameter(torch.arange(6.0).view(2, 3)), "a": nn.Parameter(torch.tensor(7.0)), "c": nn.Parameter(torch.empty(0))}


def test_parameters_come_back_from_the_flat_vector_as_they_were():
    params, others = make_params(), make_params()
    vector = flatten(params, torch.empty(Schema.of(params).size))
    assert vector.tolist() == [7, 0, 1, 2, 3, 4, 5]
    for parameter in others.values():
        parameter.data.zero_()
    Flat(others).write(0, vector)
    assert all(torch.equal(params[name], others[name]) for name in params)


def test_large_tensors_come_first_so_that_blocks_never_hold_small_ones():
    params = {
        "a": nn.Parameter(torch.full((2,), 1.0)),
        "b": nn.Parameter(torch.full((BIG_ELEMENTS,), 2.0)),
        "c": nn.Parameter(torch.zeros(0)),
    }
    schema = Schema.of(params)
    assert (schema.big_size, schema.size) == (BIG_ELEMENTS, BIG_ELEMENTS + 2)
    assert flatten(params, torch.empty(schema.size)).tolist() == [2.0] * BIG_ELEMENTS + [1.0] * 2
    wire = Wire.of("int4", schema)
    assert [(part.start, part.end) for part in wire.parts] == [(0, BIG_ELEMENTS), (BIG_ELEMENTS, BIG_ELEMENTS + 2)]
    assert [part.num_bytes for part in wire.parts] == [BIG_ELEMENTS // 64 * 34, 2 * 2]


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


VALUES = st.lists(FLOATS, min_size=1, max_size=200)
BLOCK, LARGEST_CODE = {"int8": 128, "int4": 64}, {"int8": 127, "int4": 7}
LOSSY = [name for name in WIRES if name != "fp32"]


def there_and_back(name: str, vector: torch.Tensor) -> torch.Tensor:
    wire = Wire(name, vector.numel())
    return wire.decode(wire.encode(vector))


def test_the_wires_of_a_run_are_those_that_there_are():
    (field,) = (field for field in dataclasses.fields(RunConfig) if field.name == "wire")
    assert tuple(field.metadata["choices"]) == WIRES


@given(VALUES)
def test_fp32_travels_bit_for_bit(values):
    vector = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(there_and_back("fp32", vector).view(torch.int32), vector.view(torch.int32))


@given(VALUES)
def test_fp16_loses_no_more_than_half_a_unit_in_the_last_place_and_clamps_what_it_cannot_hold(values):
    vector = torch.tensor(values, dtype=torch.float32)
    inside = vector.clamp(-65504, 65504)
    assert bool(((there_and_back("fp16", vector) - inside).abs() <= inside.abs() * 2**-11 + 2**-25).all())


@pytest.mark.parametrize("name", BLOCK)
@given(values=VALUES)
def test_blocks_lose_no_more_than_half_a_step_of_their_largest_value(name, values):
    vector = torch.tensor(values, dtype=torch.float32).clamp(-(2.0**100), 2.0**100)
    decoded = there_and_back(name, vector)
    for block, back in zip(vector.double().split(BLOCK[name]), decoded.double().split(BLOCK[name]), strict=True):
        # The scale is rounded up to 8 bits; a block below the smallest scale is zero.
        bound = float(block.abs().max()) / LARGEST_CODE[name] / 2 * (1 + 2**-7) * (1 + 2**-20)
        assert float((block - back).abs().max()) <= max(bound, 2.0**-126 * LARGEST_CODE[name])


@pytest.mark.parametrize("name", LOSSY)
@given(values=VALUES)
def test_what_no_codec_can_hold_is_clamped_and_nothing_overflows(name, values):
    assert bool(there_and_back(name, torch.tensor(values, dtype=torch.float32) * 3e38).isfinite().all())


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-38, 2.0**-126])
def test_zeros_and_subnormals_come_back_near_zero(name, value):
    decoded = there_and_back(name, torch.full((130,), value))
    assert bool(((decoded - value).abs() <= 2.0**-24).all())


@pytest.mark.parametrize("name", LOSSY)
@given(rounds=st.lists(st.lists(st.floats(-1, 1, width=32), min_size=7, max_size=7), min_size=1, max_size=6))
def test_with_error_feedback_what_was_sent_and_what_remains_is_the_sum_of_the_contributions(name, rounds):
    wire, residual, sent, whole = Wire(name, 70), torch.zeros(70), torch.zeros(70).double(), torch.zeros(70).double()
    for values in rounds:
        contribution = torch.tensor(values, dtype=torch.float32).repeat(10) + residual
        whole += contribution.double() - residual.double()
        decoded = wire.decode(wire.encode(contribution))
        residual = contribution - decoded
        sent += decoded.double()
    assert torch.allclose(sent + residual.double(), whole, rtol=0, atol=1e-6)
    # And what remains does not grow with the rounds: less than one step of the coarsest codec.
    assert float(residual.abs().max()) <= 0.25


@pytest.mark.parametrize("size, count, longest", [
    (768, 1, 768), (5 * LEAST_ELEMENTS, 5, LEAST_ELEMENTS), (1_600_000, 33, 3 * LEAST_ELEMENTS), (3000 * PART_ELEMENTS, 3000, PART_ELEMENTS),
])  # fmt: skip
def test_a_short_vector_travels_in_shorter_parts(size, count, longest):
    parts = Wire("int8", size).parts
    assert (len(parts), max(part.end - part.start for part in parts)) == (count, longest)


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("sizes", [(1, 0), (0, 1), (63, 0), (65, 3), (PART_ELEMENTS, 0), (2 * PART_ELEMENTS + 77, 1001)])
def test_encoding_by_parts_and_twice_gives_the_same_bytes(name, sizes, seed):
    wire = Wire(name, *sizes)
    vector = torch.randn(wire.size, generator=torch.Generator().manual_seed(seed))
    encoded = wire.encode(vector)
    assert encoded.numel() == wire.num_bytes and torch.equal(encoded, wire.encode(vector.clone()))
    assert torch.equal(encoded, torch.cat([part.encode(part.of(vector).clone()) for part in wire.parts]))
    decoded = wire.decode(encoded)
    assert torch.equal(decoded, torch.cat([part.decode(part.bytes_of(encoded)) for part in wire.parts]))
    assert all(part.end - part.start <= PART_ELEMENTS for part in wire.parts)
    assert wire.square_norm(encoded) == pytest.approx(float(decoded.double().square().sum()))
    scale = (1 + 2**-7) * float(vector.abs().max())  # rounded up to a bfloat16
    assert (
        float((decoded - vector).abs().max())
        <= {"fp32": 0, "fp16": scale * 2**-11 + 2**-25, "int8": scale / 127 / 2, "int4": scale / 7 / 2}[name]
    )


def test_sums_of_squares_are_rounded_once_in_every_python():
    # `sum` gives 1.0 before Python 3.12.
    assert add_up([1.0, 2**-53, 2**-53]) == add_up([2**-53, 1.0, 2**-53]) == 1 + 2**-52


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_refused(name, value):
    kind = {"fp32": torch.float32, "fp16": torch.float16}.get(name, torch.bfloat16)
    wire = Wire(name, 128)
    data = wire.encode(torch.ones(128))
    data.view(kind)[0] = value
    with pytest.raises(ValueError, match="non-finite"):
        wire.decode(data)


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1])
def test_a_nan_that_is_encoded_is_refused_when_it_is_decoded(name, bits):
    vector = torch.ones(300)
    vector.view(torch.int32)[200] = bits
    with pytest.raises(ValueError, match="non-finite"):
        there_and_back(name, vector)


@pytest.mark.parametrize("name", BLOCK)
@pytest.mark.parametrize("scale", [-1.0, 2.0**101])
def test_scales_that_no_peer_of_ours_makes_are_refused(name, scale):
    wire = Wire(name, 384)
    data = wire.encode(torch.ones(384))
    data.view(torch.bfloat16)[1] = scale
    with pytest.raises(ValueError, match="scales out of range"):
        wire.decode(data)


@pytest.mark.parametrize("name", WIRES)
def test_a_wrong_length_is_refused(name):
    wire = Wire(name, 300)
    data = wire.encode(torch.ones(300))
    for wrong in (data[:-2], torch.cat([data, data]), data[:0]):
        with pytest.raises(ValueError, match="bytes instead of"):
            wire.decode(wrong)
        with pytest.raises(ValueError, match="bytes instead of"):
            wire.parts[0].check_length(wrong)


def test_a_sum_of_squares_does_not_overflow():
    assert square_norm(torch.tensor([3e38, -3e38])) == pytest.approx(1.8e77)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.booleans()), min_size=1, max_size=6), st.data())
def test_slices_of_tensors_are_those_of_the_flat_vector_whatever_their_strides(shapes, data):
    def tensor(rows, columns, transposed):
        return torch.randn(columns, rows).to(torch.float16).t() if transposed else torch.randn(rows, columns)

    params = {f"t{index}": nn.Parameter(tensor(*shape)) for index, shape in enumerate(shapes)}
    size = sum(rows * columns for rows, columns, _ in shapes)
    vector, flat = flatten(params, torch.empty(size)), Flat(params)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    assert torch.equal(flat.read(start, end), vector[start:end])
    vector[start:end] = torch.arange(end - start)
    flat.write(start, vector[start:end])
    assert torch.equal(flatten(params, torch.empty(size)), vector)
    before, after = torch.randn(end - start), torch.randn(end - start)
    learned = flat.minus(start, before)
    assert torch.equal(learned, vector[start:end] - before)
    flat.move(start, before, after)
    moved = flat.read(start, end)
    flat.write(start, after + learned)
    assert torch.equal(flat.read(start, end), moved), "in place or not, the same bits"
    vector[start:end] = moved
    assert torch.equal(flatten(params, torch.empty(size)), vector)


@pytest.mark.parametrize("num_bytes", [0, 1, 5 << 20])
def test_memory_is_used_again_only_when_no_tensor_is_left_on_it(num_bytes):
    memory = Reused(num_bytes)
    first, second = memory.take().fill_(7), memory.take().fill_(8)
    assert first.shape == second.shape == (num_bytes,)
    assert bool((first == 7).all()) and bool((second == 8).all())
    part, place = memoryview(first[num_bytes // 2 :].numpy()), first.data_ptr()
    del first
    third = memory.take().fill_(9)
    assert all(value == 7 for value in part[:10]) and bool((third == 9).all()), "a view keeps it"
    del part
    fourth = memory.take()
    assert fourth.data_ptr() == place or not num_bytes


def test_halves_whose_sum_no_half_holds_are_encoded_all_the_same():
    vector = torch.full((300,), 60_000.0)
    assert torch.equal(there_and_back("fp16", vector), vector.half().float())
