"""Slices of a part's bytes hold what the codec puts there, and lead to the digest of the share that they are of, and to no other."""

import base64
import dataclasses

import numpy as np
import pytest
import torch

from peer.sync.engine.codec import PART_ELEMENTS, WIRES, Wire
from swarm.slices import MOST_ELEMENTS, MOST_PATH_BYTES, MOST_SLICE_BYTES, MOST_SLICES, tree_digest
from swarm.wrong_means import Place


def encoded(wire):
    return wire.encode(torch.randn(wire.size, generator=torch.Generator().manual_seed(7)))


def share_of(wire, data):
    parts = [memoryview(part.bytes_of(data).numpy()) for part in wire.parts]
    return parts, [part.layout.part_hash(view) for part, view in zip(wire.parts, parts, strict=True)]


def place(wire, position, number):
    layout = wire.parts[position].layout
    return Place(position=position, count=len(wire.parts), number=number, format=layout.format, elements=layout.elements)


@pytest.mark.parametrize("sizes", [(PART_ELEMENTS + 64 * 301, 5000), (70, 1), (0, 3), (64 * 2049, 0)])
@pytest.mark.parametrize("name", WIRES)
def test_the_slices_of_a_part_are_what_the_codec_decodes(name, sizes):
    wire = Wire(name, *sizes)
    data = encoded(wire)
    for part in wire.parts:
        layout, view, seen = part.layout, memoryview(part.bytes_of(data).numpy()), []
        decoded = part.decode(part.bytes_of(data)).numpy()
        for number in range(layout.slices):
            cut, places = layout.slice(view, number), layout.places(number)
            real = places < layout.elements
            assert len(cut) <= MOST_SLICE_BYTES
            np.testing.assert_allclose(layout.decode(number, cut)[real], decoded[places[real]], rtol=1e-6)
            seen += places[real].tolist()
        assert sorted(seen) == list(range(layout.elements)) and layout.slices <= MOST_SLICES


def test_a_part_is_as_long_as_is_thought():
    assert MOST_ELEMENTS == PART_ELEMENTS


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_a_slice_leads_to_its_share_and_to_no_other(count):
    wire = Wire("int8", (count - 1) * PART_ELEMENTS + 128, 0)
    parts, hashes = share_of(wire, encoded(wire))
    digest = tree_digest(hashes)
    for position in range(count):
        here = place(wire, position, wire.parts[position].layout.slices - 1)
        shown = here.show(parts[position], hashes)
        assert here.read(shown, digest) == wire.parts[position].layout.slice(parts[position], here.number)
        assert len(base64.b64decode(shown.path)) <= MOST_PATH_BYTES
        data = bytearray(base64.b64decode(shown.data))
        data[-1] ^= 1
        wrong = {
            "another byte": (here, dataclasses.replace(shown, data=base64.b64encode(data).decode()), digest),
            "another share": (here, shown, tree_digest([*hashes, hashes[0]])),
            "another number of parts": (dataclasses.replace(here, count=count + 1), shown, digest),
            "another format": (dataclasses.replace(here, format="fp32"), shown, digest),
            "another length": (dataclasses.replace(here, elements=here.elements - 1), shown, digest),
            "a longer path": (here, dataclasses.replace(shown, path=base64.b64encode(base64.b64decode(shown.path) + bytes(32)).decode()), digest),
            "a part that there is not": (dataclasses.replace(here, position=count), shown, digest),
            "a slice that there is not": (dataclasses.replace(here, number=here.layout.slices), shown, digest),
        }
        if count > 1:
            wrong["another part"] = dataclasses.replace(here, position=(position + 1) % count), shown, digest
        for name, (where, what, of) in wrong.items():
            with pytest.raises(ValueError):
                pytest.fail(f"{name}: {len(where.read(what, of))} bytes")


def test_another_order_of_parts_is_another_share():
    one, two = bytes(32), bytes(31) + b"1"
    assert tree_digest([one, two]) != tree_digest([two, one])


@pytest.mark.parametrize("name", WIRES)
def test_a_slice_of_another_length_or_that_is_not_finite_has_no_values(name):
    wire = Wire(name, 4096, 0)
    layout, view = wire.parts[0].layout, memoryview(encoded(wire).numpy())
    for cut in (layout.slice(view, 0)[:-1], layout.slice(view, 0) + b"\0", b""):
        with pytest.raises(ValueError, match="another length"):
            layout.decode(0, cut)
    with pytest.raises(ValueError, match="non-finite"):
        layout.decode(0, b"\xff\x7f" * 2 + b"\xff" * (len(layout.slice(view, 0)) - 4))  # a scale in front, or values: NaN

