"""DoRA (`--use_dora`): the lengths that it trains begin with equal bits at peers that hold the model in other precisions."""

import dataclasses
import math

import pytest
import torch

from peer.methods.lora import _lengths
from tests.peer.test_alone import RUN, flat, start  # noqa: F401


@pytest.mark.parametrize("shape", [(5, 1), (3, 7), (4, 320), (2, 3, 3, 3), (3, 1281)])
def test_lengths_are_rounded_once_whatever_the_order_in_memory(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    found = _lengths(weight)
    exact = [math.sqrt(math.fsum(value * value for value in row)) for row in weight.flatten(1).double().tolist()]
    assert torch.equal(found, torch.tensor(exact, dtype=torch.float64).float()) and found.shape == shape[:1]
    assert torch.equal(found, _lengths(weight.transpose(0, 1).contiguous().transpose(0, 1)))


def test_peers_of_other_precisions_begin_with_the_same_bits(start):  # noqa: F811
    run = dataclasses.replace(RUN, method="lora", use_dora=True, rank=2)
    exact, rough = (start(name, run=run, mixed_precision=name).trainer for name in ("no", "bf16"))
    assert torch.equal(flat(exact.params), flat(rough.params))
    held = rough.model.parts["unet"].get_submodule("mid_block.attentions.0.transformer_blocks.0.attn1.to_q")
    name = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora_magnitude_vector.default.weight"
    assert held.base_layer.weight.dtype == torch.bfloat16 and not torch.equal(_lengths(held.base_layer.weight), rough.params[name])
